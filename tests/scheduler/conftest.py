"""A fake device and helpers that drive the scheduler without a model."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from scheduler import QueueFullError, Request, RequestStatus, Scheduler, SchedulerConfig


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

    def reset(self, force: bool) -> bool:
        """Resets the prefix cache; what was in flight is forgotten by the device too."""
        done = self.scheduler.reset_prefix_cache(force=force)
        if force:
            for request in self.scheduler.requests.values():
                if request.request_id in self.model.history:
                    self.model.history[request.request_id] = request.all_token_ids.tolist()
        return done

    def check_idle(self) -> None:
        """Nothing is left: all blocks free, all counts zero."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_unfinished()
        assert scheduler.num_running == scheduler.num_waiting == scheduler.num_in_flight == 0
        assert scheduler.pool.num_free == scheduler.pool.num_usable
        assert not scheduler.pool.ref_counts.any()
        assert scheduler.kv_cache_usage == 0.0


class FakeLoader:
    """Offers the first `fraction` of the prompts of requests whose names it is given."""

    def __init__(self, driver: Driver, names: set[str] | None, fraction: float = 1.0) -> None:
        self.driver = driver
        self.names = names
        self.fraction = fraction
        self.loads: list = []
        driver.scheduler.kv_loader = self

    def num_loadable_tokens(self, request, token_ids, num_cached_tokens) -> int:
        wanted = self.names is None or request.request_id in self.names
        if not wanted or request.num_preemptions:
            return 0
        return max(int(self.fraction * request.prompt_len) - num_cached_tokens, 0)

    def finish(self, load, num_tokens: int | None = None) -> None:
        """Ends a load as the device would: the KV of the tokens stands in the blocks."""
        count = load.num_tokens if num_tokens is None else num_tokens
        model = self.driver.model
        positions = np.arange(load.start, load.start + count)
        blocks = load.block_ids[positions // model.block_size]
        tokens = load.request.all_token_ids[positions]
        model.kv[blocks, positions % model.block_size] = tokens
        self.driver.scheduler.finish_kv_load(load.request.request_id, count)


class Fuzzer:
    """Random use of a scheduler, with the checks that hold whatever happens.

    `choose` draws an integer in [0, n): from hypothesis or from a random generator.
    """

    def __init__(self, choose: Callable[[int], int], **config) -> None:
        self.choose = choose
        self.driver = Driver(**config)
        self.scheduler = self.driver.scheduler
        self.loader: FakeLoader | None = None
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, int] = {}
        self.interfered: set[str] = set()
        self.num_added = 0

    def use_loader(self) -> None:
        self.loader = FakeLoader(self.driver, set(), 0.8)

    def add(self) -> None:
        """A request, sometimes of a common prefix, sometimes with a stop token."""
        config, choose = self.scheduler.config, self.choose
        name = f"r{self.num_added}"
        base = 1000 * (1 + self.num_added)
        self.num_added += 1
        capacity = self.scheduler.pool.num_usable * config.block_size
        longest = min(config.max_model_len - 1, capacity - 1)
        prompt_len = 1 + choose(min(longest, 40))
        prompt = np.full(prompt_len, base, np.int32)
        shared = min(choose(30), prompt_len - 1)
        prompt[:shared] = 10 + choose(2) + np.arange(shared)
        if choose(6) == 0 and self.requests:
            # The next turn of a conversation, or the very same prompt.
            turns = list(self.requests.values())
            known = turns[choose(len(turns))].all_token_ids
            prompt = known[: longest if choose(2) else 1 + choose(min(len(known), longest))]
        max_tokens = 1 + choose(30)
        stop_after = 1 + choose(40)
        first = int(prompt[-1]) + 1
        request = Request(
            name,
            prompt,
            max_tokens,
            stop_token_ids=(first + stop_after - 1, 5)[: 1 + choose(2)],
            priority=choose(3),
            cache_salt=[None, None, "salt"][choose(3)],
            skip_prefix_cache_read=choose(8) == 0,
        )
        if self.loader is not None and choose(3) == 0 and self.loader.names is not None:
            self.loader.names.add(name)
        try:
            self.scheduler.add(request)
        except QueueFullError:
            assert self.scheduler.waiting.num_fresh >= config.max_num_queued_reqs
            return
        self.requests[name] = request
        room = config.max_model_len - request.prompt_len
        self.expected[name] = min(max_tokens, stop_after, room)

    def schedule(self) -> None:
        output = self.driver.schedule(max_steps=1 + 3 * (self.choose(3) == 0))
        if self.loader is not None:
            self.loader.loads += output.kv_loads
        for preemption in output.preemptions:
            assert preemption.num_blocks_freed > 0
            assert preemption.request.request_id in self.requests
        if output.preemptions:
            assert not len(output.joined)

    def update(self) -> None:
        if self.driver.pending:
            self.driver.update()

    def abort(self) -> None:
        alive = list(self.scheduler.requests)
        if alive:
            name = alive[self.choose(len(alive))]
            self.interfered.add(name)
            assert self.scheduler.abort(name)
            assert not self.scheduler.abort(name)

    def stop(self) -> None:
        """Ends a running request as a stop string found by the engine does."""
        if self.scheduler.num_running:
            slot = self.scheduler.running[self.choose(self.scheduler.num_running)]
            name = self.scheduler.slot_requests[slot].request_id
            self.interfered.add(name)
            self.scheduler.finish(name, RequestStatus.FINISHED_STOPPED, "stop")

    def reset(self) -> None:
        self.driver.reset(force=self.choose(2) == 0)

    def finish_load(self) -> None:
        if self.loader is not None and self.loader.loads:
            load = self.loader.loads.pop(self.choose(len(self.loader.loads)))
            count = load.num_tokens if self.choose(4) else self.choose(load.num_tokens + 1)
            self.loader.finish(load, count)

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        stats = dataclasses.asdict(scheduler.stats)
        stats.pop("preemptions_by_reason")
        assert all(value >= 0 for value in stats.values())
        assert stats["num_watchdog_violations"] == 0
        assert scheduler.num_running <= scheduler.config.max_num_seqs

    def end(self) -> None:
        """Runs dry and checks every output."""
        self.choose = lambda n: 0 if n == 1 else 1
        for _ in range(10_000):
            if not self.scheduler.has_unfinished():
                break
            self.finish_load()
            output = self.driver.step()
            if self.loader is not None:
                self.loader.loads += output.kv_loads
        assert not self.scheduler.has_unfinished(), "work is left and nothing moves"
        while self.loader is not None and self.loader.loads:
            self.finish_load()
        while self.driver.pending:
            self.driver.update()
        self.driver.schedule()
        self.driver.check_idle()
        self.check()
        for name, request in self.requests.items():
            assert_counted(request)
            if name in self.interfered:
                assert request.num_output_tokens <= self.expected[name]
            elif request.warning is None:
                assert request.num_output_tokens == self.expected[name], name
            assert request.status.finished
        assert self.driver.model.reported == set(self.requests)


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
def make_loader():
    return FakeLoader


@pytest.fixture
def make_fuzzer():
    return Fuzzer


@pytest.fixture
def counted():
    return assert_counted


@pytest.fixture
def planned():
    return rows
