"""JAX's own attention on the same shapes: its paged kernel (decode) and cuDNN (prefill)."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.gpu_check.attention import prefill_flop
from benchmarks.gpu_check.section import Section, run, share, time_jax
from benchmarks.gpu_check.shapes import AttentionShape, attention_shape


def measure(section: Section) -> None:
    shape = attention_shape(section.rehearse)
    section.attempt("cudnn_prefill", lambda: _cudnn_prefill(section, shape))
    section.attempt("jax_paged_attention", lambda: _paged(section, shape))
    section.attempt("cudnn_decode_contiguous", lambda: _cudnn_decode(section, shape))


def _random(seed: int, *dims: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16))()


def _paged(section: Section, shape: AttentionShape) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    per_row = -(-shape.context // shape.page_size)
    pages = shape.rows * per_row
    dims = (shape.num_kv_heads, pages, shape.page_size, shape.head_dim)
    k, v = _random(0, *dims), _random(1, *dims)
    q = _random(2, shape.rows, shape.num_q_heads, shape.head_dim)
    table = jax.random.permutation(jax.random.key(3), pages).reshape(shape.rows, per_row)
    lengths = jnp.full((shape.rows,), shape.context, jnp.int32)
    call = jax.jit(functools.partial(paged_attention, k_splits=1 if section.rehearse else 16))
    seconds = time_jax(lambda: call(q, k, v, table, lengths), repeats=shape.repeats)
    return _decode_figures(section, shape, seconds)


def _cudnn_decode(section: Section, shape: AttentionShape) -> dict[str, Any]:
    """One query per row over contiguous keys and values: what paging is compared with."""
    import jax

    kv = (shape.rows, shape.context, shape.num_kv_heads, shape.head_dim)
    k, v = _random(0, *kv), _random(1, *kv)
    q = _random(2, shape.rows, 1, shape.num_q_heads, shape.head_dim)
    call = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))
    seconds = time_jax(lambda: call(q, k, v), repeats=shape.repeats)
    return _decode_figures(section, shape, seconds)


def _decode_figures(section: Section, shape: AttentionShape, seconds: float) -> dict[str, Any]:
    rate = 4 * shape.rows * shape.context * shape.num_kv_heads * shape.head_dim / seconds / 1e9
    return {
        "us": round(1e6 * seconds, 1),
        "gb_per_s": round(rate, 1),
        "share_of_copy": share(rate, section.ceiling("copy_gb_per_s")),
    }


def _cudnn_prefill(section: Section, shape: AttentionShape) -> dict[str, Any]:
    import jax

    kv = (1, shape.prompt, shape.num_kv_heads, shape.head_dim)
    k, v = _random(0, *kv), _random(1, *kv)
    q = _random(2, 1, shape.prompt, shape.num_q_heads, shape.head_dim)
    call = jax.jit(
        functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    )
    seconds = time_jax(lambda: call(q, k, v), repeats=shape.repeats)
    rate = prefill_flop(shape) / seconds / 1e12
    return {
        "us": round(1e6 * seconds, 1),
        "tflop_per_s": round(rate, 2),
        "share_of_matmul": share(rate, section.ceiling("bf16_tflop_per_s")),
    }


if __name__ == "__main__":
    run(measure)
