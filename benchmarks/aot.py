"""Compiles the engine's steps for a TPU that is not there, and says what would fit.

    python -m benchmarks.aot --topology v6e:1x1 --model_config llama-3.1-8b
    python -m benchmarks.aot --topology v5e:2x2 --model_config path/to/config.json --max_num_seqs 64

Weights are abstract: nothing is loaded. Needs libtpu (pip install 'tidegate[tpu]'). The chip's
HBM is what XLA's compiler allows a program, not what the data sheet says.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.tpu_topology import device_mesh, topology_devices
from engine.buckets import Buckets
from engine.device_state import StepShape, init_state
from engine.step import StepConfig, make_step
from models.config import ModelConfig, RopeScaling
from models.hf_config import config_from_fields
from models.transformer import Transformer
from pallas_kernels import KVCacheSpec, tensor_parallel, tpu

GIB = 2**30
_WHOLE = P()

_TOPOLOGY = flags.DEFINE_string("topology", "v6e:1x1", "TPU slice, as in v5e:2x2.")
_MODEL_CONFIG = flags.DEFINE_string(
    "model_config", "qwen3-0.6b", "Name of a known shape or path of a Hugging Face config.json."
)
_QUANTIZATION = flags.DEFINE_enum("quantization", None, ["int8"], "Of the weights.")
_KV_DTYPE = flags.DEFINE_enum(
    "kv_cache_dtype", "bfloat16", ["bfloat16", "float32"], "Of keys and values."
)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 64, "Rows that run at once.", lower_bound=1)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 8192, "Longest sequence.", lower_bound=2)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", 2048, "Tokens of one step.", lower_bound=1
)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 32, "Tokens per KV block.", lower_bound=1)
_UTILIZATION = flags.DEFINE_float("device_memory_utilization", 0.9, "Share of HBM to use.")
_NUM_BLOCKS = flags.DEFINE_integer(
    "num_kv_blocks", None, "Blocks of the pool to compile for; by default what seems to fit."
)
_ALL = flags.DEFINE_bool(
    "all_buckets", False, "Compile every bucket instead of the largest decode and mixed ones."
)

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
    """

    config: ModelConfig
    topology: str
    quantization: str | None = None
    kv_dtype: str = "bfloat16"
    max_num_seqs: int = 64
    max_model_len: int = 8192
    block_size: int = 32
    num_blocks: int = 1024


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

    def compile(self, shape: StepShape) -> Report:
        """Compiles one bucket; a program that does not fit is a report, not an error."""
        plan = self.plan
        blocks = -(-plan.max_model_len // plan.block_size)
        state = jax.eval_shape(lambda: init_state(plan.max_num_seqs, plan.max_model_len, blocks))
        page = jax.eval_shape(lambda: tpu.init_kv_pages(self.spec))
        pages = [self._abstract(page, P(None, "tp"))] * plan.config.num_layers
        packed = self._abstract(jax.ShapeDtypeStruct((shape.input_size,), jnp.int32))
        step = make_step(self._graphdef, self._treedef, StepConfig(self.spec, "tpu"), shape)
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
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
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


def main(argv: Sequence[str]) -> None:
    del argv
    config = model_config(_MODEL_CONFIG.value)
    plan = Plan(
        config,
        _TOPOLOGY.value,
        _QUANTIZATION.value,
        _KV_DTYPE.value,
        _MAX_NUM_SEQS.value,
        _MAX_MODEL_LEN.value,
        _BLOCK_SIZE.value,
    )
    compiler = Compiler(plan)
    chip = plan.topology.split(":")[0].replace("7x", "tpu7x").replace("tputpu", "tpu")
    hbm = HBM_BYTES.get(chip)
    print(
        f"{_MODEL_CONFIG.value} on {plan.topology} ({compiler.mesh.size} devices), "
        f"{plan.quantization or 'bfloat16'} weights {compiler.weight_bytes / GIB:.2f} GiB and "
        f"{compiler.page_bytes / 2**10:.0f} KiB per KV block of {plan.block_size} tokens, each "
        "per device"
    )
    buckets = Buckets(plan.max_num_seqs, _MAX_TOKENS.value)
    shapes = buckets.all if _ALL.value else (buckets.mixed[-1], buckets.decode[-1])
    if hbm is not None and compiler.weight_bytes >= hbm:
        print(f"does not fit: the weights alone exceed the {hbm / GIB:.2f} GiB of HBM")
        return
    blocks = _NUM_BLOCKS.value
    if blocks is None and hbm is not None:
        # A first guess at the temporaries; the compiler then says whether the program fits.
        room = int(hbm * (_UTILIZATION.value - 0.05)) - compiler.weight_bytes
        blocks = max(room // compiler.page_bytes, 2)
    compiler = Compiler(dataclasses.replace(plan, num_blocks=blocks or plan.num_blocks))
    largest = 0
    for shape in shapes:
        report = compiler.compile(shape)
        _print(report)
        if report.problem:
            return
        largest = max(largest, report.temporaries)
    if hbm is None:
        return
    # Temporaries do not depend on the pool, which the steps update in place.
    room = int(hbm * _UTILIZATION.value) - compiler.weight_bytes - largest
    blocks = max(room // compiler.page_bytes, 0)
    print(
        f"KV pool: {hbm / GIB:.2f} GiB x {_UTILIZATION.value:g} - "
        f"{compiler.weight_bytes / GIB:.2f} GiB weights - {largest / GIB:.2f} GiB temporaries = "
        f"{room / GIB:.2f} GiB: {blocks} blocks, {blocks * plan.block_size} tokens"
    )


def _print(report: Report) -> None:
    kind = "decode" if report.shape.decode else "mixed"
    name = f"{kind} {report.shape.num_tokens} tokens, {report.shape.num_rows} rows"
    if report.problem:
        print(f"  {name}: does not fit: {report.problem}")
        return
    print(
        f"  {name}: compiled in {report.seconds:.1f} s, arguments {report.arguments / GIB:.2f} GiB "
        f"({report.aliased / GIB:.2f} updated in place), temporaries "
        f"{report.temporaries / 2**20:.0f} MiB, {report.flops / 1e9:.1f} GFLOP, "
        f"{report.bytes_accessed / GIB:.2f} GiB accessed",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
