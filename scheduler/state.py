"""State that the parts of the scheduler share, and the moves a request makes within it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from scheduler.admission import AdmissionPolicy, make_admission_policy
from scheduler.config import SchedulerConfig
from scheduler.kv_cache import KVCacheManager
from scheduler.output import Preemption
from scheduler.request import Request, RequestStatus
from scheduler.slots import SlotArrays
from scheduler.stats import SchedulerStats
from scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class KVLoader(Protocol):
    """Knows of KV outside the pool that can be fetched instead of computed."""

    def num_loadable_tokens(
        self, request: Request, token_ids: NDArray[np.int32], num_cached_tokens: int
    ) -> int:
        """Tokens after the first `num_cached_tokens` whose KV can be fetched; asked at admission.

        A positive answer makes the request wait, holding its blocks, until
        `Scheduler.finish_kv_load`.
        """
        ...


@dataclasses.dataclass(slots=True)
class HeldKV:
    """Blocks of a request that has no slot: its KV is being loaded, or is and waits to run.

    Attributes:
      request: the request; it may have ended while the load still writes to the blocks.
      blocks: int32, in order.
      num_shared: leading blocks that came from the prefix cache.
      num_computed: tokens whose KV the blocks hold (when the load has ended).
    """

    request: Request
    blocks: NDArray[np.int32]
    num_shared: int
    num_computed: int


class SchedulerState:
    """Everything `Scheduler` knows; see there for the public attributes.

    Attributes:
      waiting: the queue. requests: all unfinished requests by id.
      loading, loaded: requests that hold blocks without a slot, by id.
      in_flight: step ids of outputs that `update` has not seen.
      stale: requests preempted while steps in flight sample for them, by the slot and epoch
        they had.
      released, finished_ids: what the next output reports.
      is_running: bool [max_num_seqs], by slot. all_rows: 0, 1, ..., to be sliced.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        admission: AdmissionPolicy | None = None,
        kv_loader: KVLoader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.admission = make_admission_policy(config) if admission is None else admission
        self.kv_loader = kv_loader
        self.clock = clock
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
        self.waiting = WaitingQueue(config.scheduling_policy)
        self.requests: dict[str, Request] = {}
        self.loading: dict[str, HeldKV] = {}
        self.loaded: dict[str, HeldKV] = {}
        self.in_flight: deque[int] = deque()
        self.stale: dict[tuple[int, int], Request] = {}
        self.released: list[int] = []
        self.finished_ids: list[str] = []
        self.num_running = 0
        self._running = np.zeros(config.max_num_seqs, np.intp)
        self.is_running = np.zeros(config.max_num_seqs, np.bool_)
        self.all_rows = np.arange(config.max_num_seqs, dtype=np.int32)

    @property
    def running(self) -> NDArray[np.intp]:
        """Slots of the running requests in the order of their admission; a view."""
        return self._running[: self.num_running]

    @property
    def as_scheduler(self) -> Scheduler:
        """Itself under its public type, for admission policies."""
        return cast("Scheduler", self)

    def chunk_limit(self) -> int:
        """Most tokens that one request may run in this step."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and len(self.requests) > 1:
            return threshold
        return self.config.max_num_batched_tokens

    @property
    def reserved_blocks(self) -> int:
        """Blocks that admitted requests still need for the tokens they had at admission.

        An asynchronous load must leave them free: it holds its own blocks while it waits, and
        two parties that each hold part of what the other needs would wait for ever.
        """
        state, running = self.slots, self.running
        prefilling = running[state.num_computed[running] < state.num_joined[running]]
        goals = -(-state.num_joined[prefilling] // self.config.block_size)
        owed = int(np.maximum(goals - self.num_blocks_held[prefilling], 0).sum())
        for held in (*self.loading.values(), *self.loaded.values()):
            if not held.request.status.finished:
                owed += self.kv.blocks_for(held.request.num_tokens) - len(held.blocks)
        return owed

    def join(self, request: Request, num_computed: int) -> int:
        """Gives a request that left the queue a slot; its blocks are left to the caller."""
        slot = self.slots.join(request, num_computed)
        request.status = RequestStatus.RUNNING
        self._running[self.num_running] = slot
        self.num_running += 1
        self.is_running[slot] = True
        return slot

    def vacate(self, slot: int) -> int:
        """Frees a slot and its blocks; returns how many blocks became free.

        `running` keeps the slot until `compress_running`.
        """
        freed = self.kv.release(slot)
        self.slots.leave(slot)
        self.is_running[slot] = False
        self.released.append(slot)
        return freed

    def compress_running(self) -> None:
        """Drops vacated slots from `running`, keeping its order."""
        running = self.running
        kept = running[self.is_running[running]]
        self.num_running = len(kept)
        self._running[: self.num_running] = kept

    def end(
        self, request: Request, status: RequestStatus, stop_reason: int | str | None = None
    ) -> None:
        """Marks a request that holds neither slot nor blocks nor a place in the queue as ended."""
        request.status = status
        request.stop_reason = stop_reason
        del self.requests[request.request_id]
        self.finished_ids.append(request.request_id)
        self.stats.num_finished += 1
        self.admission.on_finished(self.as_scheduler, request)

    def end_on_token(self, request: Request, token: int) -> None:
        """Ends a request whose last token is a stop token or reached a limit."""
        if token in request.stop_token_ids:
            self.end(request, RequestStatus.FINISHED_STOPPED, token)
        else:
            self.end(request, RequestStatus.FINISHED_LENGTH)

    def end_too_large(self, request: Request, num_tokens: int) -> None:
        """Ends a request that the pool cannot hold even alone; it holds nothing any more."""
        request.warning = (
            f"ended at {num_tokens} tokens because the KV cache holds "
            f"{self.pool.num_usable * self.config.block_size} "
            f"({self.pool.num_usable} blocks of {self.config.block_size}); raise --num_kv_blocks"
        )
        logger.warning("request %s %s", request.request_id, request.warning)
        self.stats.num_pool_too_small += 1
        self.end(request, RequestStatus.FINISHED_LENGTH)

    def preempt(
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
            self.stale[slot, int(self.slots.epochs[slot])] = request
            request.num_stale_samples = in_flight
        request.max_computed_tokens = max(request.max_computed_tokens, lost)
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        freed = self.vacate(slot)
        self.waiting.push(request)
        self.stats.num_preemptions += 1
        self.stats.preemptions_by_reason[reason] += 1
        self.stats.num_tokens_lost += lost
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
        self.admission.on_preempted(self.as_scheduler, request)
        return Preemption(request, cause_id, reason, freed, lost)

    def note_prefill(self, slot: int, start: int, count: int) -> None:
        """Accounts for a row of known tokens: what it recomputes, and the blocks it fills."""
        end = start + count
        again = min(end, int(self.slots.max_computed[slot])) - start
        if again > 0:
            self.slots.request_at(slot).num_recomputed_tokens += again
            self.stats.num_recomputed_tokens += again
        if self.kv.enable_prefix_caching:
            request = self.slots.request_at(slot)
            self.kv.cache_blocks(slot, request, self.slots.token_ids[slot], end)


__all__ = ["HeldKV", "KVLoader", "SchedulerState"]
