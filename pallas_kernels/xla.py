"""Paged attention in plain JAX: runs on every platform, and is what CPUs use.

Work follows the real batch, not its padding: decoding rows walk the pool together in chunks of
positions up to the longest of their contexts, prefilling rows are cut into query tiles that walk
their own context alone. All softmax arithmetic is float32, streamed over the chunks (online
softmax, Milakov and Gimelshein 2018).

A layer's pages are one array, [num_pages, page_size, 2, num_kv_heads, head_dim].
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, Num, Shaped

from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch

_CHUNK = 128  # positions of context per step of the online softmax
_QUERY_TILE = 64  # query tokens of one row taken together
_MASKED = -1e30  # finite, so that a row that sees nothing yet gives no NaN


def init_kv_pages(spec: KVCacheSpec) -> Shaped[Array, "N S 2 H D"]:
    """Zeroed pages of one layer."""
    shape = (spec.num_pages, spec.page_size, 2, spec.num_kv_heads, spec.head_dim)
    return jnp.zeros(shape, spec.dtype)


def kv_pages_from_logical(
    logical: Shaped[Array, "N S 2 H D"], spec: KVCacheSpec
) -> Shaped[Array, "N S 2 H D"]:
    """A copy: the logical form is this implementation's layout."""
    return jnp.array(logical, dtype=spec.dtype)


def kv_pages_to_logical(
    pages: Shaped[Array, "N S 2 H D"], spec: KVCacheSpec
) -> Shaped[Array, "N S 2 H D"]:
    """The inverse of `kv_pages_from_logical`."""
    return jnp.array(pages, dtype=spec.dtype)


def kv_page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one page of one layer; nothing is padded."""
    return spec.page_size * 2 * spec.num_kv_heads * spec.head_dim * np.dtype(spec.dtype).itemsize


def quantize(
    x: Num[Array, "T H D"], scale: Float32[Array, " H"] | None, dtype: DTypeLike
) -> Shaped[Array, "T H D"]:
    """Stored form: x / scale in float32, rounded to nearest even; one-byte types saturate."""
    dtype = np.dtype(dtype)
    value = x.astype(jnp.float32)
    if scale is not None:
        value = value / scale[:, None]
    if dtype.kind == "i":
        limits = jnp.iinfo(dtype)
        value = jnp.clip(jnp.round(value), limits.min, limits.max)
    elif dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        value = jnp.clip(value, -limit, limit)
    return value.astype(dtype)


def kv_write(
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: Shaped[Array, "N S 2 H D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
) -> Shaped[Array, "N S 2 H D"]:
    """Pages with this step's keys and values at `batch.slots`."""
    new = jnp.stack([quantize(k, k_scale, spec.dtype), quantize(v, v_scale, spec.dtype)], axis=1)
    flat = pages.reshape(spec.num_pages * spec.page_size, *pages.shape[2:])
    return flat.at[batch.slots].set(new, mode="promise_in_bounds").reshape(pages.shape)


def ragged_paged_attention(
    q: Num[Array, "T Hq D"],
    pages: Shaped[Array, "N S 2 H D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> Num[Array, "T Hq D"]:
    """Softmax attention of each query over its row's context; zeros for padding."""
    walk = _Walk(pages, batch, spec, config, k_scale, v_scale, sinks)
    rows, tokens = batch.kv_lens.shape[0], q.shape[0]
    query = q.astype(jnp.float32) * config.sm_scale
    decodes = min(rows, tokens)
    in_use = jnp.arange(decodes) < batch.num_decodes[0]
    kv_lens = jnp.where(in_use, batch.kv_lens[:decodes], 0)
    out = walk.attend(query[:decodes, None], batch.page_indices[:decodes], kv_lens - 1, kv_lens)[
        :, 0
    ]
    out = jnp.pad(out, ((0, tokens - decodes), (0, 0), (0, 0)))
    if config.max_query_len == 1:
        return out.astype(q.dtype)
    return _prefill(walk, query, out, batch).astype(q.dtype)


def _prefill(
    walk: _Walk,
    query: Float32[Array, "T Hq D"],
    out: Float32[Array, "T Hq D"],
    batch: RaggedBatch,
) -> Float32[Array, "T Hq D"]:
    """Fills in the rows after the decodes, one tile of query tokens of one row at a time."""
    tokens = query.shape[0]
    tile = min(_QUERY_TILE, tokens)
    # A tile may start anywhere: pad so that a slice never moves to stay in bounds.
    query = jnp.pad(query, ((0, tile), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))

    def one_row(row: Int32[Array, ""], out: Array) -> Array:
        start, end = batch.cu_q_lens[row], batch.cu_q_lens[row + 1]
        kv_len = batch.kv_lens[row]
        pages = lax.dynamic_slice_in_dim(batch.page_indices, row, 1)

        def one_tile(index: Int32[Array, ""], out: Array) -> Array:
            first = start + index * tile
            position = kv_len - (end - first)
            last = jnp.minimum(position + tile, kv_len)
            block = walk.attend(
                lax.dynamic_slice_in_dim(query, first, tile)[None],
                pages,
                position[None],
                last[None],
            )[0]
            old = lax.dynamic_slice_in_dim(out, first, tile)
            mine = (first + jnp.arange(tile) < end)[:, None, None]
            return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, block, old), first, 0)

        return lax.fori_loop(0, (end - start + tile - 1) // tile, one_tile, out)

    return lax.fori_loop(batch.num_decodes[0], batch.num_seqs[0], one_row, out)[:tokens]


class _Walk:
    """Attention of tiles of queries over the pages of their rows, chunk by chunk."""

    def __init__(
        self,
        pages: Shaped[Array, "N S 2 H D"],
        batch: RaggedBatch,
        spec: KVCacheSpec,
        config: AttentionConfig,
        k_scale: Float32[Array, " H"] | None,
        v_scale: Float32[Array, " H"] | None,
        sinks: Float32[Array, " Hq"] | None,
    ):
        self.pages, self.spec, self.config = pages, spec, config
        self.k_scale, self.v_scale, self.sinks = k_scale, v_scale, sinks
        self.chunk_pages = min(max(1, _CHUNK // spec.page_size), batch.page_indices.shape[1])

    def attend(
        self,
        query: Float32[Array, "B Tq Hq D"],
        page_indices: Int32[Array, "B P"],
        position: Int32[Array, " B"],
        kv_lens: Int32[Array, " B"],
    ) -> Float32[Array, "B Tq Hq D"]:
        """Attention of query i of row b, which stands at position[b] + i, below kv_lens[b]."""
        b, tile, heads, d = query.shape
        kv_heads = self.spec.num_kv_heads
        size = self.chunk_pages * self.spec.page_size
        query = query.reshape(b, tile, kv_heads, heads // kv_heads, d)
        width = -(-page_indices.shape[1] // self.chunk_pages) * self.chunk_pages
        page_indices = jnp.pad(page_indices, ((0, 0), (0, width - page_indices.shape[1])))
        first = jnp.int32(0)
        if self.config.sliding_window is not None:
            live = jnp.where(kv_lens > 0, position, jnp.iinfo(jnp.int32).max)
            oldest = jnp.min(live) - self.config.sliding_window + 1
            first = jnp.maximum(oldest, 0) // size
        last = (jnp.max(kv_lens, initial=0) + size - 1) // size
        query_position = position[:, None] + jnp.arange(tile)

        def one_chunk(index: Int32[Array, ""], carry: tuple[Array, Array, Array]):
            top, total, acc = carry
            key, value = self._gather(
                lax.dynamic_slice_in_dim(
                    page_indices, index * self.chunk_pages, self.chunk_pages, axis=1
                )
            )
            key_position = index * size + jnp.arange(size)
            seen = self._seen(query_position, key_position, kv_lens)
            readable = seen.any(axis=1)[:, :, None, None]
            value = jnp.where(readable, value, 0.0)
            scores = self._cap(jnp.einsum("bqhgd,bkhd->bhgqk", query, key))
            mask = seen[:, None, None]
            scores = jnp.where(mask, scores, _MASKED)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            acc = acc * shrink[..., None] + jnp.einsum("bhgqk,bkhd->bhgqd", weights, value)
            return new_top, total * shrink + weights.sum(axis=-1), acc

        stats = (b, kv_heads, heads // kv_heads, tile)
        carry = (jnp.full(stats, _MASKED), jnp.zeros(stats), jnp.zeros((*stats, d)))
        top, total, acc = lax.fori_loop(first, last, one_chunk, carry)
        if self.sinks is not None:
            sinks = self.sinks.reshape(kv_heads, -1)[None, :, :, None]
            new_top = jnp.maximum(top, sinks)
            acc = acc * jnp.exp(top - new_top)[..., None]
            total = total * jnp.exp(top - new_top) + jnp.exp(sinks - new_top)
        out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
        return out.transpose(0, 3, 1, 2, 4).reshape(b, tile, heads, d)

    def _gather(self, page_indices: Int32[Array, "B C"]) -> tuple[Array, Array]:
        """Keys and values [B, C * S, H, D] of the pages, in float32."""
        b = page_indices.shape[0]
        stored = self.pages.at[page_indices].get(mode="promise_in_bounds")
        stored = stored.reshape(b, -1, 2, self.spec.num_kv_heads, self.spec.head_dim)
        key, value = (stored[:, :, i].astype(jnp.float32) for i in (0, 1))
        if self.k_scale is not None:
            key = key * self.k_scale[:, None]
        if self.v_scale is not None:
            value = value * self.v_scale[:, None]
        return key, value

    def _seen(
        self,
        query_position: Int32[Array, "B Tq"],
        key_position: Int32[Array, " K"],
        kv_lens: Int32[Array, " B"],
    ) -> Bool[Array, "B Tq K"]:
        seen = key_position <= query_position[..., None]
        seen &= key_position < kv_lens[:, None, None]
        if self.config.sliding_window is not None:
            seen &= key_position > query_position[..., None] - self.config.sliding_window
        return seen

    def _cap(self, scores: Float[Array, ...]) -> Float[Array, ...]:
        if self.config.soft_cap is None:
            return scores
        return self.config.soft_cap * jnp.tanh(scores / self.config.soft_cap)


def attend(
    q: Num[Array, "T Hq D"],
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: Shaped[Array, "N S 2 H D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> tuple[Num[Array, "T Hq D"], Shaped[Array, "N S 2 H D"]]:
    """Writes this step's keys and values, then attends over the pages as stored."""
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    pages = kv_write(k, v, pages, batch, spec, **scales)
    out = ragged_paged_attention(q, pages, batch, spec, config, **scales, sinks=sinks)
    return out, pages
