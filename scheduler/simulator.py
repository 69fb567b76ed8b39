"""Replays a workload through the real `Scheduler` with a model of step times. Numpy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.admission import AdmissionPolicy
from scheduler.auto_admission import BreakEvenAdmission
from scheduler.config import Watermark, check_watermark
from scheduler.histogram import Histogram, Timeline
from scheduler.output import SchedulerOutput
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.step_time import StepTimeModel
from scheduler.workload import Workload

PERCENTILES = (50.0, 90.0, 99.0, 99.5)
_STOP_TOKEN = 1
_NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class SimulationReport:
    """What a simulation measured. Times in seconds unless the name says ms.

    Attributes:
      watermark: the setting, "auto" or a fraction.
      lengths_known: whether the policy was told the true output lengths.
      requests, output_tokens, steps, duration_s: what ran, in simulated time.
      preemptions, recomputed_tokens, max_preemptions_per_request: what the pool's limit cost.
      output_tok_s: output tokens per simulated second.
      ttft_*, e2e_*: from arrival to the first and to the last token.
      itl_*: between tokens of one request, preemptions included.
      kv_use_mean, kv_use_max: share of usable blocks held, the mean over time.
      timeline: float64 [samples, 4]: time, share of blocks held, running, preemptions so far.
    """

    watermark: Watermark
    lengths_known: bool
    requests: int
    output_tokens: int
    steps: int
    duration_s: float
    preemptions: int
    recomputed_tokens: int
    max_preemptions_per_request: int
    output_tok_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_p99_5_s: float
    itl_p50_ms: float
    itl_p90_ms: float
    itl_p99_ms: float
    itl_p99_5_ms: float
    e2e_p50_s: float
    e2e_p90_s: float
    e2e_p99_s: float
    e2e_p99_5_s: float
    kv_use_mean: float
    kv_use_max: float
    timeline: NDArray[np.float64] = dataclasses.field(repr=False, compare=False)

    def to_json(self, *, timeline: bool = False) -> dict[str, Any]:
        """The fields as plain values; the timeline only if asked for."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["timeline"] = self.timeline.tolist()
        if not timeline:
            del values["timeline"]
        return values


def simulate(
    workload: Workload,
    step_model: StepTimeModel,
    *,
    watermark: Watermark | str = 0.0,
    lengths_known: bool = False,
    admission: AdmissionPolicy | None = None,
    on_progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> SimulationReport:
    """Runs a workload to its end.

    Memory is bounded by a few numbers per request (kept for exact percentiles), whatever the
    lengths and the number of steps.

    Args:
      workload: requests and engine limits.
      step_model: how long each step takes.
      watermark: fraction or "auto".
      lengths_known: tells `auto` the true output lengths instead of max_tokens.
      admission: a policy in place of the one that `watermark` names.
      on_progress: called with the number of requests that ended since the last call.
      settings: changes to single settings of the workload's `SchedulerConfig`.
    """
    return _Simulation(workload, step_model, watermark, lengths_known, admission, settings).run(
        on_progress
    )


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        step_model: StepTimeModel,
        watermark: Watermark | str,
        lengths_known: bool,
        admission: AdmissionPolicy | None,
        settings: dict[str, Any],
    ) -> None:
        self._workload = workload
        self._model = step_model
        self._watermark: Watermark = check_watermark(watermark)
        self._lengths_known = lengths_known
        self._now = 0.0
        config = workload.scheduler_config(watermark=self._watermark, **settings)
        if admission is None and lengths_known and config.watermark == "auto":
            admission = BreakEvenAdmission(config, output_len_of=self._output_len_of)
        self._scheduler = Scheduler(config, admission=admission, clock=lambda: self._now)
        n, slots = len(workload), config.max_num_seqs
        self._arrivals = np.zeros(n) if workload.arrivals is None else workload.arrivals
        self._ttft = np.zeros(n)
        self._e2e = np.zeros(n)
        self._num_preempted = np.zeros(n, np.int32)
        # Of requests that wait with tokens: when the last of those came.
        self._last_token_at: dict[int, float] = {}
        self._slot_index = np.zeros(slots, np.int64)
        self._slot_target = np.zeros(slots, np.int32)
        self._slot_last_at = np.zeros(slots)
        self._slot_fresh = np.zeros(slots, np.bool_)
        self._any_fresh = False
        self._slots_of: dict[str, int] = {}
        self._next = 0
        self._itl = Histogram()
        self._timeline = Timeline(columns=4)
        self._used_seconds = 0.0
        self._prompt = np.zeros(int(workload.prompt_lens.max()), np.int32)

    def _output_len_of(self, request: Request) -> int:
        return int(self._workload.output_lens[int(request.request_id)])

    def run(self, on_progress: Callable[[int], None] | None) -> SimulationReport:
        scheduler, workload = self._scheduler, self._workload
        closed = workload.max_concurrency is not None
        if closed:
            self._add(min(workload.max_concurrency or 0, len(workload)))
        while True:
            if not closed:
                self._add_arrived()
            if not scheduler.has_unfinished():
                break
            output = scheduler.schedule()
            for preemption in output.preemptions:
                self._note_preemption(preemption.request)
            if not len(output.slots):
                continue
            finished = self._run_step(output)
            if finished:
                if closed:
                    self._add(min(finished, len(workload) - self._next))
                if on_progress is not None:
                    on_progress(finished)
        return self._report()

    # --- Arrivals ------------------------------------------------------------------------------

    def _add_arrived(self) -> None:
        """Adds what has arrived; an idle engine waits for the next arrival."""
        arrivals, n = self._arrivals, len(self._workload)
        if self._next >= n:
            return
        if not self._scheduler.has_unfinished():
            self._now = max(self._now, float(arrivals[self._next]))
        upto = self._next
        while upto < n and arrivals[upto] <= self._now:
            upto += 1
        self._add(upto - self._next)

    def _add(self, count: int) -> None:
        workload = self._workload
        for i in range(self._next, self._next + count):
            if workload.arrivals is None:
                self._arrivals[i] = self._now
            self._scheduler.add(
                Request(
                    request_id=str(i),
                    prompt_token_ids=self._prompt[: workload.prompt_lens[i]],
                    max_tokens=int(workload.max_tokens[i]),
                    stop_token_ids=(_STOP_TOKEN,),
                    priority=0 if workload.priorities is None else int(workload.priorities[i]),
                    arrival_time=float(self._arrivals[i]),
                    request_class="" if workload.classes is None else workload.classes[i],
                )
            )
        self._next += count

    # --- Steps ---------------------------------------------------------------------------------

    def _note_preemption(self, request: Request) -> None:
        index = int(request.request_id)
        self._num_preempted[index] += 1
        slot = self._slots_of[request.request_id]
        if not self._slot_fresh[slot]:
            self._last_token_at[index] = float(self._slot_last_at[slot])

    def _join(self, slots: Iterable[int]) -> None:
        workload = self._workload
        for slot in slots:
            request = self._scheduler.slot_requests[slot]
            index = int(request.request_id)
            self._slots_of[request.request_id] = slot
            self._slot_index[slot] = index
            output_len = workload.output_lens[index]
            # One that uses up its max_tokens is cut by it, not stopped by a token.
            cut = output_len >= workload.max_tokens[index]
            self._slot_target[slot] = _NEVER if cut else workload.prompt_lens[index] + output_len
            last = self._last_token_at.pop(index, None)
            self._slot_fresh[slot] = last is None
            self._slot_last_at[slot] = 0.0 if last is None else last
            self._any_fresh |= last is None

    def _run_step(self, output: SchedulerOutput) -> int:
        """Advances the clock over one step and hands over its tokens; returns requests ended."""
        scheduler, slots = self._scheduler, output.slots
        if len(output.joined):
            self._join(output.joined.tolist())
        decodes = output.num_decodes
        context = int(output.start[:decodes].sum()) + decodes
        if decodes == len(slots):
            prefill, sampling = 0, slots
        else:
            prefill = int(output.num_tokens[decodes:].sum())
            sampling = slots[output.samples]
        seconds = self._model.seconds(prefill, decodes, context)
        self._used_seconds += seconds * scheduler.kv_cache_usage
        self._now += seconds
        self._timeline.add(
            self._now,
            scheduler.kv_cache_usage,
            scheduler.num_running,
            scheduler.stats.num_preemptions,
        )
        self._note_tokens(sampling)
        tokens = scheduler.num_tokens[slots] + 1 >= self._slot_target[slots]
        result = scheduler.update(output, tokens.astype(np.int32))
        scheduler.observe_step(seconds, prefill, decodes, context)
        for request in result.finished:
            index = int(request.request_id)
            self._e2e[index] = self._now - self._arrivals[index]
            del self._slots_of[request.request_id]
        return len(result.finished)

    def _note_tokens(self, slots: NDArray[np.integer]) -> None:
        now, later = self._now, slots
        if self._any_fresh:
            fresh = self._slot_fresh[slots]
            first, later = slots[fresh], slots[~fresh]
            indices = self._slot_index[first]
            self._ttft[indices] = now - self._arrivals[indices]
            self._slot_fresh[first] = False
            self._any_fresh = bool(self._slot_fresh.any())
        if len(later):
            gaps = now - self._slot_last_at[later]
            self._itl.add_many(gaps)
        self._slot_last_at[slots] = now

    def _report(self) -> SimulationReport:
        stats, tokens = self._scheduler.stats, int(self._workload.output_lens.sum())
        seconds = max(self._now, 1e-12)
        timeline = self._timeline.samples()
        percentiles: dict[str, float] = {}
        for q in PERCENTILES:
            name = f"{q:g}".replace(".", "_")
            percentiles[f"ttft_p{name}_s"] = float(np.percentile(self._ttft, q))
            percentiles[f"e2e_p{name}_s"] = float(np.percentile(self._e2e, q))
            percentiles[f"itl_p{name}_ms"] = 1e3 * self._itl.percentile(q)
        return SimulationReport(
            watermark=self._watermark,
            lengths_known=self._lengths_known,
            requests=len(self._workload),
            output_tokens=tokens,
            steps=stats.num_steps,
            duration_s=self._now,
            preemptions=stats.num_preemptions,
            recomputed_tokens=stats.num_tokens_lost,
            max_preemptions_per_request=int(self._num_preempted.max()),
            output_tok_s=tokens / seconds,
            kv_use_mean=self._used_seconds / seconds,
            kv_use_max=float(self._timeline.maximum[1]),
            timeline=timeline,
            **percentiles,
        )


__all__ = ["PERCENTILES", "SimulationReport", "simulate"]
