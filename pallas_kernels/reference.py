"""The specification of the kernels: numpy, float64, one token at a time.

Nothing here can be traced by JAX; tests compare every other implementation with it. Its KV pages
are the logical form itself, [num_pages, page_size, 2, num_kv_heads, head_dim] in `spec.dtype`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float32, Float64, Num, Shaped

from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch


def init_kv_pages(spec: KVCacheSpec) -> Shaped[np.ndarray, "N S 2 H D"]:
    """Zeroed pages of one layer."""
    shape = (spec.num_pages, spec.page_size, 2, spec.num_kv_heads, spec.head_dim)
    return np.zeros(shape, spec.dtype)


def kv_pages_from_logical(
    logical: Shaped[np.ndarray, "N S 2 H D"], spec: KVCacheSpec
) -> Shaped[np.ndarray, "N S 2 H D"]:
    """A copy of the logical form, which is this implementation's layout."""
    return np.array(logical, dtype=spec.dtype)


def kv_pages_to_logical(
    pages: Shaped[np.ndarray, "N S 2 H D"], spec: KVCacheSpec
) -> Shaped[np.ndarray, "N S 2 H D"]:
    """The inverse of `kv_pages_from_logical`."""
    return np.array(pages, dtype=spec.dtype)


def kv_page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one page of one layer; nothing is padded here."""
    return spec.page_size * 2 * spec.num_kv_heads * spec.head_dim * np.dtype(spec.dtype).itemsize


def quantize(
    x: Num[np.ndarray, "T H D"], scale: Float32[np.ndarray, " H"] | None, dtype: DTypeLike
) -> Shaped[np.ndarray, "T H D"]:
    """Stored form of keys or values: x / scale (in float32), rounded to nearest even, saturated.

    Integers clip to the type's range, float8_e4m3fn to +-448; float32 and bfloat16 do not saturate.
    """
    dtype = np.dtype(dtype)
    value = np.asarray(x).astype(np.float32)
    if scale is not None:
        value = value / np.asarray(scale, np.float32)[:, None]
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        value = np.clip(np.rint(value), limits.min, limits.max)
        return np.nan_to_num(value).astype(dtype)  # a NaN has no integer form
    if dtype.itemsize == 1:
        limit = float(ml_dtypes.finfo(dtype).max)
        value = np.clip(value, -limit, limit)
    return value.astype(dtype)


def dequantize(
    stored: Shaped[np.ndarray, "... H D"], scale: Float32[np.ndarray, " H"] | None
) -> Float64[np.ndarray, "... H D"]:
    """What a stored key or value means: stored * scale."""
    value = np.asarray(stored).astype(np.float64)
    return value if scale is None else value * np.asarray(scale, np.float64)[:, None]


def kv_write(
    k: Num[np.ndarray, "T H D"],
    v: Num[np.ndarray, "T H D"],
    pages: Shaped[np.ndarray, "N S 2 H D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    *,
    k_scale: Float32[np.ndarray, " H"] | None = None,
    v_scale: Float32[np.ndarray, " H"] | None = None,
) -> Shaped[np.ndarray, "N S 2 H D"]:
    """Pages with this step's keys and values at `batch.slots`; the null page may change as well."""
    result = np.array(pages)
    page, offset = np.divmod(np.asarray(batch.slots), spec.page_size)
    result[page, offset, 0] = quantize(k, k_scale, spec.dtype)
    result[page, offset, 1] = quantize(v, v_scale, spec.dtype)
    return result


def ragged_paged_attention(
    q: Num[np.ndarray, "T Hq D"],
    pages: Shaped[np.ndarray, "N S 2 H D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[np.ndarray, " H"] | None = None,
    v_scale: Float32[np.ndarray, " H"] | None = None,
    sinks: Float32[np.ndarray, " Hq"] | None = None,
) -> Float64[np.ndarray, "T Hq D"]:
    """Softmax attention of each query over its row's context, in float64; zeros for padding."""
    query = np.asarray(q).astype(np.float64)
    out = np.zeros_like(query)
    cu_q_lens, kv_lens = np.asarray(batch.cu_q_lens), np.asarray(batch.kv_lens)
    for row in range(int(np.asarray(batch.num_seqs)[0])):
        start, end, kv_len = int(cu_q_lens[row]), int(cu_q_lens[row + 1]), int(kv_lens[row])
        if kv_len == 0 or start == end:
            continue
        for token in range(start, end):
            position = kv_len - (end - start) + token - start
            first = 0
            if config.sliding_window is not None:
                first = max(0, position - config.sliding_window + 1)
            seen = np.arange(first, position + 1)
            # Only what the query sees is gathered: everything else may hold NaN.
            page = np.asarray(batch.page_indices)[row, seen // spec.page_size]
            stored = np.asarray(pages)[page, seen % spec.page_size]
            key, value = dequantize(stored[:, 0], k_scale), dequantize(stored[:, 1], v_scale)
            out[token] = _attend_one(query[token], key, value, config, sinks)
    return out


def _attend_one(
    query: Float64[np.ndarray, "Hq D"],
    key: Float64[np.ndarray, "L H D"],
    value: Float64[np.ndarray, "L H D"],
    config: AttentionConfig,
    sinks: Float32[np.ndarray, " Hq"] | None,
) -> Float64[np.ndarray, "Hq D"]:
    """One query token: query heads h * group .. (h + 1) * group - 1 share key/value head h."""
    group = query.shape[0] // key.shape[1]
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scores = np.einsum("hd,lhd->hl", query, key) * config.sm_scale
    if config.soft_cap is not None:
        scores = config.soft_cap * np.tanh(scores / config.soft_cap)
    top = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, np.asarray(sinks, np.float64)[:, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    if sinks is not None:
        total += np.exp(np.asarray(sinks, np.float64)[:, None] - top)
    return np.einsum("hl,lhd->hd", weights / total, value)


def attend(
    q: Num[np.ndarray, "T Hq D"],
    k: Num[np.ndarray, "T H D"],
    v: Num[np.ndarray, "T H D"],
    pages: Shaped[np.ndarray, "N S 2 H D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[np.ndarray, " H"] | None = None,
    v_scale: Float32[np.ndarray, " H"] | None = None,
    sinks: Float32[np.ndarray, " Hq"] | None = None,
) -> tuple[Float64[np.ndarray, "T Hq D"], Shaped[np.ndarray, "N S 2 H D"]]:
    """Writes this step's keys and values, then attends over the pages as stored."""
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    pages = kv_write(k, v, pages, batch, spec, **scales)
    out = ragged_paged_attention(q, pages, batch, spec, config, **scales, sinks=sinks)
    return out, pages
