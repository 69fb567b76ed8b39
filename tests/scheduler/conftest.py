"""A fake device and helpers that drive the scheduler without a model."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from scheduler import Request, Scheduler, SchedulerConfig


class CountingModel:
    """A device in which every request counts upward: the next token is the last one plus 1.

    It keeps its own block table and last tokens from the changes that the scheduler announces,
    writes each token into the KV cache, and then reads every row's whole context back through
    its table. A block shared, reused or announced wrongly makes a row read another's tokens.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        config = scheduler.config
        self.block_size = config.block_size
        self.kv = np.full((config.num_blocks, config.block_size), -1, np.int64)
        self.table = np.zeros_like(scheduler.block_table)
        self.last_token = np.full(config.max_num_seqs, -1, np.int64)
        self.history: dict[str, list[int]] = {}
        self.reported: set[str] = set()

    def run(self, output) -> np.ndarray:
        """Runs a step at once, in dispatch order; call it right after `schedule`."""
        scheduler = self.scheduler
        for request_id in output.finished_request_ids:
            assert request_id not in self.reported, "an id was reported twice"
            self.reported.add(request_id)
        self.table[output.released] = 0
        self.last_token[output.released] = -1
        for slot in output.joined.tolist():
            self.table[slot] = scheduler.block_table[slot]
            request = scheduler.slot_requests[slot]
            self.history[request.request_id] = request.all_token_ids.tolist()
        self.table[output.new_block_slots, output.new_block_index] = output.new_block_ids
        assert (self.table == scheduler.block_table).all(), "the announced changes are incomplete"
        assert output.total_num_tokens <= scheduler.config.max_num_batched_tokens
        assert len(np.unique(output.slots)) == len(output.slots)
        steps = [self._run_rows(output, 0)]
        for step in range(1, output.num_steps):
            assert output.num_decodes == len(output.slots)
            steps.append(self._run_rows(output, step))
        return steps[0] if output.num_steps == 1 else np.stack(steps, axis=1)

    def _run_rows(self, output, step: int) -> np.ndarray:
        scheduler = self.scheduler
        starts = (output.start + step).tolist()
        rows = list(zip(output.slots.tolist(), starts, output.num_tokens.tolist()))
        for row, (slot, start, count) in enumerate(rows):
            if row < output.num_decodes:
                assert count == 1, "a decode runs one token"
                assert self.last_token[slot] >= 0, "a decode without a sampled token"
                tokens = [self.last_token[slot]]
            else:
                tokens = scheduler.token_ids[slot, start : start + count]
            positions = np.arange(start, start + count)
            blocks = self.table[slot, positions // self.block_size]
            assert (blocks > 0).all(), "a token has no block"
            self.kv[blocks, positions % self.block_size] = tokens
        sampled = np.full(len(rows), -7, np.int32)
        for row, (slot, start, count) in enumerate(rows):
            request = scheduler.slot_requests[slot]
            history = self.history[request.request_id]
            positions = np.arange(start + count)
            blocks = self.table[slot, positions // self.block_size]
            read = self.kv[blocks, positions % self.block_size]
            assert read.tolist() == history[: start + count], "a row read foreign KV"
            assert output.samples[row] == (start + count == len(history))
            if output.samples[row]:
                sampled[row] = self.last_token[slot] = history[-1] + 1
                history.append(history[-1] + 1)
        return sampled


class Driver:
    """Scheduler, fake device and the steps in flight between them."""

    def __init__(self, **config) -> None:
        defaults = {
            "num_blocks": 65,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "max_model_len": 128,
        }
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | config)))
        self.model = CountingModel(self.scheduler)
        self.pending: deque = deque()
        self.results: list = []
        self.ended: list[Request] = []

    def request(self, name: str, prompt_len: int = 8, max_tokens: int = 8, **kwargs) -> Request:
        """A request counting from its own base; add it with `add`."""
        base = 1000 * (1 + len(self.scheduler.requests) + len(self.model.history))
        prompt = kwargs.pop("prompt", base + np.arange(prompt_len))
        return Request(name, np.asarray(prompt, np.int32), max_tokens, **kwargs)

    def add(self, name: str, prompt_len: int = 8, max_tokens: int = 8, **kwargs) -> Request:
        request = self.request(name, prompt_len, max_tokens, **kwargs)
        self.scheduler.add(request)
        return request

    def schedule(self, **kwargs):
        """Plans and dispatches one step; its tokens stay in flight until `update`."""
        output = self.scheduler.schedule(**kwargs)
        tokens = self.model.run(output)
        self.ended += output.ended_requests
        if len(output.slots):
            self.pending.append((output, tokens))
        return output

    def update(self):
        """Reads the oldest step in flight."""
        output, tokens = self.pending.popleft()
        result = self.scheduler.update(output, tokens)
        self.results.append(result)
        self.ended += result.finished
        return result

    def step(self):
        """One step; reads what lies further back than the configured overlap."""
        output = self.schedule()
        depth = self.scheduler.config.overlap_depth if len(output.slots) else 0
        while len(self.pending) > depth:
            self.update()
        return output

    def drain(self, limit: int = 2000) -> int:
        """Steps until nothing is left; returns the number of steps."""
        for count in range(limit):
            if not self.scheduler.has_unfinished():
                while self.pending:
                    self.update()
                self.schedule()
                self.check_idle()
                return count
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError(f"unfinished after {limit} steps")

    def check_idle(self) -> None:
        """Nothing is left: all blocks free, all counts zero."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished()
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
        assert scheduler.pool.num_free == scheduler.pool.num_usable
        assert not scheduler.pool.ref_counts.any()
        assert scheduler.kv_cache_usage == 0.0


def rows(output) -> dict:
    """Request-independent view of a plan: slot -> tokens, in row order."""
    return dict(zip(output.slots.tolist(), output.num_tokens.tolist()))


def assert_counted(request: Request) -> None:
    """The output continues the prompt by counting, without a gap or repetition."""
    first = int(request.prompt_token_ids[-1]) + 1
    count = request.num_output_tokens
    assert request.output_token_ids == list(range(first, first + count))


@pytest.fixture
def make_driver():
    return Driver


@pytest.fixture
def counted():
    return assert_counted


@pytest.fixture
def planned():
    return rows
