"""`--watermark=auto`: break-even admission, learnt from the traffic and the step times at hand.

One more request in the batch is worth its share of the step's fixed cost for as long as it runs,
and costs the recomputation of its tokens if the pool runs out of blocks while it is the youngest.
Blocks are kept free only while that risk outweighs the worth (`break_even` has the arithmetic).
Both come from observation: step times through `on_step`, output lengths (per `request_class`) from
requests that run, are preempted or end. While step times are unknown everything that fits is admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scheduler.break_even import Batch, expected_gain_and_cost, row_steps_per_preemption
from scheduler.config import SchedulerConfig
from scheduler.length_model import LengthModel
from scheduler.request import Request, RequestStatus
from scheduler.step_time import StepTimeLearner, StepTimeModel

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler

_PROJECTION_POINTS = 32
# Evidence on lengths fades over this many ended requests, so that a change of traffic is noticed.
_MEMORY_REQUESTS = 300.0
# Classes of requests whose lengths are told apart; any further ones share the common model.
_MAX_CLASSES = 16
# Steps after which what running requests tell is taken in again and a refusal is reconsidered.
_REFRESH_STEPS = 16


class BreakEvenAdmission:
    """Admits a request if what its presence gains is expected to exceed what it costs.

    A refusal stands until blocks were given back or some steps have passed.

    Attributes:
      lengths: the learnt distribution of output lengths, over all classes of requests.
      step_times: the learnt cost of a step.
      num_admitted, num_refused: decisions, standing refusals not counted again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        output_len_of: Callable[[Request], int] | None = None,
    ) -> None:
        """Args:
        config: of the scheduler that asks.
        output_len_of: the true output length of each request, where it is known (simulations);
          None learns.
        """
        self.lengths = LengthModel(config.max_model_len, _MEMORY_REQUESTS)
        self.step_times = StepTimeLearner()
        self.num_admitted = 0
        self.num_refused = 0
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._output_len_of = output_len_of
        self._model: StepTimeModel | None = None
        n = config.max_num_seqs
        self._generated = np.zeros(n, np.int64)
        self._bounds = np.zeros(n, np.int64)
        self._classes = np.zeros(n, np.int64)
        self._class_of: dict[str, int] = {"": 0}
        self._models = [self.lengths]
        self._table = self.lengths.cumulative_hazard
        self._slot_of: dict[str, int] = {}
        points = np.geomspace(8, config.max_model_len, _PROJECTION_POINTS)
        self._times = np.unique(np.concatenate(([0], points))).astype(np.int64)
        self._num_steps = 0
        self._refreshed_at = -_REFRESH_STEPS
        self._refused: tuple[str, int, int] = ("", -1, 0)

    def admits(
        self,
        scheduler: Scheduler,
        request: Request,
        *,
        num_known_tokens: int,
        num_cached_tokens: int,
        num_new_blocks: int,
        num_free_blocks: int,
    ) -> bool:
        """See `AdmissionPolicy.admits`."""
        refused_id, refused_free, refused_at = self._refused
        if (
            refused_id == request.request_id
            and num_free_blocks <= refused_free
            and self._num_steps < refused_at + _REFRESH_STEPS
        ):
            return False
        self._class(request)
        if self._num_steps >= self._refreshed_at + _REFRESH_STEPS:
            self._refresh(scheduler)
        if self._model is None:
            return True
        batch = self._batch(
            scheduler, request, num_known_tokens, num_cached_tokens, num_new_blocks, num_free_blocks
        )
        own_tokens = float(num_known_tokens - num_cached_tokens)
        if self._pays(batch, own_tokens, self._model):
            self.num_admitted += 1
            return True
        self.num_refused += 1
        self._refused = (request.request_id, num_free_blocks, self._num_steps)
        return False

    def _pays(self, batch: Batch, own_tokens: float, model: StepTimeModel) -> bool:
        fill, n = batch.steps_to_fill, len(batch.tokens)
        # What a row-step is worth: the share of the fixed cost that need not be paid again. Blocks
        # and rows are both scarce; the smaller share counts.
        used = float(batch.tokens.sum()) + 0.5 * n * fill
        worth = model.base * min((own_tokens + 0.5 * fill) / used, 1.0 / n)
        cost = model.per_prefill_token * (own_tokens + fill)
        hazard, stride = self._hazard()
        enough = cost / worth
        if row_steps_per_preemption(batch, hazard, stride, enough) < enough:
            return False
        gain, tokens = expected_gain_and_cost(batch, hazard, stride, self._times, own_tokens)
        return model.base * gain >= model.per_prefill_token * tokens

    def _hazard(self) -> tuple[np.ndarray, int]:
        if self._output_len_of is not None:
            return _NO_HAZARD, self._max_model_len + 1
        return self._table, self.lengths.stride

    def _batch(
        self,
        scheduler: Scheduler,
        request: Request,
        known: int,
        cached: int,
        new_blocks: int,
        free_blocks: int,
    ) -> Batch:
        running, size = scheduler.running, self._block_size
        n = len(running)
        tokens = np.empty(n + 1)
        generated = np.empty(n + 1, np.int64)
        bounds = np.empty(n + 1, np.int64)
        known_tokens = scheduler.num_tokens[running]
        tokens[:n] = known_tokens
        generated[:n] = known_tokens - scheduler.prompt_lens[running]
        bounds[:n] = self._bounds[running]
        tokens[n] = known
        generated[n] = known - request.prompt_len
        bounds[n] = self._bound(request)
        classes = None
        if self._output_len_of is None and len(self._models) > 1:
            classes = np.empty(n + 1, np.int64)
            classes[:n] = self._classes[running]
            classes[n] = self._class(request)
        # Prefills under way are owed blocks that they do not hold yet.
        owed = (known_tokens + (size - 1)) // size - scheduler.num_blocks_held[running]
        needed = max(new_blocks, -(-(known - cached) // size))
        free = free_blocks - needed - int(np.maximum(owed, 0).sum())
        return Batch(tokens, generated, bounds, free, scheduler.pool.num_usable, size, classes)

    def _bound(self, request: Request) -> int:
        if self._output_len_of is not None:
            return self._output_len_of(request)
        return min(request.max_tokens, self._max_model_len - request.prompt_len)

    def _refresh(self, scheduler: Scheduler) -> None:
        """Takes in what running requests tell of lengths, and the step times seen so far."""
        self._refreshed_at = self._num_steps
        running = scheduler.running
        if len(running):
            now = (scheduler.num_tokens[running] - scheduler.prompt_lens[running]).astype(np.int64)
            self._observe(running, now)
        self._model = self.step_times.model()
        tables = [model.cumulative_hazard for model in self._models]
        self._table = tables[0] if len(tables) == 1 else np.stack(tables)

    def _observe(self, slots: NDArray[np.intp], now: NDArray[np.int64]) -> None:
        """Tells the length models how far the requests in `slots` have come."""
        before = self._generated[slots]
        self.lengths.observe_progress(before, now)
        for i in range(1, len(self._models)):
            mine = self._classes[slots] == i
            if mine.any():
                self._models[i].observe_progress(before[mine], now[mine])
        self._generated[slots] = now

    def _class(self, request: Request) -> int:
        """Index of the request's length model; a new class gets one while there is room."""
        name = request.request_class
        index = self._class_of.get(name)
        if index is None:
            if len(self._models) >= _MAX_CLASSES:
                return 0
            index = self._class_of[name] = len(self._models)
            self._models.append(LengthModel(self._max_model_len, _MEMORY_REQUESTS, self.lengths))
            self._refreshed_at = -_REFRESH_STEPS
        return index

    def on_admitted(self, scheduler: Scheduler, request: Request) -> None:
        """See `AdmissionPolicy.on_admitted`."""
        slot = request.slot
        self._slot_of[request.request_id] = slot
        self._generated[slot] = request.num_output_tokens
        self._bounds[slot] = self._bound(request)
        self._classes[slot] = self._class(request)

    def on_preempted(self, scheduler: Scheduler, request: Request) -> None:
        """See `AdmissionPolicy.on_preempted`."""
        self._leave(request)

    def on_finished(self, scheduler: Scheduler, request: Request) -> None:
        """See `AdmissionPolicy.on_finished`."""
        self._leave(request)
        if request.status == RequestStatus.FINISHED_STOPPED:
            self.lengths.observe_end(request.num_output_tokens)
            index = self._class_of.get(request.request_class, 0)
            if index:
                self._models[index].observe_end(request.num_output_tokens)

    def _leave(self, request: Request) -> None:
        slot = self._slot_of.pop(request.request_id, None)
        self._refused = ("", -1, 0)
        if slot is not None:
            self._observe(np.array([slot]), np.array([request.num_output_tokens]))

    def on_step(
        self,
        step_seconds: float,
        num_prefill_tokens: int,
        num_decodes: int,
        context_tokens: int,
    ) -> None:
        """See `AdmissionPolicy.on_step`."""
        self._num_steps += 1
        self.step_times.observe(step_seconds, num_prefill_tokens, num_decodes, context_tokens)


_NO_HAZARD = np.zeros(1)

__all__ = ["BreakEvenAdmission"]
