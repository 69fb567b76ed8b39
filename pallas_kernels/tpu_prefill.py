"""Paged attention of rows with many query tokens (Pallas, Mosaic TPU).

The grid is (blocks of KV heads, tiles of query tokens). A tile may hold the ends of several rows;
each (tile, row) pair is one item of a work list, and the pages an item needs stream through two
buffers, across items, tiles and head blocks:

    tile 0          tile 1                    tile 2
    [ row 0 ][ row 1      ][ row 1          ][ row 1 | row 2 ]
    item 0   item 1        item 2            item 3   item 4

Within an item, (queries, keys) tiles wholly below the causal diagonal run without masks, those
wholly above it or outside the sliding window are not visited, and the rest is masked. A tile of
queries that holds a whole row reads its pages once, whatever the row's length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Num, Shaped

from pallas_kernels.tpu_layout import LANES
from pallas_kernels.tpu_pages import page_range, start_pages, wait_pages
from pallas_kernels.tpu_softmax import LOG2E, MASKED, Scoring, normalize, spread, update

Ref = Any


@dataclasses.dataclass(frozen=True)
class PrefillBlocks:
    """Block sizes. Attributes:

    tile_tokens: query tokens whose state stays in VMEM; pages are read once per tile and row.
    step_tokens: query tokens per product; divides tile_tokens.
    step_keys: keys per product, a multiple of 128 and of the page size.
    pages_per_block: pages per copy buffer, a multiple of step_keys / page_size.
    heads: KV heads per grid step, a divisor of the number of KV heads.
    """

    tile_tokens: int
    step_tokens: int
    step_keys: int
    pages_per_block: int
    heads: int


class WorkList(NamedTuple):
    """Items in order of their tiles. Int32.

    Attributes:
      tile, row: [I], of each item; unused items name tile `tiles`.
      start: [tiles + 1], first item of each tile; the last entry is the number of items.
    """

    tile: Int32[Array, " I"]
    row: Int32[Array, " I"]
    start: Int32[Array, " tiles_plus_1"]


def work_list(
    cu_q_lens: Int32[Array, " R_plus_1"],
    used: Int32[Array, " R"],
    *,
    tile_tokens: int,
    num_tiles: int,
) -> WorkList:
    """(tile, row) pairs of the used rows that share a query token. `used` is bool [R]."""
    start, end = cu_q_lens[:-1], cu_q_lens[1:]
    first = start // tile_tokens
    items = jnp.where(used & (end > start), (end - 1) // tile_tokens - first + 1, 0)
    ends = jnp.cumsum(items, dtype=jnp.int32)
    item = jnp.arange(num_tiles + start.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(ends, item, side="right").astype(jnp.int32)
    row = jnp.minimum(row, start.shape[0] - 1)
    tile = first[row] + item - (ends[row] - items[row])
    tile = jnp.where(item < ends[-1], tile, num_tiles).astype(jnp.int32)
    tiles = jnp.arange(num_tiles + 1, dtype=jnp.int32)
    return WorkList(tile, row, jnp.searchsorted(tile, tiles, side="left").astype(jnp.int32))


def prefill_attention(
    q: Float[Array, "H TG L"],
    pages: Shaped[Array, "P H C S L"],
    cu_q_lens: Int32[Array, " R_plus_1"],
    kv_lens: Int32[Array, " R"],
    page_indices: Int32[Array, "R W"],
    used: Int32[Array, " R"],
    *,
    q_per_kv: int,
    scoring: Scoring,
    sliding_window: int | None,
    key_scale: Float32[Array, " H"] | None,
    sinks: Float32[Array, "H G"] | None,
    blocks: PrefillBlocks,
    vmem_limit_bytes: int,
    aligned: bool = False,
) -> Num[Array, "H TG L"]:
    """Attention of the rows in `used` (bool [R]) over their pages.

    q holds token t's `q_per_kv` query heads of a KV head in rows t * q_per_kv and on; the number of
    tokens is a multiple of blocks.tile_tokens. Tokens of other rows give finite values. Values are
    not scaled. `aligned` cuts keys at multiples of step_keys even under a sliding window, at the
    price of pages that no query sees.
    """
    heads, q_rows, lanes = q.shape
    tile_rows = blocks.tile_tokens * q_per_kv
    tiles = q_rows // tile_rows
    work = work_list(
        cu_q_lens, used & (kv_lens > 0), tile_tokens=blocks.tile_tokens, num_tiles=tiles
    )
    extras, extra_specs = [], []
    step_rows = blocks.step_tokens * q_per_kv
    if key_scale is not None:
        extras.append(jnp.broadcast_to(key_scale[:, None, None], (heads, 8, LANES)))
        extra_specs.append(pl.BlockSpec((blocks.heads, 8, LANES), lambda h, i, *_: (h, 0, 0)))
    if sinks is not None:
        # One step's rows: the same for every token.
        per_row = jnp.tile(sinks, (1, blocks.step_tokens))[:, :, None]
        extras.append(jnp.broadcast_to(per_row, (heads, step_rows, LANES)))
        spec = pl.BlockSpec((blocks.heads, step_rows, LANES), lambda h, i, *_: (h, 0, 0))
        extra_specs.append(spec)
    q_spec = pl.BlockSpec((blocks.heads, tile_rows, lanes), lambda h, i, *_: (h, i, 0))
    state = (blocks.heads, tile_rows)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            q_per_kv=q_per_kv,
            scoring=scoring,
            sliding_window=sliding_window,
            blocks=blocks,
            table_width=page_indices.shape[1],
            has_key_scale=key_scale is not None,
            has_sinks=sinks is not None,
            aligned=aligned,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(heads // blocks.heads, tiles),
            in_specs=[q_spec, *extra_specs, pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM(
                    (2, blocks.pages_per_block, blocks.heads, *pages.shape[2:]), pages.dtype
                ),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, lanes), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes,
            # Pages and slots come from the scheduler, which owns them; a check costs more than
            # the copy it guards takes to start.
            disable_bounds_checks=True,
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="tidegate_prefill_attention",
    )(*work, cu_q_lens, kv_lens, page_indices.reshape(-1), q, *extras, pages)


class _Item(NamedTuple):
    """One (tile, row) pair: query tokens [low, high) at positions token + shift; its pages."""

    row: jax.Array
    low: jax.Array
    high: jax.Array
    shift: jax.Array
    first_page: jax.Array
    num_pages: jax.Array


def _kernel(
    item_tile: Ref,  # int32 [I] SMEM
    item_row: Ref,  # int32 [I] SMEM
    item_start: Ref,  # int32 [tiles + 1] SMEM
    cu_q_lens: Ref,  # int32 [R + 1] SMEM
    kv_lens: Ref,  # int32 [R] SMEM
    table: Ref,  # int32 [R * W] SMEM
    q_ref: Ref,  # [heads, tile_rows, L] VMEM
    *refs: Ref,
    q_per_kv: int,
    scoring: Scoring,
    sliding_window: int | None,
    blocks: PrefillBlocks,
    table_width: int,
    has_key_scale: bool,
    has_sinks: bool,
    aligned: bool,
) -> None:
    inputs = list(refs)
    key_scale_ref = inputs.pop(0) if has_key_scale else None  # float32 [heads, 8, 128] VMEM
    sinks_ref = inputs.pop(0) if has_sinks else None  # float32 [heads, step_rows, 128] VMEM
    (
        pages_hbm,  # [P, H, C, S, L] HBM
        out_ref,  # [heads, tile_rows, L] VMEM
        buffers,  # [2, pages_per_block, heads, C, S, L] VMEM
        semaphores,  # DMA [2]
        turn,  # int32 [1] SMEM, buffer of the next block; lives across grid steps
        top_ref,  # float32 [heads, tile_rows, 128] VMEM
        total_ref,  # float32 [heads, tile_rows, 128] VMEM
        sum_ref,  # float32 [heads, tile_rows, L] VMEM
    ) = inputs
    _, pages_per_block, num_heads, parts, page_size, lanes = buffers.shape
    step_rows = blocks.step_tokens * q_per_kv
    step_pages = blocks.step_keys // page_size
    block_tokens = pages_per_block * page_size
    head_block, tile = pl.program_id(0), pl.program_id(1)
    num_items = item_start[pl.num_programs(1)]
    tile_start = tile * blocks.tile_tokens

    def item_of(index: jax.Array) -> _Item:
        row, start = item_row[index], item_tile[index] * blocks.tile_tokens
        end = cu_q_lens[row + 1]
        low = jnp.maximum(cu_q_lens[row], start)
        high = jnp.minimum(end, start + blocks.tile_tokens)
        shift = kv_lens[row] - end
        first_position = jnp.int32(0)
        if sliding_window is not None:
            first_position = jnp.maximum(low + shift - sliding_window + 1, 0)
            if aligned:
                first_position = first_position // blocks.step_keys * blocks.step_keys
        pages = page_range(first_position, high + shift, page_size)
        return _Item(row, low, high, shift, *pages)

    def start_block(heads: jax.Array, index: jax.Array, block: jax.Array, buffer: jax.Array):
        item = item_of(index)
        skipped = block * pages_per_block
        start_pages(
            pages_hbm.at[:, pl.ds(heads * num_heads, num_heads)],
            table,
            item.row * table_width + item.first_page + skipped,
            jnp.minimum(item.num_pages - skipped, pages_per_block),
            buffers.at[buffer],
            semaphores.at[buffer],
        )

    def attend_step(
        item: _Item, buffer: jax.Array, first_page: jax.Array, step: jax.Array, base: Any
    ) -> None:
        """Adds step_keys keys from `first_page` of the buffer to step_rows query rows.

        base: None where every query sees every key, else the position of the first key.
        """
        rows = pl.ds(pl.multiple_of(step * step_rows, step_rows), step_rows)

        def load(head: int, part: int) -> jax.Array:
            held = buffers[buffer, pl.ds(first_page, step_pages), head, part]
            return scoring.operand(held.reshape(blocks.step_keys, lanes))

        if base is not None:
            shape = (step_rows, blocks.step_keys)
            token = jax.lax.broadcasted_iota(jnp.int32, (step_rows, 1), 0) // q_per_kv
            token = token + (tile_start + step * blocks.step_tokens)
            # The last key a query sees, counted from base; none for another row's queries.
            last = jnp.where(
                (token >= item.low) & (token < item.high), token + (item.shift - base), -1
            )
            key = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            seen = key <= last
            if sliding_window is not None:
                seen = seen & (key > last - sliding_window)
            # A weight of zero does not hide a NaN: what was never written must be zero.
            written = jax.lax.broadcasted_iota(jnp.int32, (blocks.step_keys, lanes), 0)
            written = written < item.high + item.shift - base
            if sliding_window is not None:
                oldest = jnp.maximum(item.low + item.shift - sliding_window + 1, 0) - base
                position = jax.lax.broadcasted_iota(jnp.int32, (blocks.step_keys, lanes), 0)
                written = written & (position >= oldest)
        for head in range(num_heads):
            keys = load(head, 0)
            products = scoring.products(q_ref[head, rows], keys)
            key_scale = None if key_scale_ref is None else key_scale_ref[head, :1, :1]
            scores = scoring.scores(products, key_scale)
            values = keys if parts == 1 else load(head, 1)
            if base is not None:
                scores = jnp.where(seen, scores, MASKED)
                values = jnp.where(written, values.astype(jnp.float32), 0.0).astype(values.dtype)
            weights, factor, top, total = update(scores, top_ref[head, rows], total_ref[head, rows])
            top_ref[head, rows], total_ref[head, rows] = top, total
            summed = scoring.weighted(weights, values)
            sum_ref[head, rows] = sum_ref[head, rows] * spread(factor, lanes) + summed

    def attend_keys(item: _Item, buffer: jax.Array, first_page: jax.Array, base: jax.Array) -> None:
        """Visits the query steps of the item that see any of the keys base, base + 1, ..."""
        low = jnp.maximum(item.low, base - item.shift)
        high = item.high
        if sliding_window is not None:
            reach = base + blocks.step_keys + sliding_window - 1
            high = jnp.minimum(high, reach - item.shift)

        def visit(step: jax.Array, carry: None) -> None:
            start = tile_start + step * blocks.step_tokens
            end = start + blocks.step_tokens
            plain = (start >= item.low) & (end <= item.high)
            plain = plain & (start + item.shift >= base + blocks.step_keys - 1)
            if sliding_window is not None:
                plain = plain & (end - 1 + item.shift - sliding_window < base)

            @pl.when(plain)
            def _() -> None:
                attend_step(item, buffer, first_page, step, None)

            @pl.when(jnp.logical_not(plain))
            def _() -> None:
                attend_step(item, buffer, first_page, step, base)

            return carry

        size = blocks.step_tokens
        first = (low - tile_start) // size
        jax.lax.fori_loop(first, (high - tile_start + size - 1) // size, visit, None)

    def attend_block(index: jax.Array, item: _Item, block: jax.Array) -> None:
        """Starts the next block's copies, waits for this one's and computes it."""
        buffer = turn[0]
        turn[0] = 1 - buffer
        last = (block + 1) * pages_per_block >= item.num_pages
        wraps = last & (index + 1 == num_items)
        next_index = jnp.where(wraps, 0, jnp.where(last, index + 1, index))
        next_block = jnp.where(last, 0, block + 1)
        next_heads = jnp.where(wraps, head_block + 1, head_block)

        @pl.when(next_heads < pl.num_programs(0))
        def _() -> None:
            start_block(next_heads, next_index, next_block, 1 - buffer)

        held = jnp.minimum(item.num_pages - block * pages_per_block, pages_per_block)
        wait_pages(held, buffers.at[buffer], semaphores.at[buffer])
        base = (item.first_page + block * pages_per_block) * page_size

        def key_step(index: jax.Array, carry: None) -> None:
            attend_keys(item, buffer, index * step_pages, base + index * blocks.step_keys)
            return carry

        tokens = jnp.minimum(item.high + item.shift - base, block_tokens)
        steps = (tokens + blocks.step_keys - 1) // blocks.step_keys
        jax.lax.fori_loop(0, steps, key_step, None)

    @pl.when((head_block == 0) & (tile == 0))
    def _() -> None:
        turn[0] = 0

        @pl.when(num_items > 0)
        def _() -> None:
            start_block(jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(0))

    num_steps = blocks.tile_tokens // blocks.step_tokens

    def reset(step: jax.Array, carry: None) -> None:
        rows = pl.ds(pl.multiple_of(step * step_rows, step_rows), step_rows)
        shape = (num_heads, step_rows, LANES)
        sum_ref[:, rows] = jnp.zeros((num_heads, step_rows, lanes), jnp.float32)
        if sinks_ref is None:
            top_ref[:, rows] = jnp.full(shape, MASKED, jnp.float32)
            total_ref[:, rows] = jnp.zeros(shape, jnp.float32)
        else:
            # The sink is one more key with weight 1 and value 0; lane 0 holds its weight.
            lane = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
            top_ref[:, rows] = sinks_ref[...] * LOG2E
            total_ref[:, rows] = jnp.where(lane == 0, 1.0, 0.0)
        return carry

    jax.lax.fori_loop(0, num_steps, reset, None)

    def item_step(index: jax.Array, carry: None) -> None:
        item = item_of(index)

        def block_step(block: jax.Array, carry: None) -> None:
            attend_block(index, item, block)
            return carry

        count = (item.num_pages + pages_per_block - 1) // pages_per_block
        jax.lax.fori_loop(0, count, block_step, None)
        return carry

    jax.lax.fori_loop(item_start[tile], item_start[tile + 1], item_step, None)

    def finish(step: jax.Array, carry: None) -> None:
        rows = pl.ds(pl.multiple_of(step * step_rows, step_rows), step_rows)
        for head in range(num_heads):
            out = normalize(sum_ref[head, rows], total_ref[head, rows])
            out_ref[head, rows] = out.astype(out_ref.dtype)
        return carry

    jax.lax.fori_loop(0, num_steps, finish, None)
