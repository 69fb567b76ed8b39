"""The first pass of a step: running requests grow, preempting one another if blocks run out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.kv_cache import NewBlocks
from scheduler.plan import StepPlan
from scheduler.request import Request
from scheduler.state import SchedulerState
from scheduler.victims import choose_victim


def schedule_running(state: SchedulerState, plan: StepPlan) -> None:
    """Grants tokens and blocks to the running requests, in running order.

    With enough free blocks this is a fixed number of array operations, whatever the batch.
    """
    slots, running = state.slots, state.running
    computed = slots.num_computed[running]
    expected = slots.num_expected[running]
    # A request whose last allowed token is in flight runs no further.
    ready = expected < slots.max_total[running]
    if len(state.in_flight) > state.config.overlap_depth:
        ready &= expected == slots.num_tokens[running]
    wanted = expected - computed
    if np.count_nonzero(ready) < len(running):
        wanted *= ready
    limit = state.chunk_limit()
    if limit < plan.budget:
        np.minimum(wanted, limit, out=wanted)
    used = int(wanted.sum())
    granted = wanted if used <= plan.budget else _within_budget(wanted, plan.budget)
    block_size = state.config.block_size
    needed = (computed + (granted + (block_size - 1))) // block_size
    needed -= state.num_blocks_held[running]
    (growing,) = (needed > 0).nonzero()
    if len(growing):
        counts = needed[growing]
        if int(counts.sum()) <= state.pool.num_free:
            plan.new_blocks = state.kv.grow(running[growing], counts)
        else:
            granted = _Pressure(state, plan, running, computed, wanted).grow(granted, needed)
    if np.count_nonzero(granted) == len(running):
        rows, start = running.copy(), computed
    else:
        active = granted > 0
        rows, start, granted = running[active], computed[active], granted[active]
    if plan.preemptions or plan.ended:
        state.compress_running()
    if not len(rows):
        return
    plan.budget -= used if granted is wanted else int(granted.sum())
    slots.num_computed[rows] = start + granted
    decoding = start >= slots.num_joined[rows]
    plan.num_decodes = int(np.count_nonzero(decoding))
    if plan.num_decodes < len(rows):
        order = np.argsort(~decoding, kind="stable")
        rows, start, granted = rows[order], start[order], granted[order]
        for i in range(plan.num_decodes, len(rows)):
            state.note_prefill(int(rows[i]), int(start[i]), int(granted[i]))
    plan.slots, plan.start, plan.num_tokens = rows, start, granted


def extend_decodes(state: SchedulerState, plan: StepPlan, max_steps: int) -> int:
    """Turns a plan of decodes alone into one of several steps in a row, if nothing is lost.

    That is: nobody waits, no row can pass its length limit meanwhile, and the blocks lie above
    the watermark. Returns the steps planned, 1 to `max_steps`.
    """
    rows = plan.slots
    if not 0 < len(rows) == plan.num_decodes == state.num_running == len(state.requests):
        return 1
    slots, block_size = state.slots, state.config.block_size
    # The plan has granted one token, which num_computed counts and num_expected does not yet.
    num_steps = min(max_steps, int((slots.max_total[rows] - slots.num_expected[rows]).min()))
    if num_steps <= 1:
        return 1
    more = num_steps - 1
    needed = -(-(slots.num_computed[rows] + more) // block_size) - state.num_blocks_held[rows]
    growing = np.flatnonzero(needed > 0)
    spare = state.pool.num_free - state.config.watermark_blocks
    if len(growing):
        if int(needed[growing].sum()) > spare:
            return 1
        grown = state.kv.grow(rows[growing], needed[growing])
        both = (np.concatenate(parts) for parts in zip(plan.new_blocks, grown))
        plan.new_blocks = NewBlocks(*both)
    slots.num_computed[rows] += more
    slots.num_expected[rows] += more
    return num_steps


def _within_budget(wanted: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """Grants `wanted` in order until the budget is used up."""
    upto = np.cumsum(wanted, dtype=np.int32)
    return np.clip(budget - (upto - wanted), 0, wanted)


class _Pressure:
    """Growth one request after the other, when the pool cannot serve them all."""

    def __init__(
        self,
        state: SchedulerState,
        plan: StepPlan,
        running: NDArray[np.intp],
        computed: NDArray[np.int32],
        wanted: NDArray[np.int32],
    ) -> None:
        self._state = state
        self._plan = plan
        self._running = running
        self._computed = computed
        self._wanted = wanted
        self._index = {slot: i for i, slot in enumerate(running.tolist())}
        self._requests: list[Request] = state.slots.requests[running].tolist()
        self._granted = np.zeros_like(wanted)
        self._used = 0

    def grow(self, granted: NDArray[np.int32], needed: NDArray[np.int32]) -> NDArray[np.int32]:
        """Grows and preempts in running order; returns the tokens that each row may run."""
        state, kv = self._state, self._state.kv
        needed = np.maximum(needed, 0)
        # Rows before the first that does not fit grow at once.
        first = int(np.argmax(np.cumsum(needed) > state.pool.num_free))
        self._granted[:first] = granted[:first]
        self._used = int(self._granted.sum())
        grown = []
        early = np.flatnonzero(needed[:first])
        if len(early):
            grown.append(kv.grow(self._running[early], needed[early]))
        for i in range(first, len(self._running)):
            slot = int(self._running[i])
            if not state.is_running[slot]:
                continue
            count = min(int(self._wanted[i]), self._plan.budget - self._used)
            if count <= 0:
                continue
            total = kv.blocks_for(int(self._computed[i]) + count)
            extra = total - int(kv.num_held[slot])
            if extra > 0:
                if not self._make_room(self._requests[i], total, extra):
                    continue
                grown.append(kv.grow(np.array([slot], np.intp), np.array([extra], np.int32)))
            self._granted[i] = count
            self._used += count
        if grown:
            slots, index, ids = (np.concatenate(parts) for parts in zip(*grown))
            # A victim that had grown in this very step must leave no trace in the plan.
            alive = state.is_running[slots]
            self._plan.new_blocks = NewBlocks(slots[alive], index[alive], ids[alive])
        return self._granted

    def _make_room(self, request: Request, total: int, extra: int) -> bool:
        """Preempts until `extra` blocks are free; False if `request` itself cannot run now."""
        state, slot = self._state, request.slot
        if total > state.pool.num_usable:
            # Even alone it would not fit. Its tokens in flight are read first.
            if state.slots.num_expected[slot] == state.slots.num_tokens[slot]:
                state.vacate(slot)
                state.end_too_large(request, request.num_tokens)
                self._plan.ended.append(request)
            return False
        while extra > state.pool.num_free:
            victim = choose_victim(
                [other for other in self._requests if other.slot >= 0],
                state.config.scheduling_policy,
                state.config.max_preemptions_per_request,
                lambda other: state.kv.num_private(other.slot) > 0,
            )
            i = self._index[victim.slot]
            reason = "self" if victim is request else "growth"
            self._plan.preemptions.append(state.preempt(victim, request, reason))
            self._used -= int(self._granted[i])
            self._granted[i] = 0
            if victim is request:
                return False
        return True


__all__ = ["extend_decodes", "schedule_running"]
