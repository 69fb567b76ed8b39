"""A request as the scheduler sees it."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scheduler.slots import SlotArrays


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
      stop_reason: what ended it: the stop token id, or the stop string given to
        `Scheduler.finish`; else None.
      num_cached_tokens: prompt tokens found in the prefix cache at first admission.
      num_preemptions, num_recomputed_tokens: how often, and what that cost.
      first_scheduled_time: seconds on the scheduler's clock, None before.
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
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    first_scheduled_time: float | None = None
    warning: str | None = None

    # While it runs the tokens live in its slot, so that a step appends to all rows at once;
    # `saved_tokens` (prompt and output) holds them before, between and after.
    slot_arrays: SlotArrays | None = dataclasses.field(default=None, repr=False)
    saved_tokens: NDArray[np.int32] | None = dataclasses.field(default=None, repr=False)
    # Private to the scheduler, see the modules that use them.
    queue_number: int = -1
    num_stale_samples: int = 0
    max_computed_tokens: int = 0
    block_hashes: list[bytes] = dataclasses.field(default_factory=list, repr=False)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> NDArray[np.int32]:
        """Prompt and output so far, int32 [num_tokens]; a copy."""
        if self.slot_arrays is not None:
            slots, slot = self.slot_arrays, self.slot
            return slots.token_ids[slot, : slots.num_tokens[slot]].copy()
        tokens = self.prompt_token_ids if self.saved_tokens is None else self.saved_tokens
        return np.array(tokens, np.int32)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        if self.slot_arrays is not None:
            return int(self.slot_arrays.num_tokens[self.slot])
        return self.prompt_len if self.saved_tokens is None else len(self.saved_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated so far, in order; built anew at each access."""
        return self.all_token_ids[self.prompt_len :].tolist()
