"""A slow check that all of a scheduler's state agrees."""

from __future__ import annotations

import numpy as np

from scheduler.request import RequestStatus
from scheduler.state import SchedulerState


def check_integrity(state: SchedulerState) -> None:
    """Raises AssertionError, naming what is wrong, unless all state agrees."""
    state.pool.check_integrity()
    references = _check_running(state)
    for held in (*state.loading.values(), *state.loaded.values()):
        np.add.at(references, held.blocks, 1)
        assert (held.blocks > 0).all(), "a loading request holds the null block"
    assert (references == state.pool.ref_counts).all(), "reference counts are wrong"
    _check_waiting(state)


def _check_running(state: SchedulerState) -> np.ndarray:
    """Checks slots and their blocks; returns how often running requests use each block."""
    slots, running = state.slots, set(state.running.tolist())
    block_size = state.config.block_size
    assert len(running) == state.num_running, "a slot runs twice"
    assert running == set(np.flatnonzero(state.is_running).tolist()), "is_running is out of step"
    occupied = {slot for slot, request in enumerate(slots.requests) if request is not None}
    assert occupied == running, "slots and running requests differ"
    assert slots.num_free + len(occupied) == state.config.max_num_seqs, "a slot leaked"
    references = np.zeros_like(state.pool.ref_counts)
    for slot in occupied:
        request = slots.request_at(slot)
        name = f"request {request.request_id!r}"
        assert request.status == RequestStatus.RUNNING, f"{name} has a slot but does not run"
        assert request.slot == slot, f"{name} does not know its slot"
        assert state.requests[request.request_id] is request, f"{name} is not listed"
        held = int(state.num_blocks_held[slot])
        blocks = state.block_table[slot]
        assert (blocks[:held] > 0).all(), f"{name} holds the null block"
        assert not blocks[held:].any(), f"{name} has blocks beyond those it holds"
        assert len(np.unique(blocks[:held])) == held, f"{name} holds a block twice"
        computed, known = int(slots.num_computed[slot]), int(slots.num_tokens[slot])
        expected = int(slots.num_expected[slot])
        assert 0 < known <= expected <= int(slots.max_total[slot]), f"{name}: bad lengths"
        assert 0 < computed <= expected, f"{name}: computed {computed} of {expected}"
        assert state.kv.blocks_for(computed) <= held, f"{name}: KV outside its blocks"
        hashed = int(state.kv.num_hashed[slot])
        assert hashed * block_size <= min(computed, known), f"{name}: unknown tokens are cached"
        np.add.at(references, blocks[:held], 1)
    idle = np.setdiff1d(np.arange(state.config.max_num_seqs), state.running)
    assert not state.num_blocks_held[idle].any(), "an idle slot holds blocks"
    assert not state.block_table[idle].any(), "an idle slot has a block table"
    return references


def _check_waiting(state: SchedulerState) -> None:
    waiting = list(state.waiting)
    assert len(waiting) == len(state.waiting), "the queue has lost count"
    stale: dict[str, int] = {}
    for request in state.stale.values():
        stale[request.request_id] = stale.get(request.request_id, 0) + 1
    for request in waiting:
        name = f"request {request.request_id!r}"
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), name
        assert request.slot == -1, f"{name} waits but has a slot"
        assert request.num_stale_samples >= 0, f"{name}: negative count of late tokens"
        listed = stale.get(request.request_id, 0)
        assert listed == bool(request.num_stale_samples), f"{name}: late tokens are out of step"
        assert state.requests[request.request_id] is request, f"{name} is not listed"
    holding = [*state.loading.values(), *state.loaded.values()]
    alive = sum(not held.request.status.finished for held in holding)
    total = len(waiting) + state.num_running + alive
    assert total == len(state.requests), "a request is nowhere"
    assert len(state.in_flight) == 0 or list(state.in_flight) == sorted(state.in_flight)


__all__ = ["check_integrity"]
