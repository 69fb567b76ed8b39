"""What the scheduler tells the engine for one step, and what it makes of the step's tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from scheduler.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Preemption:
    """One preemption, explained.

    Attributes:
      request: the victim.
      cause: id of the request whose growth needed the blocks.
      reason: "growth", "self" (the tail took its own blocks back) or "reset".
      num_blocks_freed: usable free blocks gained at once.
      num_tokens_to_recompute: tokens whose KV is lost.
    """

    request: Request
    cause: str
    reason: str
    num_blocks_freed: int
    num_tokens_to_recompute: int


@dataclasses.dataclass(frozen=True, slots=True)
class KVLoad:
    """KV of a prompt's start to be fetched into blocks while the request waits.

    Attributes:
      request: status WAITING_FOR_KV until `Scheduler.finish_kv_load`.
      start: first token whose KV is fetched (those before it were found in the prefix cache).
      num_tokens: tokens whose KV is fetched.
      block_ids: int32, all blocks of the request so far, in order, from position 0.
    """

    request: Request
    start: int
    num_tokens: int
    block_ids: NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's plan: plain arrays, a row per scheduled request. Never changed after `schedule`.

    Order: decoding rows come first, in running order; then rows that compute known tokens
    (chunks of a prompt or of a resumed sequence), in running order, admissions of this step last.
    A decoding row runs the one token that the previous step of its slot sampled, which may still
    be in flight; every other row runs tokens that `Scheduler.token_ids` holds, even if it is one.
    The engine keeps device state per slot, so it needs only what changed since the last step.

    Attributes:
      step_id: counts schedule calls from 0.
      slots: int32 [n], slot of each row.
      num_tokens: int32 [n], tokens each row runs this step (at least 1).
      start: int32 [n], position of each row's first token; the row's context after the step is
        start + num_tokens.
      samples: bool [n], whether the row ends at its last known token and so samples the next.
      epochs: int32 [n], the slots' epochs; an update for an older epoch is stale.
      num_decodes: rows 0..num_decodes-1 are decodes.
      joined: int32 [j], slots given to a fresh or resumed request in this step: the engine
        uploads tokens, sampling parameters and the block-table row anew.
      released: int32 [k], slots vacated since the last output (finished, aborted, preempted); a
        slot may be in `released` and in `joined`, in that order.
      new_block_slots, new_block_index, new_block_ids: int32 [m], block_table[slot, index] = id
        for rows that are not in `joined`.
      preemptions: who was preempted in this call.
      finished_request_ids: ids finished since the last output, each reported exactly once.
      ended_requests: requests that `schedule` itself ended in this call because the pool cannot
        hold them (status and `warning` say so); their ids are in finished_request_ids too.
      kv_loads: asynchronous loads to start; each ends with `Scheduler.finish_kv_load`.
      num_steps: decode steps to run in a row on the device; above 1 only if every row is a
        decode, and then `Scheduler.update` takes int32 [n, num_steps].
    """

    step_id: int
    slots: NDArray[np.int32]
    num_tokens: NDArray[np.int32]
    start: NDArray[np.int32]
    samples: NDArray[np.bool_]
    epochs: NDArray[np.int32]
    num_decodes: int
    joined: NDArray[np.int32]
    released: NDArray[np.int32]
    new_block_slots: NDArray[np.int32]
    new_block_index: NDArray[np.int32]
    new_block_ids: NDArray[np.int32]
    preemptions: tuple[Preemption, ...] = ()
    finished_request_ids: tuple[str, ...] = ()
    ended_requests: tuple[Request, ...] = ()
    kv_loads: tuple[KVLoad, ...] = ()
    num_steps: int = 1

    @property
    def total_num_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What `Scheduler.update` made of a step's tokens.

    A request that got several tokens (num_steps > 1) appears once for each, one after the other.

    Attributes:
      requests: object [m], requests that got a token, in row order.
      tokens: int32 [m], the token of each of them.
      rows: int32 [m], their rows in the SchedulerOutput (for log-probabilities).
      finished: those of them that ended with this token.
    """

    requests: NDArray[np.object_]
    tokens: NDArray[np.int32]
    rows: NDArray[np.int32]
    finished: list[Request]
