"""Page copies from HBM into a double buffer, shared by the attention kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any

# Copies started per turn of the loop: the branch and the address arithmetic overlap.
UNROLL = 4


def start_pages(
    pages_hbm: Ref, table: Ref, first: jax.Array, count: jax.Array, buffer: Ref, semaphore: Ref
) -> None:
    """Starts copies of pages table[first : first + count] into buffer[0 : count].

    pages_hbm: [N, ...] in HBM; table: int32 in SMEM; buffer: [pages, ...] in VMEM. Pages beyond
    `count` are not touched: their part of the buffer keeps what it held.
    """

    def start(index: jax.Array) -> None:
        page = table[first + index]
        pltpu.make_async_copy(pages_hbm.at[page], buffer.at[index], semaphore).start()

    def start_some(group: jax.Array, carry: None) -> None:
        for place in range(UNROLL):
            start(group * UNROLL + place)
        return carry

    def start_one(index: jax.Array, carry: None) -> None:
        start(index)
        return carry

    groups = count // UNROLL
    jax.lax.fori_loop(0, groups, start_some, None)
    jax.lax.fori_loop(groups * UNROLL, count, start_one, None)


def wait_pages(count: jax.Array, buffer: Ref, semaphore: Ref) -> None:
    """Waits for `count` copies: one wait for a full buffer, else page by page.

    A wait takes from the semaphore the bytes of its destination; its source is not looked at, so
    the buffer stands for it (a pool may be smaller than the buffer).
    """
    capacity = buffer.shape[0]

    @pl.when(count == capacity)
    def _() -> None:
        pltpu.make_async_copy(buffer, buffer, semaphore).wait()

    @pl.when(count != capacity)
    def _() -> None:
        def wait(index: jax.Array, carry: None) -> None:
            pltpu.make_async_copy(buffer.at[index], buffer.at[index], semaphore).wait()
            return carry

        jax.lax.fori_loop(0, count, wait, None)


def page_range(
    first_position: jax.Array, end_position: jax.Array, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Index of the first page and number of pages that hold [first_position, end_position)."""
    first = first_position // page_size
    return first, jnp.maximum((end_position + page_size - 1) // page_size - first, 0)
