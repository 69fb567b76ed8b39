"""The second pass of a step: waiting requests join the batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler.output import KVLoad
from scheduler.plan import StepPlan
from scheduler.request import Request, RequestStatus
from scheduler.state import HeldKV, SchedulerState

_NO_BLOCKS = np.zeros(0, np.int32)


def admit_waiting(state: SchedulerState, plan: StepPlan) -> None:
    """Admits requests in order until one has to wait; nothing behind it is tried.

    Requests that hold blocks already (their KV was loaded) come before the queue, so that a head
    that cannot be admitted does not strand those blocks.
    """
    if not (state.loaded or len(state.waiting)):
        return
    admissions = _Admissions(state, plan)
    while plan.budget > 0 and state.num_running < state.config.max_num_seqs:
        if state.loaded:
            held = min(state.loaded.values(), key=lambda held: held.request.queue_number)
            if not admissions.admit_loaded(held):
                return
            continue
        request = state.waiting.peek()
        # A preempted request whose tokens are still in flight is resumed when it has them.
        if request is None or request.num_stale_samples:
            return
        if not admissions.admit(request):
            return


class _Admissions:
    """The admissions of one step."""

    def __init__(self, state: SchedulerState, plan: StepPlan) -> None:
        self._state = state
        self._plan = plan
        self._limit = state.chunk_limit()
        self._now = state.clock()

    def admit(self, request: Request) -> bool:
        """Admits the head of the queue (or starts its load); False if it has to wait."""
        state, kv, pool = self._state, self._state.kv, self._state.pool
        tokens = request.prompt_token_ids if request.saved_tokens is None else request.saved_tokens
        known = len(tokens)
        full_blocks = kv.blocks_for(known)
        if full_blocks > pool.num_usable:
            state.waiting.pop()
            state.end_too_large(request, known)
            self._plan.ended.append(request)
            return True
        shared = kv.find_cached(request, tokens)
        num_shared = len(shared)
        cached = num_shared * state.config.block_size
        taken = pool.num_unused(shared) if num_shared else 0
        if state.kv_loader is not None:
            loadable = state.kv_loader.num_loadable_tokens(request, tokens, cached)
            # One token is left over to be computed: it gives the next one's logits.
            loadable = min(loadable, known - 1 - cached)
            if loadable > 0:
                needed = full_blocks - num_shared + taken
                return self._start_load(request, tokens, shared, loadable, needed)
        chunk = self._chunk(known - cached)
        if not chunk:
            return False
        chunk_blocks = kv.blocks_for(cached + chunk) - num_shared
        needed = full_blocks - num_shared if state.config.reserve_full_sequence else chunk_blocks
        if not self._may_take(request, known, cached, needed + taken, pool.num_free):
            return False
        state.waiting.pop()
        self._count(request, known, cached)
        slot = state.join(request, cached + chunk)
        kv.admit(slot, shared, chunk_blocks)
        self._add_row(request, cached, chunk)
        return True

    def admit_loaded(self, held: HeldKV) -> bool:
        """Admits a request whose KV was loaded; False if it has to wait."""
        state, kv, request = self._state, self._state.kv, held.request
        known, computed = request.num_tokens, held.num_computed
        chunk = self._chunk(known - computed)
        if not chunk:
            return False
        chunk_blocks = max(kv.blocks_for(computed + chunk) - len(held.blocks), 0)
        full_blocks = kv.blocks_for(known) - len(held.blocks)
        needed = full_blocks if state.config.reserve_full_sequence else chunk_blocks
        if not self._may_take(request, known, computed, needed, state.pool.num_free):
            return False
        del state.loaded[request.request_id]
        slot = state.join(request, computed + chunk)
        kv.adopt(slot, held.blocks, held.num_shared, chunk_blocks)
        self._add_row(request, computed, chunk)
        return True

    def _chunk(self, todo: int) -> int:
        """Tokens to run of `todo`; 0 if they do not fit the budget and may not be split."""
        chunk, budget = min(todo, self._limit), self._plan.budget
        if chunk <= budget:
            return chunk
        return budget if self._state.config.enable_chunked_prefill else 0

    def _may_take(
        self, request: Request, known: int, cached: int, num_new_blocks: int, num_free_blocks: int
    ) -> bool:
        state = self._state
        if num_new_blocks > num_free_blocks:
            return False
        # With nothing running no policy is asked: an idle engine admits what fits.
        return not state.num_running or state.admission.admits(
            state.as_scheduler,
            request,
            num_known_tokens=known,
            num_cached_tokens=cached,
            num_new_blocks=num_new_blocks,
            num_free_blocks=num_free_blocks,
        )

    def _start_load(
        self,
        request: Request,
        tokens: NDArray[np.int32],
        shared: NDArray[np.int32],
        loadable: int,
        needed: int,
    ) -> bool:
        """Gives the request blocks for KV to be fetched into; False if it has to wait.

        The whole known sequence must fit beside what admitted requests are owed, or two loads
        that fit alone but not together would each hold what the other needs.
        """
        state, kv = self._state, self._state.kv
        known, cached = len(tokens), len(shared) * state.config.block_size
        free = state.pool.num_free - state.reserved_blocks
        if not self._may_take(request, known, cached + loadable, needed, free):
            return False
        state.waiting.pop()
        self._count(request, known, cached)
        count = kv.blocks_for(cached + loadable) - len(shared)
        blocks = kv.take(shared, count)
        request.status = RequestStatus.WAITING_FOR_KV
        held = HeldKV(request, blocks, len(shared), cached + loadable)
        state.loading[request.request_id] = held
        self._plan.kv_loads.append(KVLoad(request, cached, loadable, blocks.copy()))
        return True

    def _add_row(self, request: Request, start: int, chunk: int) -> None:
        plan, slot = self._plan, request.slot
        plan.budget -= chunk
        plan.joined_slots.append(slot)
        plan.joined_start.append(start)
        plan.joined_tokens.append(chunk)
        self._state.note_prefill(slot, start, chunk)
        self._state.admission.on_admitted(self._state.as_scheduler, request)

    def _count(self, request: Request, known: int, cached: int) -> None:
        """Counts an admission once, with what the prefix cache gave."""
        stats = self._state.stats
        looked_up = self._state.kv.enable_prefix_caching and not request.skip_prefix_cache_read
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._now
            request.num_cached_tokens = cached
            stats.num_admitted += 1
            if looked_up:
                stats.num_prefix_requests += 1
                stats.prefix_queries += known
                stats.prefix_hits += cached
        else:
            stats.num_resumed += 1
            if looked_up:
                stats.resumed_prefix_queries += known
                stats.resumed_prefix_hits += cached


def finish_kv_load(state: SchedulerState, request_id: str, num_tokens: int) -> None:
    """See `Scheduler.finish_kv_load`."""
    held = state.loading.get(request_id)
    if held is None:
        raise ValueError(f"request {request_id!r} waits for no KV load")
    request = held.request
    start = held.num_shared * state.config.block_size
    planned = held.num_computed - start
    if not 0 <= num_tokens <= planned:
        raise ValueError(
            f"num_tokens={num_tokens} of the KV load of request {request_id!r} is not within "
            f"[0, {planned}], what was asked for"
        )
    del state.loading[request_id]
    if request.status.finished:
        state.pool.release(held.blocks)
        return
    held.num_computed = start + num_tokens
    request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
    state.loaded[request_id] = held


__all__ = ["admit_waiting", "finish_kv_load"]
