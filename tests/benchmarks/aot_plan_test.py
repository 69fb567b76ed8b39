"""Ahead-of-time compiles for TPUs: of the kernels, and of whole steps (slow: they need libtpu)."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import aot_plan
from benchmarks.tpu_topology import device_mesh, topology_devices
from engine.device_state import StepShape
from pallas_kernels import AttentionConfig, KVCacheSpec, RaggedBatch, tpu

TOPOLOGIES = ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1"]


@pytest.fixture
def libtpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.fail("compiling for a TPU needs libtpu: pip install 'tidegate[tpu]'")


def test_unknown_topology_names_the_form() -> None:
    with pytest.raises(ValueError, match="--topology=v9:1x1 is not of the form v5e:2x2"):
        topology_devices("v9:1x1")


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="--model_config=nothing is neither a file nor one of"):
        aot_plan.model_config("nothing")


def test_a_config_file_is_read(tmp_path: Path) -> None:
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 1,
        "max_position_embeddings": 128,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    config = aot_plan.model_config(str(path))
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (2, 2, 8)


KERNELS = {
    "decode": {"q_heads": 32, "kv_heads": 8},
    "mixed": {"q_heads": 32, "kv_heads": 8, "tokens": 256},
    "decode_one_kv_head": {"q_heads": 8, "kv_heads": 1},
    "head_64": {"q_heads": 9, "kv_heads": 3, "head_dim": 64, "tokens": 64},
    "head_80": {"q_heads": 14, "kv_heads": 2, "head_dim": 80, "tokens": 64},
    "head_96_mha": {"q_heads": 32, "kv_heads": 32, "head_dim": 96, "tokens": 64},
    "head_256_window": {"q_heads": 8, "kv_heads": 4, "head_dim": 256, "tokens": 64, "window": 1000},
    "int8": {"q_heads": 32, "kv_heads": 8, "tokens": 64, "kv_dtype": jnp.int8, "page_size": 16},
    "fp8": {
        "q_heads": 32,
        "kv_heads": 8,
        "tokens": 64,
        "kv_dtype": jnp.float8_e4m3fn,
        "page_size": 32,
    },
    "table_in_parts": {"q_heads": 32, "kv_heads": 8, "tokens": 256, "rows": 128, "width": 4096},
    "table_in_parts_decode": {"q_heads": 32, "kv_heads": 8, "rows": 130, "width": 1500},
    "float32": {
        "q_heads": 8,
        "kv_heads": 2,
        "tokens": 64,
        "dtype": jnp.float32,
        "kv_dtype": jnp.float32,
    },
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kernels_compile_and_update_the_pages_in_place(topology: str, name: str) -> None:
    compiled, page_bytes = _compile_kernels(topology, **KERNELS[name])
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == page_bytes
    assert memory.temp_size_in_bytes < page_bytes


def _compile_kernels(
    topology: str,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int = 128,
    tokens: int | None = None,
    rows: int = 32,
    page_size: int = 64,
    dtype=jnp.bfloat16,
    kv_dtype=jnp.bfloat16,
    window: int | None = None,
    width: int = 64,
):
    mesh = device_mesh(topology_devices(topology)[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def abstract(shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    spec = KVCacheSpec(2000, page_size, kv_heads, head_dim, kv_dtype)
    config = AttentionConfig(head_dim**-0.5, window, max_query_len=None if tokens else 1)
    tokens = tokens or rows
    batch = RaggedBatch(
        abstract((rows + 1,)),
        abstract((rows,)),
        abstract((rows, width)),
        abstract((1,)),
        abstract((1,)),
        abstract((tokens,)),
        abstract((tokens,)),
    )
    q, kv = (
        abstract((tokens, q_heads, head_dim), dtype),
        abstract((tokens, kv_heads, head_dim), dtype),
    )
    page = jax.eval_shape(lambda: tpu.init_kv_pages(spec))
    scale = abstract((kv_heads,), jnp.float32) if jnp.dtype(kv_dtype).itemsize == 1 else None
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = (
            jax.jit(
                lambda q, k, v, pages, batch, scale: tpu.attend(
                    q, k, v, pages, batch, spec, config, k_scale=scale, v_scale=scale
                ),
                donate_argnums=3,
            )
            .lower(q, kv, kv, abstract(page.shape, page.dtype), batch, scale)
            .compile()
        )
    return compiled, page.size * page.dtype.itemsize


DECODE, MIXED = StepShape(64, 64, decode=True), StepShape(2048, 64, decode=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("topology", "model", "quantization"),
    [
        ("v6e:1x1", "llama-3.1-8b", None),
        ("v5e:2x2", "llama-3.1-8b", None),
        ("v5e:1x1", "llama-3.1-8b", "int8"),
        ("v5p:1x1x1", "llama-3.1-8b", None),
        ("tpu7x:1x1x1", "llama-3.1-8b", None),
        ("v5e:1x1", "qwen3-0.6b", None),
        ("v6e:1x1", "qwen3-0.6b", None),
        ("v5p:1x1x1", "qwen3-0.6b", None),
        ("tpu7x:1x1x1", "qwen3-0.6b", None),
    ],
)
def test_whole_steps_compile_and_update_the_pool_in_place(topology, model, quantization, shape):
    plan = aot_plan.Plan(aot_plan.KNOWN[model], topology, quantization, num_blocks=2)
    compiler = aot_plan.Compiler(plan)
    # Most of what the weights leave, as when serving.
    room = int(0.8 * aot_plan.HBM_BYTES[topology.split(":")[0]]) - compiler.weight_bytes
    plan = dataclasses.replace(plan, num_blocks=room // compiler.page_bytes)
    compiler = aot_plan.Compiler(plan)
    report = compiler.compile(shape)
    assert report.problem == ""
    pool = compiler.page_bytes * plan.num_blocks
    assert report.aliased >= pool
    # Temporaries are those of the step alone: they would exceed the pool if it were copied.
    # (On 7x a run of decode steps also holds the weights once more, in another tiling.)
    assert report.temporaries < pool / 4
    assert report.arguments >= compiler.weight_bytes + pool


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("libtpu")
def test_a_model_too_large_is_told() -> None:
    plan = aot_plan.Plan(aot_plan.KNOWN["llama-3.1-8b"], "v5e:1x1")
    *_, last = aot_plan.describe(plan, [DECODE], 0.9)
    assert last.startswith("does not fit: 15.75 GiB of HBM x 0.9 leave -0.78 GiB for KV blocks")
