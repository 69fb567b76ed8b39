"""The scheduler: which requests run which tokens in each step, on which blocks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.admission import AdmissionPolicy, make_admission_policy
from scheduler.config import SchedulerConfig
from scheduler.kv_cache import KVCacheManager, NewBlocks
from scheduler.output import Preemption, SchedulerOutput, StepResult
from scheduler.plan import StepPlan
from scheduler.request import Request, RequestStatus
from scheduler.slots import SlotArrays
from scheduler.stats import SchedulerStats
from scheduler.victims import choose_victim
from scheduler.waiting import QueueFullError, WaitingQueue

logger = logging.getLogger(__name__)

_NO_SLOTS = np.zeros(0, np.int32)
_NO_REQUESTS = np.zeros(0, object)


class Scheduler:
    """Continuous batching with chunked prefill over a paged KV cache.

    Each step is `schedule` (running requests first, then admissions), the device's work, and
    `update` with the sampled tokens. Up to `config.overlap_depth` further steps may be scheduled
    before the first one's tokens are known: a decode is then planned on a token that is still on
    the device, and never past the request's length limit. Outputs go to `update` in the order in
    which `schedule` gave them; one without rows need not.

    Blocks given back by a finished or preempted request may be handed out in the same call, even
    while steps in flight still use them: the device runs steps in dispatch order, so whatever an
    earlier step writes there is overwritten before the new owner reads it. For the same reason a
    block counts as written, and may be shared by a later row or a row of the same step, as soon
    as the step that writes it is planned: a step must write the KV of all its rows before any row
    attends.

    A request that waits never evicts one that runs, whatever their priorities: only growth of
    running requests preempts.

    Not thread-safe: one thread calls it.

    Attributes:
      config, admission, stats: as given, and the counters.
      slots: the per-slot arrays; the most used are attributes of the scheduler as well.
      kv: block table and prefix cache. pool: its blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        admission: AdmissionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        config: limits and policies.
        admission: who may join a running batch; None takes what `config.watermark` names.
        clock: seconds, for arrival and first-scheduled times.
        """
        self.config = config
        self.admission = make_admission_policy(config) if admission is None else admission
        self.stats = SchedulerStats()
        self.slots = SlotArrays(config)
        self.kv = KVCacheManager(config)
        self.pool = self.kv.pool
        self.block_table = self.kv.block_table
        self.num_blocks_held = self.kv.num_held
        self.token_ids = self.slots.token_ids
        self.num_tokens = self.slots.num_tokens
        self.num_computed = self.slots.num_computed
        self.prompt_lens = self.slots.prompt_lens
        self.max_total = self.slots.max_total
        self.slot_requests = self.slots.requests
        self._clock = clock
        self._waiting = WaitingQueue(config.scheduling_policy)
        self._requests: dict[str, Request] = {}
        self._running = np.zeros(config.max_num_seqs, np.intp)
        self._num_running = 0
        self._is_running = np.zeros(config.max_num_seqs, np.bool_)
        self._all_rows = np.arange(config.max_num_seqs, dtype=np.int32)
        self._in_flight: deque[int] = deque()
        # Requests preempted while steps in flight sample for them, by the slot and epoch they had.
        self._stale: dict[tuple[int, int], Request] = {}
        self._released: list[int] = []
        self._finished_ids: list[str] = []
        self._step_id = 0
        self._num_added = 0

    # --- What is there -------------------------------------------------------------------------

    @property
    def running(self) -> NDArray[np.intp]:
        """Slots of the running requests in the order of their admission; a view."""
        return self._running[: self._num_running]

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, preempted ones included."""
        return len(self._waiting)

    @property
    def waiting_requests(self) -> list[Request]:
        """The waiting requests in order of admission."""
        return list(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Outputs with rows that `update` has not seen yet."""
        return len(self._in_flight)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the usable blocks that requests hold, in [0, 1]."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def get_request(self, request_id: str) -> Request | None:
        """The unfinished request of that id, if any."""
        return self._requests.get(request_id)

    # --- Requests come and go ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a fresh request.

        Raises:
          ValueError: the request can never run within the limits, or its id is in use.
          QueueFullError: max_num_queued_reqs requests wait already.
        """
        self._check_addable(request)
        limit = self.config.max_num_queued_reqs
        if limit is not None and self._waiting.num_fresh >= limit:
            self.stats.num_refused += 1
            raise QueueFullError(
                f"{self._waiting.num_fresh} requests wait and max_num_queued_reqs is {limit}; "
                "try again later or raise --max_num_queued_reqs"
            )
        request.prompt_token_ids = np.ascontiguousarray(request.prompt_token_ids, np.int32)
        if request.arrival_time is None:
            request.arrival_time = self._clock()
        request.status = RequestStatus.WAITING
        request.queue_number = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def _check_addable(self, request: Request) -> None:
        config, prompt_len, max_tokens = self.config, request.prompt_len, request.max_tokens
        name = f"request {request.request_id!r}"
        if request.request_id in self._requests:
            raise ValueError(f"{name} is already queued or running; request_id must be unique")
        if request.status != RequestStatus.WAITING or request.queue_number >= 0:
            raise ValueError(f"{name} was added before; make a new Request")
        if prompt_len < 1:
            raise ValueError(f"{name} has an empty prompt; give at least 1 token")
        if max_tokens < 1:
            raise ValueError(f"{name} has max_tokens={max_tokens}; give at least 1")
        if prompt_len > config.max_model_len - 1:
            raise ValueError(
                f"{name} has {prompt_len} prompt tokens, but max_model_len={config.max_model_len} "
                f"leaves room for {config.max_model_len - 1} and one output token; shorten the "
                "prompt or raise --max_model_len"
            )
        usable = self.pool.num_usable
        capacity = usable * config.block_size
        pool = f"{usable} usable blocks of {config.block_size} tokens hold {capacity}"
        if prompt_len + 1 > capacity:
            raise ValueError(
                f"{name} needs {prompt_len} prompt + 1 output = {prompt_len + 1} tokens of KV "
                f"cache, but {pool}; shorten the prompt or raise --num_kv_blocks"
            )
        promised = min(prompt_len + max_tokens, config.max_model_len)
        if request.ignore_eos and promised > capacity:
            raise ValueError(
                f"{name} promises {promised} tokens ({prompt_len} prompt + {max_tokens} output, "
                f"at most max_model_len={config.max_model_len}; ignore_eos is set), but {pool}; "
                "lower max_tokens or raise --num_kv_blocks"
            )

    def abort(self, request_id: str) -> bool:
        """Ends a request wherever it stands; False if there is none of that id."""
        return self.finish(request_id, RequestStatus.FINISHED_ABORTED)

    def finish(
        self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None
    ) -> bool:
        """Ends a request from outside, for example on a stop string; its blocks are free at once.

        Tokens that steps in flight sample for it are dropped.

        Returns:
          False if no unfinished request has that id.
        """
        if not status.finished:
            raise ValueError(f"status={status.name} does not end a request")
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.slot >= 0:
            self._vacate(request.slot)
            self._compress_running()
        else:
            self._waiting.discard(request.status)
        self._end(request, status, stop_reason)
        return True

    def _end(
        self, request: Request, status: RequestStatus, stop_reason: int | str | None = None
    ) -> None:
        """Marks a request that holds neither slot nor blocks nor a place in the queue as ended."""
        request.status = status
        request.stop_reason = stop_reason
        del self._requests[request.request_id]
        self._finished_ids.append(request.request_id)
        self.stats.num_finished += 1
        self.admission.on_finished(self, request)

    def _vacate(self, slot: int) -> int:
        """Frees a slot and its blocks; returns the blocks gained. `running` is left to the caller."""
        freed = self.kv.release(slot)
        self.slots.leave(slot)
        self._is_running[slot] = False
        self._released.append(slot)
        return freed

    def _compress_running(self) -> None:
        """Drops vacated slots from `running`, keeping its order."""
        running = self.running
        kept = running[self._is_running[running]]
        self._num_running = len(kept)
        self._running[: self._num_running] = kept

    # --- A step's plan -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plans one step: growth of running requests, then admissions.

        Called with nothing to do it returns an output without rows.
        """
        plan = StepPlan(self.config.max_num_batched_tokens)
        if self._num_running:
            self._schedule_running(plan)
        if not plan.preemptions:
            self._admit_waiting(plan)
        slots, start, num_tokens = plan.rows()
        if len(slots):
            self._in_flight.append(self._step_id)
            self.stats.num_steps += 1
            self.stats.num_scheduled_tokens += self.config.max_num_batched_tokens - plan.budget
        elif not (self._num_running or self._in_flight or plan.ended or plan.preemptions):
            self._watch_progress()
        samples = self._count_samples(plan, slots, start, num_tokens)
        output = SchedulerOutput(
            step_id=self._step_id,
            slots=slots,
            num_tokens=num_tokens,
            start=start,
            samples=samples,
            epochs=self.slots.epochs[slots],
            num_decodes=plan.num_decodes,
            joined=np.array(plan.joined_slots, np.int32) if plan.joined_slots else _NO_SLOTS,
            released=np.array(self._released, np.int32) if self._released else _NO_SLOTS,
            new_block_slots=plan.new_blocks.slots,
            new_block_index=plan.new_blocks.index,
            new_block_ids=plan.new_blocks.ids,
            preemptions=tuple(plan.preemptions),
            finished_request_ids=tuple(self._finished_ids),
            ended_requests=tuple(plan.ended),
        )
        self._step_id += 1
        self._released.clear()
        self._finished_ids.clear()
        return output

    def _count_samples(
        self,
        plan: StepPlan,
        slots: NDArray[np.int32],
        start: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
    ) -> NDArray[np.bool_]:
        """Which rows end at their last known token; they expect one token more from now on."""
        expected = self.slots.num_expected
        if plan.num_decodes == len(slots):
            expected[slots] += 1
            return np.ones(len(slots), np.bool_)
        samples = start + num_tokens == expected[slots]
        expected[slots[samples]] += 1
        return samples

    def _watch_progress(self) -> None:
        if len(self._waiting) and self.pool.num_free == self.pool.num_usable:
            self.stats.num_watchdog_violations += 1
            logger.error(
                "no progress: %d requests wait, nothing runs and all %d blocks are free",
                len(self._waiting),
                self.pool.num_usable,
            )

    def _chunk_limit(self) -> int:
        """Most tokens that one request may run in this step."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and len(self._requests) > 1:
            return threshold
        return self.config.max_num_batched_tokens

    def _schedule_running(self, plan: StepPlan) -> None:
        state = self.slots
        running = self.running
        computed = state.num_computed[running]
        expected = state.num_expected[running]
        # A request whose last allowed token is in flight runs no further, so nothing is computed
        # past its limit. Tokens in flight are at most one more than the steps that may overlap.
        ready = expected < state.max_total[running]
        if self._in_flight:
            in_flight = expected - state.num_tokens[running]
            ready &= in_flight <= self.config.overlap_depth
        wanted = (expected - computed) * ready
        limit = self._chunk_limit()
        if limit < plan.budget:
            np.minimum(wanted, limit, out=wanted)
        granted = _within_budget(wanted, plan.budget)
        bs = self.config.block_size
        needed = (computed + granted + (bs - 1)) // bs - self.num_blocks_held[running]
        (growing,) = (needed > 0).nonzero()
        if len(growing):
            counts = needed[growing]
            if int(counts.sum()) <= self.pool.num_free:
                plan.new_blocks = self.kv.grow(running[growing], counts)
            else:
                growth = _GrowthUnderPressure(self, plan, running, computed, wanted)
                granted = growth.run(granted, needed)
        if granted.all():
            slots, start = running.copy(), computed
        else:
            active = granted > 0
            slots, start, granted = running[active], computed[active], granted[active]
        if plan.preemptions or plan.ended:
            self._compress_running()
        if not len(slots):
            return
        plan.budget -= int(granted.sum())
        state.num_computed[slots] = start + granted
        decoding = start >= state.num_joined[slots]
        plan.num_decodes = int(np.count_nonzero(decoding))
        if plan.num_decodes < len(slots):
            order = np.argsort(~decoding, kind="stable")
            slots, start, granted = slots[order], start[order], granted[order]
            for i in range(plan.num_decodes, len(slots)):
                self._note_prefill(int(slots[i]), int(start[i]), int(granted[i]))
        plan.slots, plan.start, plan.num_tokens = slots, start, granted

    def _note_prefill(self, slot: int, start: int, count: int) -> None:
        """Accounts for a row of known tokens: what it recomputes, and blocks it fills."""
        end = start + count
        again = min(end, int(self.slots.max_computed[slot])) - start
        if again > 0:
            self.slots.requests[slot].num_recomputed_tokens += again
            self.stats.num_recomputed_tokens += again
        if self.kv.enable_prefix_caching:
            request = self.slots.requests[slot]
            self.kv.cache_blocks(slot, request, self.slots.token_ids[slot], end)

    # --- Preemption ----------------------------------------------------------------------------

    def _choose_victim(self, running: list[Request]) -> Request:
        return choose_victim(
            running,
            self.config.scheduling_policy,
            self.config.max_preemptions_per_request,
            lambda request: self.kv.num_private(request.slot) > 0,
        )

    def _preempt(
        self, request: Request, cause: Request | None, reason: str, *, keep_in_flight: bool = True
    ) -> Preemption:
        """Takes slot and blocks from a request and queues it again; keeps what it generated.

        Tokens that steps in flight sample for it are still right, since those steps precede any
        new owner of its blocks: they are delivered late and added to it before it is resumed.
        """
        slot = request.slot
        lost = int(self.slots.num_computed[slot])
        in_flight = int(self.slots.num_expected[slot] - self.slots.num_tokens[slot])
        if in_flight and keep_in_flight:
            self._stale[slot, int(self.slots.epochs[slot])] = request
            request.num_stale_samples = in_flight
        request.max_computed_tokens = max(request.max_computed_tokens, lost)
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        freed = self._vacate(slot)
        self._waiting.push(request)
        stats = self.stats
        stats.num_preemptions += 1
        stats.preemptions_by_reason[reason] += 1
        stats.num_tokens_lost += lost
        cause_id = "" if cause is None else cause.request_id
        logger.info(
            "preempted request_id=%s reason=%s cause=%s blocks_freed=%d tokens_to_recompute=%d "
            "num_preemptions=%d",
            request.request_id,
            reason,
            cause_id,
            freed,
            lost,
            request.num_preemptions,
        )
        self.admission.on_preempted(self, request)
        return Preemption(request, cause_id, reason, freed, lost)

    def _end_too_large(self, request: Request, num_tokens: int) -> None:
        """Ends a request that the pool cannot hold even alone; it holds nothing any more."""
        request.warning = (
            f"ended at {num_tokens} tokens because the KV cache holds "
            f"{self.pool.num_usable * self.config.block_size} "
            f"({self.pool.num_usable} blocks of {self.config.block_size}); raise --num_kv_blocks"
        )
        logger.warning("request %s %s", request.request_id, request.warning)
        self.stats.num_pool_too_small += 1
        self._end(request, RequestStatus.FINISHED_LENGTH)

    # --- Admission -----------------------------------------------------------------------------

    def _admit_waiting(self, plan: StepPlan) -> None:
        if not len(self._waiting):
            return
        limit = self._chunk_limit()
        now = self._clock()
        while plan.budget > 0 and self._num_running < self.config.max_num_seqs:
            request = self._waiting.peek()
            # A preempted request whose tokens are still in flight is resumed when it has them.
            if request is None or request.num_stale_samples:
                return
            if not self._admit(plan, request, limit, now):
                return

    def _admit(self, plan: StepPlan, request: Request, limit: int, now: float) -> bool:
        """Admits the head of the queue; False if it has to wait, and so all behind it."""
        kv, pool = self.kv, self.pool
        tokens = request.prompt_token_ids if request.saved_tokens is None else request.saved_tokens
        known = len(tokens)
        full_blocks = kv.blocks_for(known)
        if full_blocks > pool.num_usable:
            self._waiting.pop()
            self._end_too_large(request, known)
            plan.ended.append(request)
            return True
        shared = kv.find_cached(request, tokens)
        cached = len(shared) * self.config.block_size
        chunk = min(known - cached, limit)
        if chunk > plan.budget:
            if not self.config.enable_chunked_prefill:
                return False
            chunk = plan.budget
        chunk_blocks = kv.blocks_for(cached + chunk) - len(shared)
        needed = full_blocks - len(shared) if self.config.reserve_full_sequence else chunk_blocks
        if len(shared):
            needed += pool.num_unused(shared)
        free = pool.num_free
        if needed > free:
            return False
        if self._num_running and not self.admission.admits(
            self,
            request,
            num_known_tokens=known,
            num_cached_tokens=cached,
            num_new_blocks=needed,
            num_free_blocks=free,
        ):
            return False
        self._waiting.pop()
        self._count_admission(request, known, cached, now)
        slot = self._join(request, cached + chunk)
        kv.admit(slot, shared, chunk_blocks)
        plan.budget -= chunk
        plan.joined_slots.append(slot)
        plan.joined_start.append(cached)
        plan.joined_tokens.append(chunk)
        self._note_prefill(slot, cached, chunk)
        self.admission.on_admitted(self, request)
        return True

    def _join(self, request: Request, num_computed: int) -> int:
        slot = self.slots.join(request, num_computed)
        request.status = RequestStatus.RUNNING
        self._running[self._num_running] = slot
        self._num_running += 1
        self._is_running[slot] = True
        return slot

    def _count_admission(self, request: Request, known: int, cached: int, now: float) -> None:
        stats = self.stats
        looked_up = self.kv.enable_prefix_caching and not request.skip_prefix_cache_read
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
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

    # --- A step's tokens -----------------------------------------------------------------------

    def update(self, output: SchedulerOutput, tokens: ArrayLike) -> StepResult:
        """Takes the tokens that a step sampled: appends them and ends requests that stop.

        Args:
          output: the oldest output with rows that was not updated yet.
          tokens: int32 [n], one for each row; those of rows that do not sample are ignored.

        Raises:
          ValueError: outputs are updated out of order, or tokens has another length.
        """
        n = len(output.slots)
        if not n:
            return StepResult(_NO_REQUESTS, _NO_SLOTS, _NO_SLOTS, [])
        if not self._in_flight or self._in_flight[0] != output.step_id:
            raise ValueError(
                f"step {output.step_id} was updated out of order; the oldest step in flight is "
                f"{self._in_flight[0] if self._in_flight else 'none'}"
            )
        tokens = np.asarray(tokens, np.int32)
        if tokens.shape != (n,):
            raise ValueError(
                f"tokens has shape {tokens.shape}, but step {output.step_id} has {n} rows"
            )
        self._in_flight.popleft()
        state = self.slots
        current = state.epochs[output.slots] == output.epochs
        all_current = bool(current.all())
        if all_current and output.num_decodes == n:
            rows, slots, tokens_of_rows = self._all_rows[:n], output.slots, tokens
        else:
            (rows,) = (current & output.samples).nonzero()
            slots, tokens_of_rows = output.slots[rows], tokens[rows]
        lengths = state.num_tokens[slots]
        state.token_ids[slots, lengths] = tokens_of_rows
        lengths += 1
        state.num_tokens[slots] = lengths
        ended = lengths >= state.max_total[slots]
        for stop_ids in state.stop_ids:
            ended |= stop_ids[slots] == tokens_of_rows
        requests = state.requests[slots]
        if self.kv.enable_prefix_caching:
            # Their tokens are all known now, and the step wrote their KV.
            ends = output.start[rows] + output.num_tokens[rows]
            (full,) = (ends // self.config.block_size > self.kv.num_hashed[slots]).nonzero()
            if len(full):
                self.kv.cache_decoded(requests[full], slots[full], state.token_ids)
        finished = []
        if ended.any():
            for i in ended.nonzero()[0].tolist():
                request = requests[i]
                self._vacate(request.slot)
                self._end_on_token(request, int(tokens_of_rows[i]))
                finished.append(request)
            self._compress_running()
        self.stats.num_generated_tokens += len(rows)
        result = StepResult(requests, tokens_of_rows, rows.astype(np.int32, copy=False), finished)
        if not all_current:
            return self._deliver_stale(output, tokens, current, result)
        return result

    def _end_on_token(self, request: Request, token: int) -> None:
        if token in request.stop_token_ids:
            self._end(request, RequestStatus.FINISHED_STOPPED, token)
        else:
            self._end(request, RequestStatus.FINISHED_LENGTH)

    def _deliver_stale(
        self,
        output: SchedulerOutput,
        tokens: NDArray[np.int32],
        current: NDArray[np.bool_],
        result: StepResult,
    ) -> StepResult:
        """Adds tokens of requests that were preempted while the step was in flight."""
        merged = dict(zip(result.rows.tolist(), result.requests))
        for row in np.flatnonzero(output.samples & ~current).tolist():
            key = (int(output.slots[row]), int(output.epochs[row]))
            request = self._stale.get(key)
            if request is None or request.status.finished:
                self._stale.pop(key, None)
                self.stats.num_discarded_tokens += 1
                continue
            request.num_stale_samples -= 1
            if not request.num_stale_samples:
                del self._stale[key]
            token = int(tokens[row])
            assert request.saved_tokens is not None
            request.saved_tokens = np.append(request.saved_tokens, np.int32(token))
            self.stats.num_generated_tokens += 1
            merged[row] = request
            limit = min(request.prompt_len + request.max_tokens, self.config.max_model_len)
            if token in request.stop_token_ids or request.num_tokens >= limit:
                self._waiting.discard(request.status)
                self._end_on_token(request, token)
                result.finished.append(request)
        rows = np.array(sorted(merged), np.int32)
        requests = np.empty(len(rows), object)
        requests[:] = [merged[row] for row in rows.tolist()]
        return StepResult(requests, tokens[rows], rows, result.finished)

    def observe_step(
        self,
        step_seconds: float,
        num_prefill_tokens: int,
        num_decodes: int,
        context_tokens: int,
    ) -> None:
        """Reports how long a step took, for admission policies that learn from it."""
        self.admission.on_step(step_seconds, num_prefill_tokens, num_decodes, context_tokens)

    # --- Prefix cache and checks ---------------------------------------------------------------

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """Forgets all cached blocks, for example because the weights changed.

        Args:
          force: preempt all running requests first, in order, and drop tokens in flight, which
            are sampled again; without it a block in use refuses the reset.

        Returns:
          Whether the cache was reset.
        """
        if force:
            for slot in self.running[::-1].tolist():
                request: Request = self.slots.requests[slot]
                self._preempt(request, None, "reset", keep_in_flight=False)
            self._compress_running()
            for request in self._stale.values():
                request.num_stale_samples = 0
            self._stale.clear()
        return self.pool.reset_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError unless all state agrees; slow, for tests and idle moments."""
        state, running = self.slots, self.running
        self.pool.check_integrity()
        assert len(np.unique(running)) == len(running), "a slot runs twice"
        assert set(running.tolist()) == set(np.flatnonzero(self._is_running).tolist())
        occupied = [slot for slot, request in enumerate(state.requests) if request is not None]
        assert set(occupied) == set(running.tolist()), "slots and running requests differ"
        assert state.num_free + len(occupied) == self.config.max_num_seqs, "a slot leaked"
        references = np.zeros_like(self.pool.ref_counts)
        for slot in occupied:
            request: Request = state.requests[slot]
            assert request.status == RequestStatus.RUNNING and request.slot == slot
            assert self._requests[request.request_id] is request
            held = int(self.num_blocks_held[slot])
            blocks = self.block_table[slot]
            assert (blocks[:held] > 0).all() and not blocks[held:].any(), "a table row is ragged"
            computed, tokens = int(state.num_computed[slot]), int(state.num_tokens[slot])
            expected = int(state.num_expected[slot])
            assert 0 < tokens <= expected <= int(state.max_total[slot])
            assert 0 < computed <= expected
            assert self.kv.blocks_for(computed) <= held, "computed tokens lie outside the blocks"
            assert self.kv.num_hashed[slot] * self.config.block_size <= computed
            np.add.at(references, blocks[:held], 1)
        idle = np.setdiff1d(np.arange(self.config.max_num_seqs), running)
        assert not self.num_blocks_held[idle].any() and not self.block_table[idle].any()
        assert (references == self.pool.ref_counts).all(), "reference counts are wrong"
        waiting = list(self._waiting)
        assert len(waiting) == len(self._waiting), "the queue has lost count"
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert request.slot == -1 and request.num_stale_samples >= 0
            assert self._requests[request.request_id] is request
        assert len(waiting) + len(occupied) == len(self._requests), "a request is nowhere"


class _GrowthUnderPressure:
    """Growth of running requests, one after the other, when the pool cannot serve them all."""

    def __init__(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        running: NDArray[np.intp],
        computed: NDArray[np.int32],
        wanted: NDArray[np.int32],
    ) -> None:
        self._scheduler = scheduler
        self._plan = plan
        self._running = running
        self._computed = computed
        self._wanted = wanted
        self._index = {slot: i for i, slot in enumerate(running.tolist())}
        self._requests: list[Request] = scheduler.slots.requests[running].tolist()

    def run(self, granted: NDArray[np.int32], needed: NDArray[np.int32]) -> NDArray[np.int32]:
        """Grows and preempts in running order; returns the tokens each row may run."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        needed = np.maximum(needed, 0)
        # Rows before the first that does not fit grow at once.
        first = int(np.argmax(np.cumsum(needed) > scheduler.pool.num_free))
        self._granted = granted.copy()
        self._granted[first:] = 0
        self._used = int(self._granted.sum())
        grown = []
        early = np.flatnonzero(needed[:first])
        if len(early):
            grown.append(kv.grow(self._running[early], needed[early]))
        for i in range(first, len(self._running)):
            slot = int(self._running[i])
            if not scheduler._is_running[slot]:
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
            alive = scheduler._is_running[slots]
            self._plan.new_blocks = NewBlocks(slots[alive], index[alive], ids[alive])
        return self._granted

    def _make_room(self, request: Request, total: int, extra: int) -> bool:
        """Preempts until `extra` blocks are free; False if `request` itself cannot run now."""
        scheduler, state = self._scheduler, self._scheduler.slots
        slot = request.slot
        if total > scheduler.pool.num_usable:
            # Even alone it would not fit. Its tokens in flight are read first.
            if state.num_expected[slot] == state.num_tokens[slot]:
                scheduler._vacate(slot)
                scheduler._end_too_large(request, request.num_tokens)
                self._plan.ended.append(request)
            return False
        while extra > scheduler.pool.num_free:
            alive = [r for r in self._requests if r.slot >= 0]
            victim = scheduler._choose_victim(alive)
            victim_slot = victim.slot
            reason = "self" if victim is request else "growth"
            self._plan.preemptions.append(scheduler._preempt(victim, request, reason))
            i = self._index[victim_slot]
            self._used -= int(self._granted[i])
            self._granted[i] = 0
            if victim is request:
                return False
        return True


def _within_budget(wanted: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """Grants `wanted` in order until the budget is used up."""
    if int(wanted.sum()) <= budget:
        return wanted
    upto = np.cumsum(wanted, dtype=np.int32)
    return np.clip(budget - (upto - wanted), 0, wanted)


__all__ = ["Scheduler"]
