"""Attention of rows with any number of query tokens on GPU: tiles of queries over paged context.

FlashAttention-2 (Dao, arXiv 2307.08691) over a ragged batch: a program takes one tile of
consecutive query tokens of one row, with all query heads of one KV head's group, and walks the
row's pages up to the last position that the tile may see.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Int32, Num

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.gpu_common import (
    Heads,
    Operands,
    Scores,
    bind,
    both,
    column_mask,
    columns,
    empty_softmax,
    finish_softmax,
    load_rows,
    load_tokens,
    scalar,
    softmax_step,
)
from pallas_kernels.gpu_layout import GpuPages
from pallas_kernels.gpu_tables import Tiles


def max_tiles(num_tokens: int, rows: int, block_q: int) -> int:
    """Most tiles that `rows` rows and the padding can be cut into: sum of ceil(len / block_q)."""
    pieces = min(rows + 1, num_tokens)
    return (num_tokens + pieces * (block_q - 1)) // block_q


def tile_map(
    batch: RaggedBatch, first_row: Int32[Array, ""] | int, *, num_tokens: int, block_q: int
) -> Int32[Array, "tiles 4"]:
    """Which tokens each program takes: (row, first token, end of the row, first position).

    Rows before `first_row` get no tile. The padding tokens form one more row, at positions before
    any context, so that their results are written, as zeros. Surplus tiles are empty. The same in
    every layer: XLA computes it once per step.
    """
    rows = batch.kv_lens.shape[0]
    cu = batch.cu_q_lens
    ends = jnp.concatenate([cu[1:], jnp.full((1,), num_tokens, jnp.int32)])
    lens = ends - cu
    before = jnp.concatenate([batch.kv_lens - lens[:-1], jnp.full((1,), -num_tokens, jnp.int32)])
    lens = jnp.where(jnp.arange(rows + 1) < first_row, 0, lens)
    counts = (lens + block_q - 1) // block_q
    cumulative = jnp.cumsum(counts)
    tile = jnp.arange(max_tiles(num_tokens, rows, block_q), dtype=jnp.int32)
    row = jnp.sum(cumulative[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    inside = row <= rows
    row = jnp.minimum(row, rows)
    skipped = (tile - (cumulative - counts)[row]) * block_q
    start = jnp.where(inside, cu[row] + skipped, num_tokens)
    position = jnp.where(inside, before[row] + skipped, -num_tokens)
    end = jnp.where(inside, ends[row], num_tokens)
    # The padding row has no pages; clamp what the kernel reads (it reads no context there).
    return jnp.stack([jnp.minimum(row, rows - 1), start, end, position], axis=1).astype(jnp.int32)


def _prefill_kernel(
    *all_refs: Any, names: tuple[str, ...], heads: Heads, scores: Scores, tiles: Tiles
) -> None:
    """grid (tiles, KV heads); refs: see `prefill_attention`. All global memory."""
    refs, o_ref = bind(names, all_refs), all_refs[-1]  # [T, Hq, D]
    kv_head = pl.program_id(1)
    tile = pl.num_programs(0) - 1 - pl.program_id(0)  # later tiles see more: they start first
    block_m, block_n = tiles.block_m, tiles.block_n
    block_q = block_m // heads.group_pad
    info = refs["tile_map"]
    row, start, end, position = info[tile, 0], info[tile, 1], info[tile, 2], info[tile, 3]

    m_index = jnp.arange(block_m, dtype=jnp.int32)[:, None]
    member = m_index % heads.group_pad
    token = start + m_index // heads.group_pad
    valid = (token < end) & (member < heads.group)
    head = kv_head * heads.group + member
    q = load_rows(refs["q"], token, head, valid, heads).astype(heads.compute_dtype)
    q_position = position + m_index // heads.group_pad  # [M, 1]
    k_scale = scalar(refs.get("k_scale"), kv_head)
    v_scale = scalar(refs.get("v_scale"), kv_head)
    k_ref, v_ref = refs["k_pages"], refs.get("v_pages", refs["k_pages"])
    last = position + jnp.minimum(block_q, end - start) - 1

    def step(
        block: Array, carry: tuple[Array, Array, Array], *, masked: bool
    ) -> tuple[Array, Array, Array]:
        n = block * block_n + jnp.arange(block_n, dtype=jnp.int32)
        seen = mask = None
        if masked:
            seen = n <= last
            mask = n[None, :] <= q_position
            if scores.sliding_window is not None:
                seen &= n > position - scores.sliding_window
                mask &= n[None, :] > q_position - scores.sliding_window
            page = plt.load(refs["page_indices"].at[row, n // heads.page_size], mask=seen, other=0)
        else:
            page = plt.load(refs["page_indices"].at[row, n // heads.page_size])
        offset = n % heads.page_size
        k = load_tokens(k_ref, page, kv_head, offset, seen, heads)
        v = load_tokens(v_ref, page + heads.value_offset, kv_head, offset, seen, heads)
        return softmax_step(q, k, v, mask, k_scale, carry, scores)

    lower = jnp.zeros((), jnp.int32)
    upper = jnp.maximum(last + block_n, 0) // block_n
    carry = empty_softmax(block_m, heads)
    if scores.sliding_window is not None:
        lower = jnp.maximum(position - scores.sliding_window + 1, 0) // block_n
    else:
        # Blocks that every query of the tile sees whole need no mask.
        whole = jnp.maximum(position + 1, 0) // block_n
        carry = jax.lax.fori_loop(lower, whole, functools.partial(step, masked=False), carry)
        lower = whole
    acc, m, l = jax.lax.fori_loop(lower, upper, functools.partial(step, masked=True), carry)

    sink = None
    if "sinks" in refs:
        sink = plt.load(refs["sinks"].at[head[:, 0]], mask=valid[:, 0], other=-jnp.inf)
    out = finish_softmax(acc, m, l, sink, v_scale)
    plt.store(
        o_ref.at[token, head, columns(heads)],
        out.astype(o_ref.dtype),
        mask=both(valid, column_mask(heads), out.shape),
    )


@functools.partial(jax.jit, static_argnames=("heads", "scores", "tiles", "interpret"))
def prefill_attention(
    q: Num[Array, "T Hq D"],
    pages: GpuPages,
    batch: RaggedBatch,
    heads: Heads,
    scores: Scores,
    *,
    tiles: Tiles,
    first_row: Int32[Array, ""] | int,
    k_scale: Float32[Array, " H"] | None,
    v_scale: Float32[Array, " H"] | None,
    sinks: Float32[Array, " Hq"] | None,
    interpret: bool,
) -> Num[Array, "T Hq D"]:
    """Attention of the rows from `first_row` on; padding tokens become zero.

    Tokens of earlier rows are left unwritten.
    """
    block_q = tiles.block_m // heads.group_pad
    info = tile_map(batch, first_row, num_tokens=q.shape[0], block_q=block_q)
    operands = Operands(
        q=q,
        k_pages=pages[0],
        v_pages=pages[1] if len(pages) == 2 else None,
        page_indices=batch.page_indices,
        tile_map=info,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
    )
    return pl.pallas_call(
        functools.partial(
            _prefill_kernel, names=operands.names, heads=heads, scores=scores, tiles=tiles
        ),
        grid=(info.shape[0], pages[0].shape[1]),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="prefill_kernel",
    )(*operands.arrays)


__all__ = ["max_tiles", "prefill_attention", "tile_map"]
