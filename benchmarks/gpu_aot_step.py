"""The engine's whole step for an NVIDIA GPU, lowered or compiled without one.

`python -m benchmarks.gpu_aot_step [90] [qwen3] [llama]` compiles decode and mixed steps of
Qwen3-0.6B's and Llama-3.1-8B's shapes and prints how much memory they take beside weights and KV
pages: a copy of the cache would show.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.gpu_check.shapes import model_fields
from engine.config import EngineConfig
from engine.device_state import StepShape, init_state
from engine.step import StepConfig, make_step
from models import Transformer
from models.config import ModelConfig
from models.hf_config import config_from_fields
from pallas_kernels import KVCacheSpec, cpu_build, gpu, gpu_tables
from pallas_kernels.testing import lower_for_cuda

# Family as `model_fields` has it -> the model whose shape it is.
MODELS = {"qwen3": "Qwen3-0.6B", "llama": "Llama-3.1-8B"}


@contextlib.contextmanager
def _no_cpu_kernels() -> Iterator[None]:
    """Traces as on a GPU: on a CPU host, layers would pack their weights for the native kernels."""
    mode = cpu_build.get_mode()
    cpu_build.set_mode("xla")
    try:
        yield
    finally:
        cpu_build.set_mode(cast(cpu_build.Mode, mode))


def abstract_step(
    config: ModelConfig, shape: StepShape, *, num_pages: int, max_model_len: int
) -> tuple[Any, tuple[Any, ...]]:
    """(step, its arguments as shapes): leaves, KV pages, state, packed input."""
    spec = KVCacheSpec(num_pages, 16, config.num_kv_heads, config.head_dim, jnp.bfloat16)
    graphdef, params = nnx.split(Transformer.abstract(config, dtype=jnp.bfloat16))
    leaves, treedef = jax.tree.flatten(params)
    settings = StepConfig(spec, "gpu", max_decode_steps=EngineConfig().max_decode_steps)
    step = make_step(graphdef, treedef, settings, shape)
    pages = jax.eval_shape(lambda: [gpu.init_kv_pages(spec) for _ in range(config.num_layers)])
    state = jax.eval_shape(lambda: init_state(256, max_model_len, -(-max_model_len // 16)))
    packed = jax.ShapeDtypeStruct((shape.input_size,), jnp.int32)
    return step, (leaves, pages, state, packed)


def lower_step(config: ModelConfig, shape: StepShape) -> str:
    """The step's StableHLO for CUDA; needs no plugin."""
    with _no_cpu_kernels():
        step, arguments = abstract_step(config, shape, num_pages=64, max_model_len=256)
        return lower_for_cuda(jax.jit(step, donate_argnums=(1, 2)), *arguments)


def compile_step(
    config: ModelConfig, shape: StepShape, capability: int, *, num_pages: int, max_model_len: int
) -> Any:
    """The step compiled for a compute capability; needs the CUDA plugin."""
    from benchmarks.gpu_aot import mesh_for

    mesh = mesh_for(capability)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with (
        _no_cpu_kernels(),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        gpu_tables.target(capability),
    ):
        step, arguments = abstract_step(
            config, shape, num_pages=num_pages, max_model_len=max_model_len
        )
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        return jax.jit(step, donate_argnums=(1, 2)).lower(*arguments).compile()


def main(argv: list[str]) -> int:
    capability = next((int(arg) for arg in argv if arg.isdigit()), 90)
    families = [arg for arg in argv if not arg.isdigit()] or list(MODELS)
    print(
        "| model | step | compiled in s | KV pages MiB | updated in place MiB | temporaries MiB |"
    )
    print("|---|---|---|---|---|---|")
    for family in families:
        config = config_from_fields(model_fields(family, rehearse=False), MODELS[family])
        for shape in (StepShape(128, 128, True), StepShape(2048, 256, False)):
            begun = time.monotonic()
            compiled = compile_step(config, shape, capability, num_pages=8192, max_model_len=4096)
            memory = compiled.memory_analysis()
            pages = 2 * 8192 * 16 * config.num_kv_heads * config.head_dim * 2 * config.num_layers
            print(
                f"| {MODELS[family]} | {'decode' if shape.decode else 'mixed'} {shape.num_tokens} "
                f"| {time.monotonic() - begun:.1f} | {pages / 2**20:.0f} "
                f"| {memory.alias_size_in_bytes / 2**20:.0f} "
                f"| {memory.temp_size_in_bytes / 2**20:.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    sys.exit(main(sys.argv[1:]))
