"""Compares the TPU attention kernels with JAX's ragged_paged_attention without a TPU.

Both are compiled ahead of time; executed bundles follow from the dumped code (tpu_bundles) and
from how often each loop runs, DMA bytes from the pages each kernel copies:

    python -m benchmarks.tpu_cycles --topology v5e:1x1 --output cycles.md

JAX's kernel takes the best, by bundles, of its own tuned block sizes and some others.

What it cannot see: stalls on DMA and on VMEM banks, clock throttling, the time between kernels.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.tpu_bundles import Program, find_dump, read_program
from benchmarks.tpu_cycle_model import (
    decode_runs,
    decode_segments,
    prefill_runs,
    prefill_segments,
)

_TOPOLOGY = flags.DEFINE_string("topology", "v5e:1x1", "TPU to compile for.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", 16, "Tokens per page.")
_ONLY = flags.DEFINE_string("only", "", "Run the shapes whose name contains this.")
_TIMEOUT = flags.DEFINE_integer("timeout", 600, "Seconds for one compile.")
_OUTPUT = flags.DEFINE_string("output", None, "Write the table here as well.")
_COMPILE = flags.DEFINE_string("compile", None, "Internal: compile this JSON description and exit.")


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one core: HBM bytes and bfloat16 operations per second, clock in Hz."""

    bandwidth: float
    flops: float
    clock: float
    tuned_name: str  # in the table of JAX's kernel


CHIPS = {
    "v5e": Chip(819e9, 197e12, 1.5e9, "TPU v5"),
    "v6e": Chip(1640e9, 918e12, 1.75e9, "TPU v6"),
}
HEADS = {"8b": (32, 8), "70b_tp8": (8, 1)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of (query length, context length) and the heads; head size 128, bfloat16."""

    name: str
    rows: tuple[tuple[int, int], ...]
    q_heads: int
    kv_heads: int
    page_size: int

    @property
    def decode(self) -> bool:
        return all(q_len == 1 for q_len, _ in self.rows)

    @property
    def tokens(self) -> int:
        return sum(q_len for q_len, _ in self.rows)

    @property
    def page_bytes(self) -> int:
        return self.page_size * 2 * self.kv_heads * 128 * 2

    @property
    def pages(self) -> list[int]:
        return [-(-kv_len // self.page_size) for _, kv_len in self.rows]

    @property
    def activation_bytes(self) -> int:
        """Queries and outputs."""
        return 2 * self.tokens * self.q_heads * 128 * 2

    @property
    def needed_bytes(self) -> int:
        """Live pages, queries and outputs, each once."""
        return sum(self.pages) * self.page_bytes + self.activation_bytes

    @property
    def flops(self) -> float:
        """Multiply-adds under the causal mask, counted twice."""
        pairs = sum(q * kv - q * (q - 1) / 2 for q, kv in self.rows)
        return 4.0 * pairs * self.q_heads * 128


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call executes and copies."""

    bundles: float
    dma_bytes: float
    spills: float
    detail: str


def shapes(page_size: int) -> list[Shape]:
    """The shapes compared."""
    found = []
    for heads, (q_heads, kv_heads) in HEADS.items():
        for context in (1024, 4096):
            for rows in (8, 32, 128):
                name = f"{heads}_decode_{rows}x{context}"
                found.append(Shape(name, ((1, context),) * rows, q_heads, kv_heads, page_size))
        name = f"{heads}_prefill_2048"
        found.append(Shape(name, ((2048, 2048),), q_heads, kv_heads, page_size))
    return found


def theirs_segments(program: Program, trips: Sequence[float]) -> list[float]:
    """Runs of JAX's kernel: segments by the loop they lie in; its branches taken each time."""
    loops: list[int] = []
    runs: list[float] = []
    for segment in program.segments:
        while loops and program.segments[loops[-1]].end <= segment.start:
            loops.pop()
        if segment.kind == "loop":
            loops.append(program.segments.index(segment))
        runs.append(1.0 if not loops else trips[len(loops) - 1])
    return runs


def our_cost(shape: Shape, chip: str) -> Cost:
    """Compiles our kernel for `shape` and counts."""
    described = _compile({"kind": "ours", "shape": dataclasses.asdict(shape)}, chip)
    program, blocks = described["program"], described["blocks"]
    if shape.decode:
        runs = decode_runs([n for _, n in shape.rows], shape.page_size, blocks["pages_per_block"])
        segments = decode_segments(runs)
        copied = runs["pages"] * shape.page_bytes
    else:
        heads = blocks.pop("heads")
        runs = prefill_runs(
            shape.rows, shape.page_size, **blocks, head_blocks=shape.kv_heads // heads
        )
        segments = prefill_segments(runs)
        copied = runs["pages"] * shape.page_bytes * heads / shape.kv_heads
        blocks["heads"] = heads
    return Cost(
        program.executed(segments),
        copied + shape.activation_bytes,
        program.executed_attribute("spills", segments),
        " ".join(f"{k}={v}" for k, v in blocks.items()),
    )


def their_block_sizes(shape: Shape, tuned_name: str) -> list[tuple[int, int]]:
    """(pages, queries) per block to try on JAX's kernel: what its table says first."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes as tuned

    width = max(shape.pages)
    heads = (shape.q_heads, shape.kv_heads)
    key = ("bfloat16", "bfloat16", *heads, 128, shape.page_size, shape.tokens, width)
    entry = tuned.TUNED_BLOCK_SIZES[tuned_name].get(tuned.simplify_key(key), (128, 32))
    if shape.decode:
        others = [(512, 8), (2048, 8)]
    else:
        others = [(256, 32), (512, 32), (512, 64)]
    found = [entry, *((max(tokens // shape.page_size, 1), n) for tokens, n in others)]
    bounded = [(min(pages, width), min(queries, shape.tokens)) for pages, queries in found]
    return list(dict.fromkeys(bounded))


def their_cost(shape: Shape, chip: str) -> Cost:
    """The best of JAX's kernel over `their_block_sizes`, by bundles."""
    candidates = their_block_sizes(shape, CHIPS[chip.split(":")[0]].tuned_name)
    best: Cost | None = None
    for pages, queries in candidates:
        request = {
            "kind": "theirs",
            "shape": dataclasses.asdict(shape),
            "pages": pages,
            "queries": queries,
        }
        try:
            program = _compile(request, chip)["program"]
        except subprocess.CalledProcessError:
            continue  # block sizes that do not fit VMEM
        except subprocess.TimeoutExpired:
            print(f"JAX's kernel with pages={pages} queries={queries} compiles too long: left out")
            continue
        grid = -(-shape.tokens // queries)
        # Every query block visits each of its rows' whole context.
        pairs = shape.tokens if shape.decode else grid
        visits = shape.tokens / len(shape.rows) if shape.decode else grid
        blocks = sum(-(-n // pages) for n in shape.pages) * (1 if shape.decode else visits)
        loops = sum(s.kind == "loop" for s in program.segments)
        trips = [grid, pairs, blocks][-loops:] if loops <= 3 else None
        if trips is None:
            raise ValueError(f"JAX's kernel has {loops} loops, not at most three")
        segments = theirs_segments(program, trips)
        cost = Cost(
            program.executed(segments),
            blocks * pages * shape.page_bytes + shape.activation_bytes,
            program.executed_attribute("spills", segments),
            f"pages={pages} queries={queries}",
        )
        if best is None or cost.bundles < best.bundles:
            best = cost
    if best is None:
        raise RuntimeError(f"JAX's kernel compiled with none of {candidates} for {shape.name}")
    return best


def _compile(request: dict, topology: str) -> dict:
    """Compiles in a process of its own, whose libtpu dumps its code."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        text = json.dumps(request | {"topology": topology})
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tpu_cycles", f"--compile={text}"],
            env=env,
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT.value,
        )
        result = json.loads(done.stdout.strip().splitlines()[-1])
        return result | {"program": read_program(find_dump(Path(folder), result["kernel"]))}


def _compile_here(request: dict) -> dict:
    import jax
    import jax.numpy as jnp

    from benchmarks.tpu_topology import device_mesh, topology_devices
    from pallas_kernels import tpu, tpu_tables
    from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
    from pallas_kernels.batch import RaggedBatch
    from pallas_kernels.tpu_layout import head_groups, layout_of

    shape = Shape(**request["shape"] | {"rows": tuple(map(tuple, request["shape"]["rows"]))})
    mesh = device_mesh(topology_devices(request["topology"])[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def abstract(size: Sequence[int], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(size), dtype, sharding=sharding)

    num_rows, width, pages = len(shape.rows), max(shape.pages), 8192
    q = abstract((shape.tokens, shape.q_heads, 128), jnp.bfloat16)
    rows, ends = abstract((num_rows,), jnp.int32), abstract((num_rows + 1,), jnp.int32)
    table, one = abstract((num_rows, width), jnp.int32), abstract((1,), jnp.int32)
    tokens = abstract((shape.tokens,), jnp.int32)
    result: dict = {}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if request["kind"] == "theirs":
            from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
                ragged_paged_attention,
            )

            kv = abstract((pages, shape.page_size, 2 * shape.kv_heads, 128), jnp.bfloat16)
            jax.jit(
                lambda *args: ragged_paged_attention(
                    *args,
                    sm_scale=128**-0.5,
                    num_kv_pages_per_block=request["pages"],
                    num_queries_per_block=request["queries"],
                    vmem_limit_bytes=64 * 2**20,
                )
            ).lower(q, kv, rows, table, ends, one).compile()
            return {"kernel": "ragged_paged_attention_kernel"}
        spec = KVCacheSpec(pages, shape.page_size, shape.kv_heads, 128, jnp.bfloat16)
        config = AttentionConfig(128**-0.5, max_query_len=1 if shape.decode else None)
        layout = layout_of(spec)
        kv = abstract(layout.shape, jnp.bfloat16)
        batch: Any = (ends, rows, table, one, one, tokens, tokens)
        jax.jit(
            lambda q, kv, batch: tpu.ragged_paged_attention(
                q, kv, RaggedBatch(*batch), spec, config
            )
        ).lower(q, kv, batch).compile()
        blocks = tpu_tables.blocks_for(tpu_tables.current_chip(), "bf16")
    if shape.decode:
        result["blocks"] = {"pages_per_block": tpu_tables.decode_pages(blocks, layout)}
        return result | {"kernel": "tidegate_decode_attention"}
    q_per_kv = head_groups(shape.q_heads, shape.kv_heads).q_per_kv
    sizes = tpu_tables.prefill_blocks(blocks, layout, num_tokens=shape.tokens, q_per_kv=q_per_kv)
    return {"kernel": "tidegate_prefill_attention", "blocks": dataclasses.asdict(sizes)}


def main(argv: Sequence[str]) -> None:
    del argv
    if _COMPILE.value:
        print(json.dumps(_compile_here(json.loads(_COMPILE.value))))
        return
    chip = CHIPS[_TOPOLOGY.value.split(":")[0]]
    lines = [
        f"{_TOPOLOGY.value}, page {_PAGE_SIZE.value}, bfloat16, head size 128",
        "",
        "| shape | bundles ours | bundles JAX | ratio | DMA ours / needed | DMA JAX / needed "
        "| spills ours / JAX | HBM roofline share ours | MXU peak share ours | blocks ours "
        "| blocks JAX |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for shape in shapes(_PAGE_SIZE.value):
        if _ONLY.value not in shape.name:
            continue
        ours, theirs = our_cost(shape, _TOPOLOGY.value), their_cost(shape, _TOPOLOGY.value)
        # Copies overlap with bundles: the longer of the two is the estimate.
        seconds = max(ours.bundles / chip.clock, ours.dma_bytes / chip.bandwidth)
        memory = shape.needed_bytes / chip.bandwidth / seconds
        compute = shape.flops / chip.flops / seconds
        lines.append(
            f"| {shape.name} | {ours.bundles:.3g} | {theirs.bundles:.3g} "
            f"| {ours.bundles / theirs.bundles:.2f} | {ours.dma_bytes / shape.needed_bytes:.2f} "
            f"| {theirs.dma_bytes / shape.needed_bytes:.2f} | {ours.spills:.3g} / "
            f"{theirs.spills:.3g} | {memory:.2f} | {compute:.2f} | {ours.detail} "
            f"| {theirs.detail} |"
        )
        print(lines[-1], flush=True)
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
