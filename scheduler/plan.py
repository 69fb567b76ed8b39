"""One step's plan while it is being made."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from scheduler.kv_cache import NO_NEW_BLOCKS, NewBlocks
from scheduler.output import KVLoad, Preemption
from scheduler.request import Request

_NO_SLOTS = np.zeros(0, np.intp)
_NO_COUNTS = np.zeros(0, np.int32)


@dataclasses.dataclass(slots=True)
class StepPlan:
    """Rows granted so far in this call of `Scheduler.schedule`.

    Attributes:
      budget: tokens that may still be granted.
      slots, start, num_tokens: rows of requests that ran before this step, in running order.
      num_decodes: how many of them, at the front, are decodes.
      joined_slots, joined_start, joined_tokens: rows admitted in this step.
      new_blocks: blocks appended to rows that ran before this step.
      preemptions, ended, kv_loads: as in `SchedulerOutput`.
    """

    budget: int
    slots: NDArray[np.intp] = dataclasses.field(default_factory=lambda: _NO_SLOTS)
    start: NDArray[np.int32] = dataclasses.field(default_factory=lambda: _NO_COUNTS)
    num_tokens: NDArray[np.int32] = dataclasses.field(default_factory=lambda: _NO_COUNTS)
    num_decodes: int = 0
    joined_slots: list[int] = dataclasses.field(default_factory=list)
    joined_start: list[int] = dataclasses.field(default_factory=list)
    joined_tokens: list[int] = dataclasses.field(default_factory=list)
    new_blocks: NewBlocks = NO_NEW_BLOCKS
    preemptions: list[Preemption] = dataclasses.field(default_factory=list)
    ended: list[Request] = dataclasses.field(default_factory=list)
    kv_loads: list[KVLoad] = dataclasses.field(default_factory=list)

    def merge(self) -> None:
        """Appends the rows admitted in this step to `slots`, `start` and `num_tokens`."""
        if self.joined_slots:
            self.slots = np.concatenate([self.slots, np.array(self.joined_slots, np.intp)])
            self.start = np.concatenate([self.start, np.array(self.joined_start, np.int32)])
            counts = np.array(self.joined_tokens, np.int32)
            self.num_tokens = np.concatenate([self.num_tokens, counts])


__all__ = ["StepPlan"]
