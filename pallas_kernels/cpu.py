"""Paged attention for CPUs by the native kernels (see cpu_kernels/attention.cc).

A layer's pages are one array [num_pages, 2, num_kv_heads, page_size * head_dim], keys with the
positions of a page innermost, values with the head's dimensions innermost. Written in place where
the pages are donated. Results are batch invariant in every mode.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Num, Shaped

from pallas_kernels import cpu_build
from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch

_LANES = 16
_DTYPES = ("float32", "bfloat16", "int8")


def check_supported(spec: KVCacheSpec, config: AttentionConfig | None = None) -> None:
    """Raises NotImplementedError for what the native kernels do not do."""
    del config
    if not cpu_build.available():
        raise NotImplementedError("the native kernels are switched off or cannot be built")
    for name in ("page_size", "head_dim"):
        if getattr(spec, name) % _LANES:
            raise NotImplementedError(f"{name}={getattr(spec, name)} is no multiple of {_LANES}")
    if np.dtype(spec.dtype).name not in _DTYPES:
        raise NotImplementedError(
            f"pages of {np.dtype(spec.dtype).name}; there are {', '.join(_DTYPES)}"
        )


def _shape(spec: KVCacheSpec) -> tuple[int, int, int, int]:
    return spec.num_pages, 2, spec.num_kv_heads, spec.page_size * spec.head_dim


def init_kv_pages(spec: KVCacheSpec) -> Shaped[Array, "N 2 H SD"]:
    """Zeroed pages of one layer."""
    check_supported(spec)
    return jnp.zeros(_shape(spec), spec.dtype)


def kv_pages_from_logical(
    logical: Shaped[Array, "N S 2 H D"], spec: KVCacheSpec
) -> Shaped[Array, "N 2 H SD"]:
    """Lays out logical pages; a copy."""
    check_supported(spec)
    logical = jnp.asarray(logical, spec.dtype)
    key = logical[:, :, 0].transpose(0, 2, 3, 1)  # [N, H, D, S]
    value = logical[:, :, 1].transpose(0, 2, 1, 3)  # [N, H, S, D]
    n, _, h, inner = _shape(spec)
    return jnp.stack([key.reshape(n, h, inner), value.reshape(n, h, inner)], axis=1)


def kv_pages_to_logical(
    pages: Shaped[Array, "N 2 H SD"], spec: KVCacheSpec
) -> Shaped[Array, "N S 2 H D"]:
    """The inverse of `kv_pages_from_logical`."""
    n, _, h, _ = _shape(spec)
    key = pages[:, 0].reshape(n, h, spec.head_dim, spec.page_size).transpose(0, 3, 1, 2)
    value = pages[:, 1].reshape(n, h, spec.page_size, spec.head_dim).transpose(0, 2, 1, 3)
    return jnp.stack([key, value], axis=2)


def kv_page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one page of one layer; nothing is padded."""
    check_supported(spec)
    return spec.page_size * 2 * spec.num_kv_heads * spec.head_dim * np.dtype(spec.dtype).itemsize


def kv_write(
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: Shaped[Array, "N 2 H SD"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
) -> Shaped[Array, "N 2 H SD"]:
    """Pages with this step's keys and values at `batch.slots`; padding tokens are not written."""
    check_supported(spec)
    k, v = _same_dtype(k, v)
    call = jax.ffi.ffi_call(cpu_build.target("kv_write"), _like(pages), input_output_aliases={2: 0})
    return call(k, v, pages, *_batch_arguments(batch, k_scale, v_scale, None))


def ragged_paged_attention(
    q: Num[Array, "T Hq D"],
    pages: Shaped[Array, "N 2 H SD"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> Num[Array, "T Hq D"]:
    """Softmax attention of each query over its row's context; zeros for padding."""
    check_supported(spec)
    (query,) = _same_dtype(q)
    call = jax.ffi.ffi_call(cpu_build.target("attention"), _like(query))
    arguments = _batch_arguments(batch, k_scale, v_scale, sinks)
    return call(query, pages, *arguments, **_attributes(config)).astype(q.dtype)


def attend(
    q: Num[Array, "T Hq D"],
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: Shaped[Array, "N 2 H SD"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> tuple[Num[Array, "T Hq D"], Shaped[Array, "N 2 H SD"]]:
    """Writes this step's keys and values and attends, in one call."""
    check_supported(spec)
    query, k, v = _same_dtype(q, k, v)
    call = jax.ffi.ffi_call(
        cpu_build.target("attend"), (_like(query), _like(pages)), input_output_aliases={3: 1}
    )
    arguments = _batch_arguments(batch, k_scale, v_scale, sinks)
    out, pages = call(query, k, v, pages, *arguments, **_attributes(config))
    return out.astype(q.dtype), pages


def _same_dtype(*arrays: Array) -> tuple[Array, ...]:
    """The arrays in bfloat16 if all of them are, else in float32."""
    if all(x.dtype == jnp.bfloat16 for x in arrays):
        return arrays
    return tuple(x.astype(jnp.float32) for x in arrays)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _batch_arguments(
    batch: RaggedBatch, k_scale: Array | None, v_scale: Array | None, sinks: Array | None
) -> tuple[Array, ...]:
    none = jnp.zeros(0, jnp.float32)
    optional = (none if x is None else x.astype(jnp.float32) for x in (k_scale, v_scale, sinks))
    return (
        batch.cu_q_lens,
        batch.kv_lens,
        batch.page_indices,
        batch.num_seqs,
        batch.num_decodes,
        batch.slots,
        *optional,
    )


def _attributes(config: AttentionConfig) -> dict[str, Any]:
    return {
        "sm_scale": np.float32(config.sm_scale),
        "soft_cap": np.float32(config.soft_cap or 0.0),
        "window": np.int64(config.sliding_window or 0),
    }
