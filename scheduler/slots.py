"""Per-request state of the running batch, as arrays indexed by slot."""

from __future__ import annotations

import heapq
from typing import cast

import numpy as np
from numpy.typing import NDArray

from scheduler.config import SchedulerConfig
from scheduler.request import Request

NO_TOKEN = -1


class SlotArrays:
    """State of running requests: element `slot` of each array belongs to one request.

    A slot is a row of the batch that a request keeps from its admission to its end or preemption.
    Arrays replace an object per request, so that a decode step costs a few numpy operations
    instead of a Python loop over the batch.

    Attributes:
      token_ids: int32 [max_num_seqs, max_model_len], prompt and output so far.
      num_tokens: known tokens.
      num_expected: known tokens and those that steps in flight will sample.
      num_computed: tokens whose KV is written by the steps scheduled so far (also those in
        flight); the only progress counter.
      num_inflight: steps in flight that sample for this slot: num_expected - num_tokens.
      num_joined: known tokens at admission; rows with num_computed below it are prefilling.
      prompt_lens: prompt tokens.
      max_total: length at which the request ends: min(prompt + max_tokens, max_model_len).
      max_computed: tokens computed before the last preemption; those below are recomputed.
      stop_ids: int32 [width, max_num_seqs], stop token ids padded with NO_TOKEN; width grows to
        the most that any request has had.
      epochs: int32, occupancy counter of each slot, raised when a request leaves it.
      requests: object, the request in each slot or None.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        n = config.max_num_seqs
        # np.zeros leaves untouched pages unmapped, so a large max_model_len costs nothing yet.
        self.token_ids: NDArray[np.int32] = np.zeros((n, config.max_model_len), np.int32)
        self.num_tokens: NDArray[np.int32] = np.zeros(n, np.int32)
        self.num_expected: NDArray[np.int32] = np.zeros(n, np.int32)
        self.num_computed: NDArray[np.int32] = np.zeros(n, np.int32)
        self.num_joined: NDArray[np.int32] = np.zeros(n, np.int32)
        self.prompt_lens: NDArray[np.int32] = np.zeros(n, np.int32)
        self.max_total: NDArray[np.int32] = np.zeros(n, np.int32)
        self.max_computed: NDArray[np.int32] = np.zeros(n, np.int32)
        self.epochs: NDArray[np.int32] = np.zeros(n, np.int32)
        self.stop_ids: NDArray[np.int32] = np.full((1, n), NO_TOKEN, np.int32)
        self.requests: NDArray[np.object_] = np.full(n, None, object)
        self._max_model_len = config.max_model_len
        self._free = list(range(n))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def request_at(self, slot: int) -> Request:
        """The request in an occupied slot."""
        return cast(Request, self.requests[slot])

    def join(self, request: Request, num_computed: int) -> int:
        """Puts a waiting request into the lowest free slot and returns the slot."""
        slot = heapq.heappop(self._free)
        tokens = request.prompt_token_ids if request.saved_tokens is None else request.saved_tokens
        n = len(tokens)
        self.token_ids[slot, :n] = tokens
        self.num_tokens[slot] = self.num_expected[slot] = self.num_joined[slot] = n
        self.num_computed[slot] = num_computed
        prompt_len = len(request.prompt_token_ids)
        self.prompt_lens[slot] = prompt_len
        self.max_total[slot] = min(prompt_len + request.max_tokens, self._max_model_len)
        self.max_computed[slot] = request.max_computed_tokens
        self._set_stop_ids(slot, request.stop_token_ids)
        self.requests[slot] = request
        request.slot = slot
        request.slot_arrays = self
        request.saved_tokens = None
        return slot

    def leave(self, slot: int) -> Request:
        """Vacates `slot`, saving the tokens in the request; returns the request."""
        request = self.request_at(slot)
        request.saved_tokens = self.token_ids[slot, : self.num_tokens[slot]].copy()
        request.slot_arrays = None
        request.slot = -1
        self.requests[slot] = None
        self.epochs[slot] += 1
        heapq.heappush(self._free, slot)
        return request

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        width, num_slots = self.stop_ids.shape
        if len(ids) > width:
            wider = np.full((len(ids), num_slots), NO_TOKEN, np.int32)
            wider[:width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[:, slot] = NO_TOKEN
        if ids:
            self.stop_ids[: len(ids), slot] = ids


__all__ = ["NO_TOKEN", "SlotArrays"]
