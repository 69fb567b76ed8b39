"""Compiles the engine's steps with abstract weights for a TPU that is not there."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.tpu_topology import device_mesh, topology_devices
from engine.config import EngineConfig
from engine.device_state import StepShape, init_state
from engine.step import StepConfig, make_step
from models.config import ModelConfig, RopeScaling
from models.hf_config import config_from_fields
from models.transformer import Transformer
from pallas_kernels import KVCacheSpec, tensor_parallel, tpu, tpu_tables
from pallas_kernels.tpu_layout import head_groups, layout_of

GIB = 2**30
_WHOLE = P()

# What the compiler grants one device, bytes; v5p and 7x: capacity less the same share as above.
HBM_BYTES = {
    "v5e": int(15.75 * GIB),
    "v6e": int(31.24 * GIB),
    "v5p": int(95.0 * GIB),
    "tpu7x": int(94.5 * GIB),
}

KNOWN = {
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
    ),
    "qwen3-0.6b": ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qk_norm=True,
        tie_embeddings=True,
        max_position_embeddings=40960,
    ),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compile.

    Attributes:
      config, quantization, kv_dtype: the model and its pages.
      topology: name of the slice; heads and weights are split over all its devices.
      max_num_seqs, max_model_len, block_size: limits, as in the engine.
      num_blocks: KV blocks of the pool.
      max_decode_steps: decode steps that one dispatch may run.
    """

    config: ModelConfig
    topology: str
    quantization: str | None = None
    kv_dtype: str = "bfloat16"
    max_num_seqs: int = 64
    max_model_len: int = 8192
    block_size: int = 32
    num_blocks: int = 1024
    max_decode_steps: int = EngineConfig.max_decode_steps


@dataclasses.dataclass(frozen=True)
class Report:
    """One compiled bucket. Bytes are per device.

    Attributes:
      problem: why it did not compile, or "".
      arguments, temporaries, aliased: HBM; donated state is counted among the arguments.
      flops, bytes_accessed: XLA's estimate for one step; it does not see inside the kernels.
    """

    shape: StepShape
    seconds: float
    problem: str = ""
    arguments: int = 0
    temporaries: int = 0
    aliased: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0

    def __str__(self) -> str:
        kind = "decode" if self.shape.decode else "mixed"
        name = f"{kind} {self.shape.num_tokens} tokens, {self.shape.num_rows} rows"
        if self.problem:
            return f"{name}: does not fit: {self.problem}"
        return (
            f"{name}: compiled in {self.seconds:.1f} s, arguments {self.arguments / GIB:.2f} GiB "
            f"({self.aliased / GIB:.2f} updated in place), temporaries "
            f"{self.temporaries / 2**20:.0f} MiB, {self.flops / 1e9:.1f} GFLOP, "
            f"{self.bytes_accessed / GIB:.2f} GiB accessed"
        )


class Compiler:
    """Compiles steps of one plan."""

    def __init__(self, plan: Plan):
        """Raises ValueError where the heads do not divide over the devices."""
        self.plan = plan
        self.mesh = device_mesh(topology_devices(plan.topology))
        devices = self.mesh.size
        config = plan.config
        if config.num_kv_heads % devices:
            raise ValueError(
                f"{config.num_kv_heads} KV heads do not divide over the {devices} devices of "
                f"--topology={plan.topology}"
            )
        self.spec = KVCacheSpec(
            plan.num_blocks,
            plan.block_size,
            config.num_kv_heads,
            config.head_dim,
            jnp.dtype(plan.kv_dtype),
        )
        with _as_on_tpu():
            model = Transformer.abstract(
                config, dtype=jnp.bfloat16, quantization=plan.quantization, shards=devices
            )
        self._graphdef, state = nnx.split(model)
        self._leaves, self._treedef = jax.tree.flatten(
            jax.tree.map(self._weight, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        )

    def _abstract(self, x: Any, spec: P = _WHOLE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

    def _weight(self, variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata().get("axes") or ()
        split = P(*["tp" if name in ("heads", "mlp", "vocab") else None for name in axes])
        value = variable.get_value()
        return variable.replace(self._abstract(value, split))

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return sum(_local_bytes(x) for x in self._leaves)

    @property
    def page_bytes(self) -> int:
        """Of one block over all layers, on one device."""
        return tpu.kv_page_bytes(self.spec) * self.plan.config.num_layers // self.mesh.size

    def kernel_vmem(self, shape: StepShape) -> tuple[int, int]:
        """(VMEM bytes of the attention kernel that takes most, limit) on one device."""
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            chip = tpu_tables.current_chip()
        heads = self.spec.num_kv_heads // self.mesh.size
        layout = layout_of(dataclasses.replace(self.spec, num_kv_heads=heads))
        q_heads = self.plan.config.num_heads // self.mesh.size
        groups, blocks = head_groups(q_heads, heads), tpu_tables.blocks_for(chip, "bf16")
        used = tpu_tables.decode_vmem_bytes(
            blocks, layout, groups, rows=shape.num_rows, q_itemsize=2
        )
        if not shape.decode:
            sizes = tpu_tables.prefill_blocks(
                blocks, layout, num_tokens=shape.num_tokens, q_per_kv=groups.q_per_kv
            )
            prefill = tpu_tables.prefill_vmem_bytes(
                sizes, layout, q_per_kv=groups.q_per_kv, q_itemsize=2
            )
            used = max(used, prefill)
        return used, tpu_tables.vmem_limit(chip)

    def compile(self, shape: StepShape) -> Report:
        """Compiles one bucket; a program that does not fit is a report, not an error."""
        plan = self.plan
        blocks = -(-plan.max_model_len // plan.block_size)
        state = jax.eval_shape(lambda: init_state(plan.max_num_seqs, plan.max_model_len, blocks))
        page = jax.eval_shape(lambda: tpu.init_kv_pages(self.spec))
        pages = [self._abstract(page, P(None, "tp"))] * plan.config.num_layers
        packed = self._abstract(jax.ShapeDtypeStruct((shape.input_size,), jnp.int32))
        settings = StepConfig(self.spec, "tpu", max_decode_steps=plan.max_decode_steps)
        step = make_step(self._graphdef, self._treedef, settings, shape)
        start = time.perf_counter()
        try:
            with (
                _as_on_tpu(),
                jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh),
                tensor_parallel.split_heads(self.mesh, "tp"),
            ):
                compiled = (
                    jax.jit(step, donate_argnums=(1, 2))
                    .lower(self._leaves, pages, jax.tree.map(self._abstract, state), packed)
                    .compile()
                )
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            if "hbm" not in text.lower() and "vmem" not in text.lower():
                raise
            problem = " ".join(text.split())[:300]
            return Report(shape, time.perf_counter() - start, problem)
        memory: Any = compiled.memory_analysis()
        cost = compiled.cost_analysis() or {}
        return Report(
            shape,
            time.perf_counter() - start,
            arguments=memory.argument_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            flops=cost.get("flops", 0.0),
            bytes_accessed=cost.get("bytes accessed", 0.0),
        )


def _local_bytes(x: jax.ShapeDtypeStruct) -> int:
    shape = x.sharding.shard_shape(x.shape)
    size = x.dtype.itemsize
    for n in shape:
        size *= n
    return size


def _as_on_tpu() -> Any:
    """Model code asks JAX for the platform to choose CPU formulations; here the answer is tpu."""
    return mock.patch.object(jax, "default_backend", return_value="tpu")


def model_config(name: str) -> ModelConfig:
    """A known shape by name, or a Hugging Face config.json by path."""
    if name in KNOWN:
        return KNOWN[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--model_config={name} is neither a file nor one of: {', '.join(KNOWN)}")
    return config_from_fields(json.loads(path.read_text()), name)


def describe(
    plan: Plan, shapes: Sequence[StepShape], utilization: float, num_blocks: int | None = None
) -> Iterator[str]:
    """Compiles `shapes` one by one and yields what to print about each, and about the KV pool.

    Args:
      plan: its num_blocks counts only for a chip of unknown memory.
      shapes: buckets.
      utilization: share of HBM to use.
      num_blocks: pool to compile for; None takes what seems to fit.
    """
    compiler = Compiler(plan)
    chip = plan.topology.split(":")[0]
    hbm = HBM_BYTES.get("tpu7x" if chip == "7x" else chip)
    yield (
        f"{plan.topology} ({compiler.mesh.size} devices): {plan.quantization or 'bfloat16'} "
        f"weights {compiler.weight_bytes / GIB:.2f} GiB and {compiler.page_bytes / 2**10:.0f} KiB "
        f"per KV block of {plan.block_size} tokens, each per device"
    )
    if num_blocks is None and hbm is not None:
        room = int(hbm * utilization) - compiler.weight_bytes
        if room < 2 * compiler.page_bytes:
            yield (
                f"does not fit: {hbm / GIB:.2f} GiB of HBM x {utilization:g} leave "
                f"{room / GIB:.2f} GiB for KV blocks; use more chips or --quantization=int8"
            )
            return
        # A first guess at the temporaries; the compiler then says whether the program fits.
        num_blocks = max((room - int(0.05 * hbm)) // compiler.page_bytes, 2)
    compiler = Compiler(dataclasses.replace(plan, num_blocks=num_blocks or plan.num_blocks))
    largest = 0
    for shape in shapes:
        report = compiler.compile(shape)
        vmem, limit = compiler.kernel_vmem(shape)
        yield f"  {report}, VMEM of attention {vmem / 2**20:.0f} of {limit / 2**20:.0f} MiB"
        if report.problem:
            return
        largest = max(largest, report.temporaries)
    if hbm is None:
        return
    # Temporaries do not depend on the pool, which the steps update in place.
    room = int(hbm * utilization) - compiler.weight_bytes - largest
    blocks = max(room // compiler.page_bytes, 0)
    yield (
        f"KV pool: {hbm / GIB:.2f} GiB x {utilization:g} - {compiler.weight_bytes / GIB:.2f} GiB "
        f"weights - {largest / GIB:.2f} GiB temporaries = {room / GIB:.2f} GiB: {blocks} blocks, "
        f"{blocks * plan.block_size} tokens"
    )
