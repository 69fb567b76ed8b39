"""Paged attention of decoding rows: one query token per row (Pallas, Mosaic TPU).

Per grid step a chunk of rows has its queries and outputs in VMEM; the pages of their contexts
stream through two buffers, and the copy of the next block, of whatever row, runs while the current
one is computed:

    DMA   | row 0 blk 0 | row 0 blk 1 | row 1 blk 0 | row 3 blk 0 | ...
    MXU                 | row 0 blk 0 | row 0 blk 1 | row 1 blk 0 | ...

A full block is one straight run of code without masks; the last block of a row (and the first
under a sliding window) goes in masked chunks of which only those that hold context are computed.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Num, Shaped

from pallas_kernels.tpu_layout import LANES, HeadGroups
from pallas_kernels.tpu_pages import page_range, start_pages, wait_pages
from pallas_kernels.tpu_softmax import LOG2E, MASKED, Scoring, normalize, spread, update

Ref = Any


def decode_attention(
    q: Float[Array, "R N M L"],
    pages: Shaped[Array, "P H C S L"],
    kv_lens: Int32[Array, " R"],
    page_indices: Int32[Array, "R W"],
    num_rows: Int32[Array, ""],
    *,
    groups: HeadGroups,
    scoring: Scoring,
    sliding_window: int | None,
    key_scale: Float32[Array, "N M"] | None,
    sinks: Float32[Array, "N M"] | None,
    pages_per_block: int,
    rows_per_step: int,
    vmem_limit_bytes: int,
) -> Num[Array, "R N M L"]:
    """Attention of rows 0..num_rows-1, one query each, over their pages.

    Queries are grouped as `head_groups` says. Rows without context and rows from num_rows on give
    zeros. Values are not scaled. R is a multiple of rows_per_step.
    """
    rows = q.shape[0]
    steps = rows // rows_per_step
    live = (kv_lens > 0) & (jnp.arange(rows) < num_rows)
    # Live rows first, in order, and how many of them come before each grid step.
    order = jnp.argsort(~live, stable=True).astype(jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(live, dtype=jnp.int32)])
    before = before[jnp.arange(steps + 1) * rows_per_step]
    extras = [x for x in (key_scale, sinks) if x is not None]
    extras = [jnp.broadcast_to(x[:, :, None], (*x.shape, LANES)) for x in extras]

    block = (rows_per_step, groups.count, groups.rows, q.shape[-1])
    q_spec = pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0))
    whole = pl.BlockSpec((groups.count, groups.rows, LANES), lambda i, *_: (0, 0, 0))
    state = (groups.count, groups.rows)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            groups=groups,
            scoring=scoring,
            sliding_window=sliding_window,
            table_width=page_indices.shape[1],
            has_key_scale=key_scale is not None,
            has_sinks=sinks is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(steps,),
            in_specs=[q_spec, *[whole] * len(extras), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=q_spec,
            scratch_shapes=[
                pltpu.VMEM((2, pages_per_block, *pages.shape[1:]), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, LANES), jnp.float32),
                pltpu.VMEM((*state, q.shape[-1]), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit_bytes,
            # Pages and slots come from the scheduler, which owns them; a check costs more than
            # the copy it guards takes to start.
            disable_bounds_checks=True,
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="tidegate_decode_attention",
    )(order, before, kv_lens, page_indices.reshape(-1), q, *extras, pages)


def _kernel(
    order: Ref,  # int32 [R] SMEM, live rows first
    before: Ref,  # int32 [steps + 1] SMEM, live rows before each grid step
    kv_lens: Ref,  # int32 [R] SMEM
    table: Ref,  # int32 [R * W] SMEM
    q_ref: Ref,  # [rows_per_step, N, M, L] VMEM
    *refs: Ref,
    groups: HeadGroups,
    scoring: Scoring,
    sliding_window: int | None,
    table_width: int,
    has_key_scale: bool,
    has_sinks: bool,
) -> None:
    inputs = list(refs)
    key_scale_ref = inputs.pop(0) if has_key_scale else None  # float32 [N, M, 128] VMEM
    sinks_ref = inputs.pop(0) if has_sinks else None  # float32 [N, M, 128] VMEM
    (
        pages_hbm,  # [P, H, C, S, L] HBM
        out_ref,  # [rows_per_step, N, M, L] VMEM
        buffers,  # [2, pages_per_block, H, C, S, L] VMEM
        semaphores,  # DMA [2]
        turn,  # int32 [1] SMEM, buffer of the next block; lives across grid steps
        top_ref,  # float32 [N, M, 128] VMEM
        total_ref,  # float32 [N, M, 128] VMEM
        sum_ref,  # float32 [N, M, L] VMEM
    ) = inputs
    _, pages_per_block, _, parts, page_size, lanes = buffers.shape
    block_tokens = pages_per_block * page_size
    chunk_pages = max(LANES // page_size, 1)
    chunk_tokens = chunk_pages * page_size
    step = pl.program_id(0)
    num_live = before[pl.num_programs(0)]

    def row_pages(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Row of the index-th live row, its first page and number of pages."""
        row = order[index]
        first_position = jnp.int32(0)
        if sliding_window is not None:
            first_position = jnp.maximum(kv_lens[row] - sliding_window, 0)
        return row, *page_range(first_position, kv_lens[row], page_size)

    def start_block(index: jax.Array, block: jax.Array, buffer: jax.Array) -> None:
        row, first, count = row_pages(index)
        skipped = block * pages_per_block
        start_pages(
            pages_hbm,
            table,
            row * table_width + first + skipped,
            jnp.minimum(count - skipped, pages_per_block),
            buffers.at[buffer],
            semaphores.at[buffer],
        )

    def attend_pages(
        row: jax.Array, buffer: jax.Array, first: Any, count: int, bounds: Any
    ) -> None:
        """Adds `count` pages of the buffer from page `first` on.

        bounds: None, or the range of tokens to keep, counted from the first one.
        """
        tokens = count * page_size

        def load(head: int, part: int) -> jax.Array:
            tile = buffers[buffer, pl.ds(first, count), head, part]
            return scoring.operand(tile.reshape(tokens, lanes))

        sublane = jax.lax.broadcasted_iota(jnp.int32, (groups.rows, 1), 0)
        owner = sublane // groups.q_per_kv
        for group in range(groups.count):
            heads = range(group * groups.heads, (group + 1) * groups.heads)
            queries = q_ref[row, group]  # [M, L]
            keys = [load(head, 0) for head in heads]
            products = scoring.products(queries, keys[0])
            for index in range(1, groups.heads):
                other = scoring.products(queries, keys[index])
                products = jnp.where(owner == index, other, products)
            key_scale = None if key_scale_ref is None else key_scale_ref[group][:, :1]
            scores = scoring.scores(products, key_scale)
            values = keys if parts == 1 else [load(head, 1) for head in heads]
            if bounds is not None:
                low, high = bounds
                position = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                scores = jnp.where((position >= low) & (position < high), scores, MASKED)
                # A weight of zero does not hide a NaN: what was never written must be zero.
                token = jax.lax.broadcasted_iota(jnp.int32, (tokens, lanes), 0)
                keep = (token >= low) & (token < high)
                values = [
                    jnp.where(keep, value.astype(jnp.float32), 0.0).astype(value.dtype)
                    for value in values
                ]
            weights, factor, top, total = update(scores, top_ref[group], total_ref[group])
            summed = scoring.weighted(weights, values[0])
            for index in range(1, groups.heads):
                other = scoring.weighted(weights, values[index])
                summed = jnp.where(owner == index, other, summed)
            top_ref[group], total_ref[group] = top, total
            sum_ref[group] = sum_ref[group] * spread(factor, lanes) + summed

    def attend_block(
        index: jax.Array, row: jax.Array, first: jax.Array, count: jax.Array, block: jax.Array
    ) -> None:
        """Starts the next block's copies, waits for this one's and computes it."""
        buffer = turn[0]
        turn[0] = 1 - buffer
        last = (block + 1) * pages_per_block >= count
        next_index = jnp.where(last, index + 1, index)
        next_block = jnp.where(last, 0, block + 1)

        @pl.when(next_index < num_live)
        def _() -> None:
            start_block(next_index, next_block, 1 - buffer)

        held = jnp.minimum(count - block * pages_per_block, pages_per_block)
        wait_pages(held, buffers.at[buffer], semaphores.at[buffer])
        base = (first + block * pages_per_block) * page_size
        high = kv_lens[row] - base
        low = jnp.int32(0)
        if sliding_window is not None:
            low = jnp.maximum(high - sliding_window, 0)
        whole = (high >= block_tokens) & (low == 0)
        local = row - step * q_ref.shape[0]

        @pl.when(whole)
        def _() -> None:
            attend_pages(local, buffer, 0, pages_per_block, None)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            def attend_chunk(chunk: jax.Array, carry: None) -> None:
                start = chunk * chunk_tokens
                bounds = (low - start, high - start)
                attend_pages(local, buffer, chunk * chunk_pages, chunk_pages, bounds)
                return carry

            end = (jnp.minimum(high, block_tokens) + chunk_tokens - 1) // chunk_tokens
            jax.lax.fori_loop(low // chunk_tokens, end, attend_chunk, None)

    @pl.when(step == 0)
    def _() -> None:
        turn[0] = 0

        @pl.when(num_live > 0)
        def _() -> None:
            start_block(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    out_ref[...] = jnp.zeros_like(out_ref)

    def attend_row(index: jax.Array, carry: None) -> None:
        row, first, count = row_pages(index)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        if sinks_ref is None:
            top_ref[...] = jnp.full_like(top_ref, MASKED)
            total_ref[...] = jnp.zeros_like(total_ref)
        else:
            # The sink is one more key with weight 1 and value 0; lane 0 holds its weight.
            lane = jax.lax.broadcasted_iota(jnp.int32, total_ref.shape, 2)
            top_ref[...] = sinks_ref[...] * LOG2E
            total_ref[...] = jnp.where(lane == 0, 1.0, 0.0)

        def block_step(block: jax.Array, carry: None) -> None:
            attend_block(index, row, first, count, block)
            return carry

        blocks = (count + pages_per_block - 1) // pages_per_block
        jax.lax.fori_loop(0, blocks, block_step, None)
        for group in range(groups.count):
            out = normalize(sum_ref[group], total_ref[group])
            out_ref[row - step * q_ref.shape[0], group] = out.astype(out_ref.dtype)
        return carry

    jax.lax.fori_loop(before[step], before[step + 1], attend_row, None)
