"""Counters of a scheduler, for metrics."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Totals since the start; every counter only grows.

    Attributes:
      num_steps: schedule calls that scheduled something.
      num_scheduled_tokens: tokens that steps ran.
      num_generated_tokens: tokens that `update` delivered.
      num_admitted, num_resumed: fresh and preempted requests that joined the batch.
      num_finished: requests that ended, by whatever cause.
      num_preemptions: preemptions for all reasons.
      preemptions_by_reason: the same by `Preemption.reason`.
      num_tokens_lost: tokens whose KV was given up by preemptions.
      num_recomputed_tokens: tokens computed again after a preemption; less than were lost where
        the prefix cache still had them.
      num_pool_too_small: requests ended because the pool cannot hold them even alone.
      num_refused: requests refused by `add` because the queue was full.
      num_discarded_tokens: sampled tokens that nobody wanted any more (the request had ended).
      prefix_queries, prefix_hits: tokens looked up, and found, at first admissions.
      resumed_prefix_queries, resumed_prefix_hits: the same at resumptions.
      num_prefix_requests: admissions that looked into the prefix cache.
      num_watchdog_violations: calls in which work waited, nothing ran, the whole pool was free
        and yet nothing happened. Always 0 unless the scheduler has a fault.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_generated_tokens: int = 0
    num_admitted: int = 0
    num_resumed: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    preemptions_by_reason: dict[str, int] = dataclasses.field(
        default_factory=lambda: {"growth": 0, "self": 0, "reset": 0}
    )
    num_tokens_lost: int = 0
    num_recomputed_tokens: int = 0
    num_pool_too_small: int = 0
    num_refused: int = 0
    num_discarded_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_prefix_queries: int = 0
    resumed_prefix_hits: int = 0
    num_prefix_requests: int = 0
    num_watchdog_violations: int = 0


__all__ = ["SchedulerStats"]
