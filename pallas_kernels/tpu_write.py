"""In-place write of new keys and values into pages (Pallas, Mosaic TPU).

Tokens share a hardware tile with their neighbours in the page (two bfloat16 tokens even share
32-bit words), so the unit of writing is a granule: the tokens of one tile, [H, C, granule, L]. It
is read, its new tokens are put in, and it is written back; batches of granules are pipelined:

    read     | batch 0 | batch 1 | batch 2 | ...
    combine            | batch 0 | batch 1 | ...
    write                        | batch 0 | ...

One step never holds the same granule twice: a page that two rows share is full before either
writes.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32, Int32, Shaped

Ref = Any

_VMEM_BUDGET = 6 * 2**20


class Granules(NamedTuple):
    """Runs of tokens that lie in one granule, int32.

    Attributes:
      token: [G], first token of the run.
      slot: [G], its slot.
      count: [G], tokens of the run.
      num: [1], runs in use.
    """

    token: Int32[Array, " G"]
    slot: Int32[Array, " G"]
    count: Int32[Array, " G"]
    num: Int32[Array, " 1"]


def granules_of(
    slots: Int32[Array, " T"], *, page_size: int, granule: int, num_rows: int
) -> Granules:
    """Groups tokens by granule. Tokens in the null page (slots below page_size) are left out."""
    tokens = slots.shape[0]
    most = min(tokens, tokens // granule + 2 * num_rows)
    live = slots >= page_size
    home = slots // granule
    previous = jnp.concatenate([jnp.full(1, -1, jnp.int32), jnp.where(live, home, -1)[:-1]])
    run = jnp.cumsum(live & (home != previous), dtype=jnp.int32)
    wanted = jnp.arange(1, most + 1, dtype=jnp.int32)
    first = jnp.searchsorted(run, wanted, side="left").astype(jnp.int32)
    # Counts live tokens up to each one; padding may follow or lie between.
    seen = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(live, dtype=jnp.int32)])
    after = jnp.searchsorted(run, wanted, side="right").astype(jnp.int32)
    first = jnp.minimum(first, tokens - 1)
    return Granules(first, slots[first], seen[after] - seen[first], run[-1:])


def write_granules(
    rows: Float32[Array, "T X L"],
    pages: Shaped[Array, "N H C S L"],
    granules: Granules,
    *,
    granule: int,
    single: bool,
    vmem_limit_bytes: int,
) -> Shaped[Array, "N H C S L"]:
    """Pages with the tokens of `granules` in place.

    rows: each token's H * C stored rows, X = H * C, exact in the pages' dtype.
    single: every run is one token (a decoding step).
    """
    num_rows, lanes = rows.shape[1:]
    token_bytes = num_rows * lanes
    window = granule if single else 2 * granule
    bytes_each = 2 * token_bytes * (4 * (1 if single else window) + 2 * granule * pages.itemsize)
    batch = max(1, min(8, _VMEM_BUDGET // bytes_each))
    if not single:
        rows = jnp.pad(rows, ((0, granule), (0, 0), (0, 0)))
    shape = (2, batch, *pages.shape[1:3], granule, lanes)
    return pl.pallas_call(
        functools.partial(_kernel, page_size=pages.shape[3], single=single),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((2, batch, 1 if single else window, num_rows, lanes), jnp.float32),
                pltpu.VMEM(shape, pages.dtype),
                pltpu.VMEM(shape, pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_limit_bytes,
            # Pages and slots come from the scheduler, which owns them; a check costs more than
            # the copy it guards takes to start.
            disable_bounds_checks=True,
        ),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        input_output_aliases={5: 0},
        name="tidegate_kv_write",
    )(*granules, rows, pages)


def _kernel(
    token_ref: Ref,  # int32 [G] SMEM
    slot_ref: Ref,  # int32 [G] SMEM
    count_ref: Ref,  # int32 [G] SMEM
    num_ref: Ref,  # int32 [1] SMEM
    rows_hbm: Ref,  # float32 [T (+ granule), X, L] HBM
    _: Ref,  # the pages again: the same memory as pages_hbm
    pages_hbm: Ref,  # [N, H, C, S, L] HBM
    new: Ref,  # float32 [2, batch, window, X, L] VMEM
    old: Ref,  # [2, batch, H, C, granule, L] VMEM
    result: Ref,  # [2, batch, H, C, granule, L] VMEM
    new_semaphores: Ref,  # DMA [2]
    old_semaphores: Ref,  # DMA [2]
    result_semaphores: Ref,  # DMA [2]
    *,
    page_size: int,
    single: bool,
) -> None:
    _, batch, heads, parts, granule, lanes = old.shape
    count = num_ref[0]
    batches = (count + batch - 1) // batch

    def home(index: jax.Array) -> Ref:
        """The granule in HBM."""
        slot = slot_ref[index]
        offset = pl.multiple_of(slot % page_size // granule * granule, granule)
        return pages_hbm.at[slot // page_size, :, :, pl.ds(offset, granule)]

    def source(index: jax.Array, buffer: Any, place: Any) -> tuple[Ref, Ref]:
        """New tokens in HBM, and where they go: at their rows of the granule."""
        if single:
            return rows_hbm.at[pl.ds(token_ref[index], 1)], new.at[buffer, place]
        low = slot_ref[index] % granule
        tokens = rows_hbm.at[pl.ds(token_ref[index], granule)]
        return tokens, new.at[buffer, place, pl.ds(low, granule)]

    def each(number: jax.Array, visit: Any) -> None:
        """Calls visit(index, place, buffer) for the granules of a batch."""
        first = number * batch

        def body(index: jax.Array, carry: None) -> None:
            visit(index, index - first, number % 2)
            return carry

        jax.lax.fori_loop(first, jnp.minimum(first + batch, count), body, None)

    def start_read(index: jax.Array, place: jax.Array, buffer: jax.Array) -> None:
        pltpu.make_async_copy(*source(index, buffer, place), new_semaphores.at[buffer]).start()
        pltpu.make_async_copy(home(index), old.at[buffer, place], old_semaphores.at[buffer]).start()

    def wait_read(index: jax.Array, place: jax.Array, buffer: jax.Array) -> None:
        pltpu.make_async_copy(*source(index, buffer, place), new_semaphores.at[buffer]).wait()
        pltpu.make_async_copy(home(index), old.at[buffer, place], old_semaphores.at[buffer]).wait()

    def write_of(index: jax.Array, place: jax.Array, buffer: jax.Array) -> Any:
        return pltpu.make_async_copy(
            result.at[buffer, place], home(index), result_semaphores.at[buffer]
        )

    def combine(index: jax.Array, place: jax.Array, buffer: jax.Array) -> None:
        low = slot_ref[index] % granule
        row = jax.lax.broadcasted_iota(jnp.int32, (granule, lanes), 0)
        fresh = (row >= low) & (row < low + count_ref[index])
        if not single:
            by_row = jnp.swapaxes(new[buffer, place, pl.ds(0, granule)], 0, 1)  # [X, granule, L]
        for head in range(heads):
            for part in range(parts):
                x = head * parts + part
                if single:
                    value = jnp.broadcast_to(new[buffer, place, 0, pl.ds(x, 1)], (granule, lanes))
                else:
                    value = by_row[x]
                kept = old[buffer, place, head, part].astype(jnp.float32)
                result[buffer, place, head, part] = jnp.where(fresh, value, kept).astype(
                    result.dtype
                )
        write_of(index, place, buffer).start()

    each(jnp.int32(0), start_read)

    def step(number: jax.Array, carry: None) -> None:
        each(number + 1, start_read)
        each(number, wait_read)

        @pl.when(number >= 2)
        def _() -> None:
            each(number - 2, lambda *where: write_of(*where).wait())

        each(number, combine)
        return carry

    jax.lax.fori_loop(0, batches, step, None)
    for back in (2, 1):

        @pl.when(batches >= back)
        def _(back: int = back) -> None:
            each(batches - back, lambda *where: write_of(*where).wait())
