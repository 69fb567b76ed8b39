"""What a step's sampled tokens do to the requests: append, end, cache."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from scheduler.output import SchedulerOutput, StepResult
from scheduler.request import Request
from scheduler.state import SchedulerState


def apply_tokens(
    state: SchedulerState, output: SchedulerOutput, tokens: NDArray[np.int32]
) -> StepResult:
    """Takes int32 [n] tokens of a step, one for each row."""
    slots_of = output.slots.astype(np.intp)
    current = state.slots.epochs[slots_of] == output.epochs
    all_current = np.count_nonzero(current) == len(current)
    ends = output.start + output.num_tokens
    if all_current and output.num_decodes == len(current):
        rows, slots, sampled = state.all_rows[: len(current)], slots_of, tokens
    else:
        (rows,) = (current & output.samples).nonzero()
        slots, sampled, ends = slots_of[rows], tokens[rows], ends[rows]
    arrays = state.slots
    lengths = arrays.num_tokens[slots]
    arrays.token_ids[slots, lengths] = sampled
    lengths += 1
    arrays.num_tokens[slots] = lengths
    ended = lengths >= arrays.max_total[slots]
    for stop_ids in arrays.stop_ids:
        ended |= stop_ids[slots] == sampled
    requests = arrays.requests[slots]
    if state.kv.enable_prefix_caching:
        # All their tokens are known now, and the step wrote their KV.
        (full,) = (ends // state.config.block_size > state.kv.num_hashed[slots]).nonzero()
        if len(full):
            state.kv.cache_decoded(requests[full].tolist(), slots[full], arrays.token_ids)
    finished = _end(state, requests, sampled, ended) if np.count_nonzero(ended) else []
    state.stats.num_generated_tokens += len(rows)
    result = StepResult(requests, sampled, rows.astype(np.int32, copy=False), finished)
    if all_current:
        return result
    return _add_stale(state, output, tokens[:, None], current, result)


def apply_many_tokens(
    state: SchedulerState, output: SchedulerOutput, tokens: NDArray[np.int32]
) -> StepResult:
    """Takes int32 [n, num_steps] tokens of decode steps that ran in a row.

    What follows a stop token is dropped. Length limits lie beyond: such steps are not planned.
    """
    slots_of = output.slots.astype(np.intp)
    current = state.slots.epochs[slots_of] == output.epochs
    (rows,) = current.nonzero()
    slots, sampled = slots_of[rows], tokens[rows]
    arrays, num_steps = state.slots, tokens.shape[1]
    lengths = arrays.num_tokens[slots]
    arrays.token_ids[slots[:, None], lengths[:, None] + np.arange(num_steps)] = sampled
    stops = np.zeros(sampled.shape, np.bool_)
    for stop_ids in arrays.stop_ids:
        stops |= stop_ids[slots][:, None] == sampled
    stopped = stops.any(axis=1)
    kept = np.where(stopped, stops.argmax(axis=1) + 1, num_steps).astype(np.int32)
    lengths += kept
    arrays.num_tokens[slots] = lengths
    requests = arrays.requests[slots]
    if state.kv.enable_prefix_caching:
        ends = np.minimum(output.start[rows] + num_steps, lengths)
        (full,) = (ends // state.config.block_size > state.kv.num_hashed[slots]).nonzero()
        for i in full.tolist():
            tokens_of = arrays.token_ids[slots[i]]
            state.kv.cache_blocks(
                int(slots[i]), cast(Request, requests[i]), tokens_of, int(ends[i])
            )
    last = sampled[np.arange(len(rows)), kept - 1]
    finished = _end(state, requests, last, stopped | (lengths >= arrays.max_total[slots]))
    state.stats.num_generated_tokens += int(kept.sum())
    state.stats.num_discarded_tokens += sampled.size - int(kept.sum())
    result = StepResult(
        np.repeat(requests, kept),
        sampled[np.arange(num_steps) < kept[:, None]],
        np.repeat(rows, kept).astype(np.int32),
        finished,
    )
    if len(rows) == len(current):
        return result
    return _add_stale(state, output, tokens, current, result)


def _end(
    state: SchedulerState,
    requests: NDArray[np.object_],
    tokens: NDArray[np.int32],
    ended: NDArray[np.bool_],
) -> list[Request]:
    """Ends the marked ones of running requests, whose last tokens are given."""
    finished = []
    for i in np.flatnonzero(ended).tolist():
        request = cast(Request, requests[i])
        state.vacate(request.slot)
        state.end_on_token(request, int(tokens[i]))
        finished.append(request)
    if finished:
        state.compress_running()
    return finished


def _add_stale(
    state: SchedulerState,
    output: SchedulerOutput,
    tokens: NDArray[np.int32],
    current: NDArray[np.bool_],
    result: StepResult,
) -> StepResult:
    """Adds int32 [n, num_steps] tokens of requests preempted while the step was in flight.

    They are delivered once, late, to the waiting request. Rows of requests that have ended, or
    whose tokens a forced reset gave up, are dropped.
    """
    late: list[tuple[int, Request, int]] = []
    for row in np.flatnonzero(output.samples & ~current).tolist():
        key = (int(output.slots[row]), int(output.epochs[row]))
        for token in tokens[row].tolist():
            request = state.stale.get(key)
            if request is None or request.status.finished:
                state.stats.num_discarded_tokens += 1
                continue
            late.append((row, request, token))
            request.num_stale_samples -= 1
            if not request.num_stale_samples:
                del state.stale[key]
            assert request.saved_tokens is not None
            request.saved_tokens = np.append(request.saved_tokens, np.int32(token))
            state.stats.num_generated_tokens += 1
            limit = min(request.prompt_len + request.max_tokens, state.config.max_model_len)
            if token in request.stop_token_ids or request.num_tokens >= limit:
                state.stale.pop(key, None)
                state.waiting.discard(request.status)
                state.end_on_token(request, token)
                result.finished.append(request)
    if not late:
        return result
    late_requests = np.empty(len(late), object)
    late_requests[:] = [request for _, request, _ in late]
    rows = np.concatenate([result.rows, np.array([row for row, _, _ in late], np.int32)])
    order = np.argsort(rows, kind="stable")
    return StepResult(
        np.concatenate([result.requests, late_requests])[order],
        np.concatenate([result.tokens, np.array([token for *_, token in late], np.int32)])[order],
        rows[order],
        result.finished,
    )


__all__ = ["apply_many_tokens", "apply_tokens"]
