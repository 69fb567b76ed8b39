"""A request as the scheduler sees it."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray


class RequestStatus(enum.IntEnum):
    """Where a request stands. Values from FINISHED_STOPPED on are final."""

    WAITING = 0
    WAITING_FOR_KV = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """The OpenAI finish reason, None while unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One sequence to generate. The caller fills the first group; the scheduler owns the rest.

    Attributes:
      request_id: unique among unfinished requests.
      prompt_token_ids: int32 [prompt_len].
      max_tokens: most tokens to generate (at least 1).
      stop_token_ids: ids that end the request (the model's EOS ids are among them unless the
        caller ignores EOS); the stopping token is kept in the output.
      ignore_eos: max_tokens is a promise, so a request that cannot reach it is refused at `add`.
      priority: lower runs first under the priority policy.
      arrival_time: seconds on the scheduler's clock; None is set by `add`.
      cache_salt: separates otherwise equal prefixes in the prefix cache.
      request_class: label under which the `auto` watermark learns output lengths.
      skip_prefix_cache_read: the whole prompt is computed (prompt log-probabilities asked for).

      status, slot: slot is -1 unless running.
      output_token_ids: what was generated so far, in order; grows in `Scheduler.update`.
      stop_reason: the stop token id that ended it, else None.
      num_cached_tokens: prompt tokens found in the prefix cache at first admission.
      num_preemptions, num_recomputed_tokens: how often, and what that cost.
      warning: a sentence for the user (for example: the pool was too small), or None.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    arrival_time: float | None = None
    cache_salt: str | None = None
    request_class: str = ""
    skip_prefix_cache_read: bool = False

    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    first_scheduled_time: float | None = None
    warning: str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)
