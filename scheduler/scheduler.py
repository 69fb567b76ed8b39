"""The scheduler: which requests run which tokens in each step, on which blocks."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.growth import extend_decodes, schedule_running
from scheduler.integrity import check_integrity
from scheduler.joining import admit_waiting, finish_kv_load
from scheduler.output import SchedulerOutput, StepResult
from scheduler.plan import StepPlan
from scheduler.request import Request, RequestStatus
from scheduler.results import apply_many_tokens, apply_tokens
from scheduler.state import SchedulerState
from scheduler.waiting import QueueFullError

logger = logging.getLogger(__name__)

_NO_SLOTS = np.zeros(0, np.int32)
_NO_REQUESTS = np.zeros(0, object)


class Scheduler(SchedulerState):
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

    Args (of the constructor):
      config: limits and policies.
      admission: who may join a running batch; None takes what `config.watermark` names.
      kv_loader: where KV can be fetched from, None for nowhere.
      clock: seconds, for arrival and first-scheduled times.

    Attributes:
      config, admission, stats: as given, and the counters.
      pool: the KV blocks; `pool.num_free` of them can be handed out.
      block_table: int32 [max_num_seqs, max_blocks_per_seq], blocks of each slot in order.
      token_ids: int32 [max_num_seqs, max_model_len], prompt and output so far of each slot.
      num_tokens, num_computed, num_blocks_held, prompt_lens, max_total: int32 [max_num_seqs];
        known tokens, tokens computed by the steps planned so far, blocks, prompt length, and the
        length at which the request ends.
      slot_requests: object [max_num_seqs], the request in each slot or None.
      running: slots of the running requests in order of admission.
      num_running: requests that hold a slot.
    """

    _step_id = 0
    _num_added = 0

    # --- What is there -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, preempted ones and those waiting for KV included."""
        return len(self.requests) - self.num_running

    @property
    def waiting_requests(self) -> list[Request]:
        """The requests in the queue, in order of admission."""
        return list(self.waiting)

    @property
    def num_in_flight(self) -> int:
        """Outputs with rows that `update` has not seen yet."""
        return len(self.in_flight)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the usable blocks that requests hold, in [0, 1]."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def get_request(self, request_id: str) -> Request | None:
        """The unfinished request of that id, if any."""
        return self.requests.get(request_id)

    # --- Requests come and go ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a fresh request.

        Raises:
          ValueError: the request can never run within the limits, or its id is in use.
          QueueFullError: max_num_queued_reqs requests wait already.
        """
        self._check_addable(request)
        limit = self.config.max_num_queued_reqs
        if limit is not None and self.waiting.num_fresh >= limit:
            self.stats.num_refused += 1
            raise QueueFullError(
                f"{self.waiting.num_fresh} requests wait and max_num_queued_reqs is {limit}; "
                "try again later or raise --max_num_queued_reqs"
            )
        request.prompt_token_ids = np.ascontiguousarray(request.prompt_token_ids, np.int32)
        if request.arrival_time is None:
            request.arrival_time = self.clock()
        request.queue_number = self._num_added
        self._num_added += 1
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def _check_addable(self, request: Request) -> None:
        config, prompt_len, max_tokens = self.config, request.prompt_len, request.max_tokens
        name = f"request {request.request_id!r}"
        if request.request_id in self.requests:
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

        Tokens that steps in flight sample for it are dropped. Only blocks that an asynchronous
        load still writes to stay taken, until `finish_kv_load`.

        Returns:
          False if no unfinished request has that id.
        """
        if not status.finished:
            raise ValueError(f"status={status.name} does not end a request")
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.slot >= 0:
            self.vacate(request.slot)
            self.compress_running()
        elif request_id in self.loaded:
            self.pool.release(self.loaded.pop(request_id).blocks)
        elif request_id not in self.loading:
            self.waiting.discard(request.status)
        self.end(request, status, stop_reason)
        return True

    # --- Steps ---------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> SchedulerOutput:
        """Plans one step: growth of running requests, then admissions.

        Called with nothing to do it returns an output without rows.

        Args:
          max_steps: decode steps that may be planned at once. More than one are planned (always
            all of them) only if nobody waits, every running request decodes and none can pass its
            length limit meanwhile, and the blocks lie above the watermark.
        """
        plan = StepPlan(self.config.max_num_batched_tokens)
        if self.num_running:
            schedule_running(self, plan)
        if not plan.preemptions:
            admit_waiting(self, plan)
        num_steps = extend_decodes(self, plan, max_steps) if max_steps > 1 else 1
        plan.merge()
        slots = plan.slots
        if len(slots):
            self.in_flight.append(self._step_id)
            self.stats.num_steps += 1
            used = self.config.max_num_batched_tokens - plan.budget
            self.stats.num_scheduled_tokens += used * num_steps
        elif not (self.num_running or self.in_flight or plan.ended or plan.preemptions):
            self._watch_progress()
        blocks = plan.new_blocks
        output = SchedulerOutput(
            step_id=self._step_id,
            slots=slots.astype(np.int32),
            num_tokens=plan.num_tokens,
            start=plan.start,
            samples=self._expect_samples(plan),
            epochs=self.slots.epochs[slots],
            num_decodes=plan.num_decodes,
            joined=np.array(plan.joined_slots, np.int32) if plan.joined_slots else _NO_SLOTS,
            released=np.array(self.released, np.int32) if self.released else _NO_SLOTS,
            new_block_slots=blocks.slots,
            new_block_index=blocks.index,
            new_block_ids=blocks.ids,
            preemptions=tuple(plan.preemptions),
            finished_request_ids=tuple(self.finished_ids),
            ended_requests=tuple(plan.ended),
            kv_loads=tuple(plan.kv_loads),
            num_steps=num_steps,
        )
        self._step_id += 1
        self.released.clear()
        self.finished_ids.clear()
        return output

    def _expect_samples(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Which rows end at their last known token; from now on they expect one token more."""
        expected, slots = self.slots.num_expected, plan.slots
        if plan.num_decodes == len(slots):
            expected[slots] += 1
            return np.ones(len(slots), np.bool_)
        samples = plan.start + plan.num_tokens == expected[slots]
        expected[slots[samples]] += 1
        return samples

    def _watch_progress(self) -> None:
        if len(self.waiting) and self.pool.num_free == self.pool.num_usable:
            self.stats.num_watchdog_violations += 1
            logger.error(
                "no progress: %d requests wait, nothing runs and all %d blocks are free",
                len(self.waiting),
                self.pool.num_usable,
            )

    def update(self, output: SchedulerOutput, tokens: ArrayLike) -> StepResult:
        """Takes the tokens that a step sampled: appends them and ends requests that stop.

        Args:
          output: the oldest output with rows that was not updated yet.
          tokens: int32 [n], one for each row, or [n, num_steps] if num_steps > 1; those of rows
            that do not sample are ignored.

        Raises:
          ValueError: outputs are updated out of order, or tokens has another shape.
        """
        n, num_steps = len(output.slots), output.num_steps
        if not n:
            return StepResult(_NO_REQUESTS, _NO_SLOTS, _NO_SLOTS, [])
        if not self.in_flight or self.in_flight[0] != output.step_id:
            raise ValueError(
                f"step {output.step_id} was updated out of order; the oldest step in flight is "
                f"{self.in_flight[0] if self.in_flight else 'none'}"
            )
        tokens = np.asarray(tokens, np.int32)
        shape = (n,) if num_steps == 1 else (n, num_steps)
        if tokens.shape != shape:
            raise ValueError(
                f"tokens has shape {tokens.shape}, but step {output.step_id} needs {shape}"
            )
        self.in_flight.popleft()
        if num_steps > 1:
            return apply_many_tokens(self, output, tokens)
        return apply_tokens(self, output, tokens)

    def observe_step(
        self,
        step_seconds: float,
        num_prefill_tokens: int,
        num_decodes: int,
        context_tokens: int,
    ) -> None:
        """Reports how long a step took, for admission policies that learn from it."""
        self.admission.on_step(step_seconds, num_prefill_tokens, num_decodes, context_tokens)

    # --- KV from elsewhere, prefix cache, checks -----------------------------------------------

    def finish_kv_load(self, request_id: str, num_tokens: int) -> None:
        """Reports that a load of `SchedulerOutput.kv_loads` has ended, well or not.

        The request runs as soon as it fits, before all that holds no blocks; what was not loaded
        is computed. If it was aborted meanwhile its blocks become free now.

        Args:
          request_id: of `KVLoad.request`.
          num_tokens: tokens loaded, from `KVLoad.start` on without a gap.

        Raises:
          ValueError: no such load is under way, or num_tokens is more than was asked for.
        """
        finish_kv_load(self, request_id, num_tokens)

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """Forgets all cached blocks, for example because the weights changed.

        Args:
          force: preempt all running requests first, in order, and drop tokens in flight, which
            are sampled again; without it a block in use refuses the reset.

        Returns:
          Whether the cache was reset; even by force not while a KV load writes to blocks.
        """
        if force:
            for slot in self.running[::-1].tolist():
                self.preempt(self.slots.request_at(slot), None, "reset", keep_in_flight=False)
            self.compress_running()
            for request in self.stale.values():
                request.num_stale_samples = 0
            self.stale.clear()
            youngest_first = sorted(
                self.loaded.values(), key=lambda held: held.request.queue_number, reverse=True
            )
            for held in youngest_first:
                self.pool.release(held.blocks)
                self.waiting.push(held.request)
            self.loaded.clear()
        return self.pool.reset_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError unless all state agrees; slow, for tests and idle moments."""
        check_integrity(self)


__all__ = ["Scheduler"]
