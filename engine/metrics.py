"""Prometheus metrics with vLLM's names, and ours under `tidegate:`."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.outputs import RequestOutput
from scheduler.config import SchedulerConfig
from scheduler.stats import SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
         20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
        2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_LATENCY = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
            50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N = (1, 2, 5, 10, 20)


def _lengths(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the longest sequence."""
    steps = [m * 10**e for e in range(9) for m in (1, 2, 5)]
    return tuple(s for s in steps if s <= most)


class Histogram:
    """Counts per bucket; cheap enough to be fed a whole batch at each step."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]):
        """Args:
        name: without suffix.
        documentation: one line.
        bounds: upper bounds in ascending order, without infinity.
        """
        self.name = name
        self.documentation = documentation
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` over."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self._counts)

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """What Prometheus reads: cumulative counts."""
        total, buckets = 0, []
        for bound, count in zip([*self._bounds, float("inf")], self._counts):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        family = HistogramMetricFamily(self.name, self.documentation, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class SchedulerView(Protocol):
    """What is read of `scheduler.Scheduler`."""

    config: SchedulerConfig
    stats: SchedulerStats

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def kv_cache_usage(self) -> float: ...


@dataclasses.dataclass(slots=True)
class _Live:
    """What is remembered of an unfinished request."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0


class EngineMetrics(Collector):
    """Fed by the engine's thread, read by whoever scrapes.

    Numbers are plain Python; a scrape in the middle of a step may see half of it.
    """

    def __init__(self, scheduler: SchedulerView, *, model_name: str, config: dict[str, Any]):
        """Args:
        scheduler: read at every scrape.
        model_name: label of every sample.
        config: settings to publish as labels of vllm:cache_config_info.
        """
        self._scheduler = scheduler
        self._labels = {"model_name": model_name, "engine": "0"}
        self._config = {name: str(value) for name, value in config.items()}
        self._live: dict[str, _Live] = {}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_aborted_by_client = 0
        self._finished: collections.Counter[str] = collections.Counter(
            dict.fromkeys(("stop", "length", "abort", "error"), 0)
        )
        longest = _lengths(scheduler.config.max_model_len)
        seconds = "in seconds"
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", f"Time to first token {seconds}.", _TTFT
        )
        self.itl = Histogram(
            "vllm:inter_token_latency_seconds", f"Time between tokens {seconds}.", _ITL
        )
        self.tpot = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per later token of a request.",
            _ITL,
        )
        self.e2e = Histogram(
            "vllm:e2e_request_latency_seconds", f"Arrival to last token {seconds}.", _LATENCY
        )
        self.queue = Histogram(
            "vllm:request_queue_time_seconds", f"Time spent waiting {seconds}.", _LATENCY
        )
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", f"Admission to first token {seconds}.", _LATENCY
        )
        self.decode = Histogram(
            "vllm:request_decode_time_seconds", f"First to last token {seconds}.", _LATENCY
        )
        self.inference = Histogram(
            "vllm:request_inference_time_seconds", f"Admission to last token {seconds}.", _LATENCY
        )
        self.iteration = Histogram(
            "vllm:iteration_tokens_total", "Tokens run in a step.", _ITERATION
        )
        self.prompt_length = Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", longest
        )
        self.output_length = Histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", longest
        )
        self.params_n = Histogram("vllm:request_params_n", "The request's n.", _N)
        self.params_max_tokens = Histogram(
            "vllm:request_params_max_tokens", "The request's max_tokens.", longest
        )
        self._scheduled_before = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    # Fed by the engine ------------------------------------------------------------------------

    def on_add(self, request_id: str, arrival: float, *, n: int, max_tokens: int | None) -> None:
        """A request was queued. `arrival` on the clock of time.monotonic."""
        self._live[request_id] = _Live(arrival)
        self.params_n.observe(n)
        if max_tokens is not None:
            self.params_max_tokens.observe(max_tokens)

    def on_abort(self, request_id: str) -> None:
        """A client left, or the server stopped."""
        if self._live.pop(request_id, None) is not None:
            self._finished["abort"] += 1

    def on_step(self, outputs: Iterable[RequestOutput], now: float | None = None) -> None:
        """A step ended with these deltas."""
        now = time.monotonic() if now is None else now
        scheduled = self._scheduler.stats.num_scheduled_tokens
        if scheduled > self._scheduled_before:
            self.iteration.observe(scheduled - self._scheduled_before)
            self._scheduled_before = scheduled
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            count = sum(len(o.token_ids) for o in output.outputs)
            if count:
                self._on_tokens(live, output, count, now)
            for completion in output.outputs:
                if completion.finish_reason is not None:
                    self._finished[completion.finish_reason] += 1
            if output.finished:
                del self._live[output.request_id]
                self._on_finish(live, output, now)

    def _on_tokens(self, live: _Live, output: RequestOutput, count: int, now: float) -> None:
        self.generation_tokens += count
        live.num_tokens += count
        if live.first_token is None:
            self.prompt_tokens += len(output.prompt_token_ids)
            live.first_token = now
            self.ttft.observe(now - live.arrival)
        elif live.last_token is not None:
            self.itl.observe(now - live.last_token)
        live.last_token = now

    def _on_finish(self, live: _Live, output: RequestOutput, now: float) -> None:
        self.e2e.observe(now - live.arrival)
        self.prompt_length.observe(len(output.prompt_token_ids))
        self.output_length.observe(live.num_tokens)
        queued = output.metrics.queue_s
        if queued is not None:
            self.queue.observe(queued)
            self.inference.observe(now - live.arrival - queued)
        if live.first_token is not None:
            self.decode.observe(now - live.first_token)
            if queued is not None:
                self.prefill.observe(live.first_token - live.arrival - queued)
            if live.num_tokens > 1:
                self.tpot.observe((now - live.first_token) / (live.num_tokens - 1))

    # Read by Prometheus -----------------------------------------------------------------------

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric family."""
        scheduler, stats = self._scheduler, self._scheduler.stats
        gauge, counter = self._gauge, self._counter
        yield gauge("vllm:num_requests_running", "Requests in the batch.", scheduler.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", scheduler.num_waiting)
        usage = scheduler.kv_cache_usage
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", usage)
        yield counter("vllm:num_preemptions", "Preemptions.", stats.num_preemptions)
        yield counter(
            "vllm:prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            stats.prefix_queries,
        )
        yield counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits
        )
        yield counter("vllm:prompt_tokens", "Prompt tokens computed or found.", self.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", self.generation_tokens)
        success = CounterMetricFamily(
            "vllm:request_success",
            "Sequences that ended, by cause.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in self._finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success
        for histogram in (
            self.ttft, self.itl, self.tpot, self.e2e, self.queue, self.prefill, self.decode,
            self.inference, self.iteration, self.prompt_length, self.output_length, self.params_n,
            self.params_max_tokens,
        ):  # fmt: skip
            yield histogram.family(self._labels)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Settings of the KV cache.",
            labels=[*self._labels, *self._config],
        )
        info.add_metric([*self._labels.values(), *self._config.values()], 1.0)
        yield info
        yield from self._ours(scheduler, stats)

    def _ours(self, scheduler: SchedulerView, stats: SchedulerStats) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        config = scheduler.config
        yield gauge(
            "tidegate:kv_blocks",
            "KV blocks of the pool, the null block included.",
            config.num_blocks,
        )
        yield gauge(
            "tidegate:watermark_blocks", "Blocks kept free when admitting.", config.watermark_blocks
        )
        yield counter(
            "tidegate:recomputed_tokens",
            "Tokens computed again after preemptions.",
            stats.num_recomputed_tokens,
        )
        yield counter(
            "tidegate:lost_tokens", "Tokens whose KV preemptions gave up.", stats.num_tokens_lost
        )
        reasons = CounterMetricFamily(
            "tidegate:preemptions", "Preemptions, by cause.", labels=[*self._labels, "reason"]
        )
        for reason, count in stats.preemptions_by_reason.items():
            reasons.add_metric([*self._labels.values(), reason], count)
        yield reasons
        yield counter("tidegate:steps", "Steps that ran tokens.", stats.num_steps)
        yield counter(
            "tidegate:scheduled_tokens", "Tokens that steps ran.", stats.num_scheduled_tokens
        )
        yield counter(
            "tidegate:discarded_tokens",
            "Tokens sampled for requests that had ended.",
            stats.num_discarded_tokens,
        )
        yield counter(
            "tidegate:refused_requests",
            "Requests refused because the queue was full.",
            stats.num_refused,
        )
        yield counter(
            "tidegate:pool_too_small",
            "Requests that ended because the pool cannot hold them.",
            stats.num_pool_too_small,
        )
        yield counter(
            "tidegate:watchdog_violations",
            "Calls in which work waited and nothing moved.",
            stats.num_watchdog_violations,
        )

    def _gauge(self, name: str, documentation: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), float(value))
        return family

    def _counter(self, name: str, documentation: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), float(value))
        return family
