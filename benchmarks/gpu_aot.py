"""Compiles the GPU kernels without a GPU and reads registers, spills and shared memory.

Needs the CUDA plugin of the installed jax (extras cuda12, cuda13) and its `ptxas`; no driver and
no device. XLA compiles for a target described in text; its dump gives the PTX and the launch
sizes, and ptxas -v says what the machine code uses. jax 0.10 writes that PTX; jax 0.11 compiles the
same kernels and leaves their PTX out of the dump, so there the figures are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gpu, gpu_tables
from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch

# Public figures of one part per generation: (name, multiprocessors, shared memory per
# multiprocessor and per block at most, bytes/s, L2 bytes).
_PARTS = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 167936, 166912, 2_039_000_000_000, 41943040),
    89: ("NVIDIA L40S", 142, 102400, 101376, 864_000_000_000, 100663296),
    90: ("NVIDIA H200", 132, 233472, 232448, 4_800_000_000_000, 62914560),
    100: ("NVIDIA B200", 148, 233472, 232448, 8_000_000_000_000, 132644864),
}


def target_config(capability: int) -> str:
    """XLA's description of a GPU of this compute capability, as a text proto."""
    name, cores, shared, shared_block, bandwidth, l2 = _PARTS[capability]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  clock_rate_ghz: 1.5 device_memory_size: 80000000000
  shared_memory_per_block_optin: {shared_block}
  cuda_compute_capability {{ major: {capability // 10} minor: {capability % 10} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
runtime_version {{ major: 13 }} platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one kernel of a compiled program takes.

    Attributes:
      name: of the kernel.
      registers: per thread.
      spill_bytes: stored to local memory per thread because registers ran out.
      shared_bytes: of shared memory per program.
      threads: per program.
      programs_per_core: programs that fit on a multiprocessor at once.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    programs_per_core: int


def mesh_for(capability: int) -> jax.sharding.Mesh:
    """A mesh of one described device; needs the CUDA plugin."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        "any", "cuda", target_config=target_config(capability), topology="1x1x1"
    )
    return jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of one attention call: rows, tokens, pages per row, and the cache."""

    spec: KVCacheSpec
    config: AttentionConfig
    num_q_heads: int
    rows: int
    tokens: int
    pages_per_row: int
    q_dtype: Any = jnp.bfloat16
    sinks: bool = False


def compile_attend(shape: Shape, capability: int, dump: Path | None = None) -> Any:
    """`gpu.attend` compiled for a target, pages donated; XLA's dump goes to `dump`."""
    mesh = mesh_for(capability)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(dims: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    spec, rows, tokens = shape.spec, shape.rows, shape.tokens
    heads = (spec.num_kv_heads, spec.head_dim)
    batch = RaggedBatch(
        array((rows + 1,)),
        array((rows,)),
        array((rows, shape.pages_per_row)),
        array((1,)),
        array((1,)),
        array((tokens,)),
        array((tokens,)),
    )
    pages = jax.tree.map(
        lambda leaf: array(leaf.shape, leaf.dtype),
        jax.eval_shape(functools.partial(gpu.init_kv_pages, spec)),
    )
    options: dict[str, Any] = {}
    if jnp.dtype(spec.dtype).itemsize == 1:
        scale = array((spec.num_kv_heads,), jnp.float32)
        options = {"k_scale": scale, "v_scale": scale}
    if shape.sinks:
        options["sinks"] = array((shape.num_q_heads,), jnp.float32)
    step = jax.jit(
        functools.partial(gpu.attend, spec=spec, config=shape.config), donate_argnums=(3,)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), gpu_tables.target(capability):
        lowered = step.lower(
            array((tokens, shape.num_q_heads, spec.head_dim), shape.q_dtype),
            array((tokens, *heads), shape.q_dtype),
            array((tokens, *heads), shape.q_dtype),
            pages,
            batch,
            **options,
        )
        dumping = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True} if dump else None
        return lowered.compile(compiler_options=dumping)


def ptxas() -> str:
    """Path of the assembler that the CUDA packages bring."""
    found = importlib.util.find_spec("nvidia")
    for root in [] if found is None else list(found.submodule_search_locations or []):
        for path in sorted(Path(root).glob("*/bin/ptxas")):
            return str(path)
    raise FileNotFoundError("ptxas was not found: install nvidia-cuda-nvcc beside jax's plugin")


def kernel_figures(dump: Path, capability: int) -> list[Figures]:
    """Figures of every Pallas kernel in a dump.

    Raises:
      RuntimeError: a kernel is launched whose PTX is not in the dump.
    """
    launches = {}
    for path in sorted(dump.glob("*thunk_sequence.txt")):
        pattern = r"(\w+) grid: \[.*?\] threads: \[(\d+), .*?shared_memory: (\d+)"
        for name, threads, shared in re.findall(pattern, path.read_text()):
            launches[name] = (int(threads), int(shared))
    figures = []
    for path in sorted(dump.glob("*.ptx")):
        text = path.read_text()
        entries = re.findall(r"\.entry (\w+)\(", text)
        target = re.search(r"\.target (sm_\w+)", text)
        if not entries or target is None:
            continue
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            run = subprocess.run(
                [ptxas(), "-v", f"--gpu-name={target[1]}", str(path), "-o", cubin.name],
                capture_output=True,
                text=True,
                check=True,
            )
        for name, body in re.findall(
            r"entry function '(\w+)'.*?\n(.*?Used .*?\n)", run.stderr, re.DOTALL
        ):
            if name not in launches:
                continue
            registers = int(re.findall(r"Used (\d+) registers", body)[0])
            spills = int(re.findall(r"(\d+) bytes spill stores", body)[0])
            threads, shared = launches[name]
            figures.append(
                Figures(
                    name,
                    registers,
                    spills,
                    shared,
                    threads,
                    _fitting(registers, shared, threads, capability),
                )
            )
    if missing := sorted(set(launches) - {f.name for f in figures}):
        raise RuntimeError(
            f"the dump of jax {jax.__version__} has no PTX of {', '.join(missing)}; "
            "jax 0.10 writes it"
        )
    if not figures:
        raise RuntimeError(f"the dump of jax {jax.__version__} names no kernel at all")
    return figures


def _fitting(registers: int, shared: int, threads: int, capability: int) -> int:
    """Programs on one multiprocessor: registers go in steps of 8, 1 KiB of memory is reserved."""
    _, _, shared_core, _, _, _ = _PARTS[capability]
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    by_shared = shared_core // (shared + 1024)
    return min(by_registers, by_shared, 2048 // threads, 32)


def standard_shapes() -> dict[str, Shape]:
    """The calls whose figures the docs give."""

    def shape(
        *,
        head_dim: int = 128,
        kv_dtype: Any = jnp.bfloat16,
        q_dtype: Any = jnp.bfloat16,
        rows: int = 128,
        tokens: int = 128,
        decode_only: bool = True,
        group: int = 4,
        **config: Any,
    ) -> Shape:
        return Shape(
            KVCacheSpec(4096, 16, 8, head_dim, kv_dtype),
            AttentionConfig(head_dim**-0.5, max_query_len=1 if decode_only else None, **config),
            8 * group,
            rows,
            tokens,
            256,
            q_dtype,
        )

    return {
        "decode d64": shape(head_dim=64),
        "decode d80": shape(head_dim=80),
        "decode d128": shape(),
        "decode d256": shape(head_dim=256),
        "decode d128 split": shape(rows=4, tokens=4),
        "decode d128 int8": shape(kv_dtype=jnp.int8),
        "decode d128 fp8": shape(kv_dtype=jnp.float8_e4m3fn),
        "decode d128 window cap": shape(sliding_window=1024, soft_cap=30.0),
        **{
            f"decode d{d} f32": shape(head_dim=d, kv_dtype=jnp.float32, q_dtype=jnp.float32)
            for d in (64, 128, 256)
        },
        "mixed d64": shape(head_dim=64, tokens=2048, decode_only=False),
        "mixed d128": shape(tokens=2048, decode_only=False),
        "mixed d256": shape(head_dim=256, tokens=2048, decode_only=False),
        "mixed d128 int8": shape(kv_dtype=jnp.int8, tokens=2048, decode_only=False),
        "mixed d128 window cap": shape(
            sliding_window=1024, soft_cap=30.0, tokens=2048, decode_only=False
        ),
        **{
            f"mixed d{d} f32": shape(
                head_dim=d,
                kv_dtype=jnp.float32,
                q_dtype=jnp.float32,
                tokens=2048,
                decode_only=False,
            )
            for d in (64, 128, 256)
        },
    }


def main(argv: list[str]) -> int:
    """Prints a Markdown table; arguments: compute capabilities (default 80 90), then name parts."""
    capabilities = [int(arg) for arg in argv if arg.isdigit()] or [80, 90]
    wanted = [arg for arg in argv if not arg.isdigit()]
    print(
        "| target | call | kernel | registers | spilled bytes | shared KiB | threads | programs |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for capability in capabilities:
        for name, shape in standard_shapes().items():
            if wanted and not any(part in name for part in wanted):
                continue
            fp8 = jnp.dtype(shape.spec.dtype) == jnp.float8_e4m3fn
            if fp8 and capability < gpu_tables.FP8_COMPUTE_CAPABILITY:
                continue
            with tempfile.TemporaryDirectory() as dump:
                compile_attend(shape, capability, Path(dump))
                for f in kernel_figures(Path(dump), capability):
                    print(
                        f"| sm_{capability} | {name} | {f.name} | {f.registers} | {f.spill_bytes} "
                        f"| {f.shared_bytes / 1024:.1f} | {f.threads} | {f.programs_per_core} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    sys.exit(main(sys.argv[1:]))
