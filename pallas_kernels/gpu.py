"""Paged attention and the KV write on NVIDIA GPUs: Pallas kernels lowered to Triton.

A mixed step runs two kernels: one over tiles of query tokens (gpu_prefill), one over the decoding
rows with their context split over programs (gpu_decode). A decode-only step runs the second alone.
Which GPUs and types are served is said by `check_supported`; docs/kernels.md has the reasons.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Num

from pallas_kernels import gpu_layout, gpu_tables, validation
from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.gpu_common import Heads, Scores
from pallas_kernels.gpu_decode import decode_attention
from pallas_kernels.gpu_layout import (
    GpuPages,
    init_kv_pages,
    kv_pages_from_logical,
    kv_pages_to_logical,
    value_offset,
)
from pallas_kernels.gpu_prefill import prefill_attention
from pallas_kernels.gpu_write import write

_MAX_HEAD_DIM = 256
_MAX_GROUP = 128

_interpret: contextvars.ContextVar[bool] = contextvars.ContextVar("gpu_interpret", default=False)


@contextlib.contextmanager
def interpret_mode(enabled: bool = True) -> Iterator[None]:
    """Kernels traced inside run in Pallas' interpreter, on any device. For tests."""
    token = _interpret.set(enabled)
    try:
        yield
    finally:
        _interpret.reset(token)


def check_supported(spec: KVCacheSpec, config: AttentionConfig | None = None) -> None:
    """Raises NotImplementedError, with the reason, for what these kernels do not do.

    Only the pages decide: every `config` is served.
    """
    del config
    capability = gpu_tables.compute_capability()
    shown = f"{capability // 10}.{capability % 10}"
    if capability < gpu_tables.MIN_COMPUTE_CAPABILITY:
        raise NotImplementedError(
            f"this GPU has compute capability {shown}, and the GPU kernels need 8.0 or newer"
        )
    dtype = jnp.dtype(spec.dtype)
    if dtype == jnp.float8_e4m3fn and capability < gpu_tables.FP8_COMPUTE_CAPABILITY:
        raise NotImplementedError(
            f"this GPU has compute capability {shown}, and KV pages in float8_e4m3fn need 8.9 or "
            "newer in the GPU kernels"
        )
    if spec.head_dim > _MAX_HEAD_DIM:
        raise NotImplementedError(
            f"head_dim={spec.head_dim}, and the GPU kernels go up to {_MAX_HEAD_DIM}"
        )


def kv_page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one page of one layer. Raises NotImplementedError: see `check_supported`."""
    check_supported(spec)
    return gpu_layout.kv_page_bytes(spec)


def _compute_dtype(q_dtype: DTypeLike, kv_dtype: DTypeLike) -> jnp.dtype:
    """Type of the dots' operands: the wider of the two; quantised pages take the query's."""
    if jnp.dtype(kv_dtype).itemsize == 1:
        return jnp.dtype(q_dtype)
    return jnp.promote_types(q_dtype, kv_dtype)


def _heads(spec: KVCacheSpec, group: int, compute_dtype: DTypeLike) -> Heads:
    return Heads(
        group=group,
        group_pad=1 << (group - 1).bit_length(),
        head_dim=spec.head_dim,
        head_dim_pad=gpu_tables.padded_head_dim(spec.head_dim),
        value_offset=value_offset(spec),
        page_size=spec.page_size,
        compute_dtype=jnp.dtype(compute_dtype),
    )


def kv_write(
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: GpuPages,
    batch: RaggedBatch,
    spec: KVCacheSpec,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
) -> GpuPages:
    """Writes this step's keys and values at `batch.slots`; donated pages change in place.

    Raises:
      NotImplementedError: see `check_supported`.
      ValueError: shapes or types that do not fit.
    """
    validation.check_write(k, v, batch, spec, k_scale, v_scale)
    check_supported(spec)
    heads = _heads(spec, 1, k.dtype)
    return write(
        k,
        v,
        pages,
        batch.slots,
        heads,
        k_scale=k_scale,
        v_scale=v_scale,
        interpret=_interpret.get(),
    )


def ragged_paged_attention(
    q: Num[Array, "T Hq D"],
    pages: GpuPages,
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> Num[Array, "T Hq D"]:
    """Attention of every query token over its row's pages, in q's type; padding becomes zero.

    Raises:
      NotImplementedError: see `check_supported`; also more than 128 query heads per KV head.
      ValueError: shapes or types that do not fit.
    """
    validation.check_attention(q, batch, spec, config, k_scale, v_scale, sinks)
    check_supported(spec)
    num_tokens, num_q_heads, head_dim = q.shape
    group = num_q_heads // spec.num_kv_heads
    if group > _MAX_GROUP:
        raise NotImplementedError(
            f"{group} query heads per KV head, and the GPU kernels go up to {_MAX_GROUP}"
        )
    compute_dtype = _compute_dtype(q.dtype, spec.dtype)
    heads = _heads(spec, group, compute_dtype)
    scores = Scores(config.sm_scale, config.soft_cap, config.sliding_window)
    rows, pages_per_row = batch.page_indices.shape
    options = {
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": sinks,
        "interpret": _interpret.get(),
    }

    decode_only = config.max_query_len == 1 and num_tokens <= rows
    out = None
    if config.batch_invariant or not decode_only:
        # One kernel for every row makes a query's arithmetic independent of its neighbours.
        first_row = 0 if config.batch_invariant else batch.num_decodes[0]
        tiles = gpu_tables.tiles("prefill", compute_dtype.itemsize, head_dim)
        tiles = gpu_tables.fit_group(tiles, heads.group_pad)
        out = prefill_attention(
            q, pages, batch, heads, scores, tiles=tiles, first_row=first_row, **options
        )
        if config.batch_invariant:
            return out
    tiles = gpu_tables.tiles("decode", compute_dtype.itemsize, head_dim)
    tiles = gpu_tables.fit_group(tiles, heads.group_pad)
    context = pages_per_row * spec.page_size
    if config.sliding_window is not None:
        context = min(context, config.sliding_window + tiles.block_n)
    splits = gpu_tables.num_splits(rows, spec.num_kv_heads, context)
    return decode_attention(
        q, pages, batch, heads, scores, tiles=tiles, splits=splits, out=out, **options
    )


def attend(
    q: Num[Array, "T Hq D"],
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: GpuPages,
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> tuple[Num[Array, "T Hq D"], GpuPages]:
    """Writes k and v, then attends: two launches, three where the context is split."""
    pages = kv_write(k, v, pages, batch, spec, k_scale=k_scale, v_scale=v_scale)
    out = ragged_paged_attention(
        q, pages, batch, spec, config, k_scale=k_scale, v_scale=v_scale, sinks=sinks
    )
    return out, pages


__all__ = [
    "attend",
    "check_supported",
    "init_kv_pages",
    "interpret_mode",
    "kv_page_bytes",
    "kv_pages_from_logical",
    "kv_pages_to_logical",
    "kv_write",
    "ragged_paged_attention",
]
