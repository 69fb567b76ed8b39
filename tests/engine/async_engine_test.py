"""The engine's thread and its streams: order, bounds, aborts, failures, draining."""

import asyncio
import contextlib
import threading

import pytest

from engine.async_engine import AsyncEngine, EngineDeadError, EngineDrainingError, merge
from engine.metrics import EngineMetrics
from engine.sampling_params import SamplingParams
from engine.testing import FakeCore
from scheduler import QueueFullError

A = 2 + ord("a")
LONG = SamplingParams(max_tokens=300, ignore_eos=True)


@pytest.fixture
def run():
    """run(test, core): runs `await test(engine, core)` and looks for what was left behind."""

    def run(test, core=None, **options):
        core = core or FakeCore()

        async def main():
            engine = AsyncEngine(core, **options)
            engine.start()
            try:
                await asyncio.wait_for(test(engine, core), 30)
            finally:
                await engine.close()
            assert not engine._thread.is_alive()
            if engine.errored is None:
                assert engine.num_unfinished == 0
                assert not core.has_unfinished()
                core.check_integrity()
                assert core.scheduler.kv_cache_usage == 0

        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(main())

    return run


async def _read(stream):
    """All token ids of a stream."""
    ids = []
    try:
        async for output in stream:
            ids += [t for o in output.outputs for t in o.token_ids]
    finally:
        stream.close()
    return ids


async def _idle(core):
    while core.has_unfinished():
        await asyncio.sleep(0.002)


def test_streams_in_parallel(run):
    async def test(engine, core):
        async def one(i):
            params = SamplingParams(max_tokens=i + 1, ignore_eos=True)
            return await _read(await engine.add_request(f"r{i}", None, [A + i], params))

        results = await asyncio.gather(*(one(i) for i in range(20)))
        for i, ids in enumerate(results):
            assert ids == ([A + i] * (i + 1))[:3] + [0] * max(0, i - 2)

    run(test)


def test_deltas_come_one_by_one(run):
    async def test(engine, core):
        stream = await engine.add_request("r", "ab", [A, A + 1], LONG)
        texts = []
        async for output in stream:
            texts.append(output.outputs[0].text)
            assert output.request_id == "r"
            assert output.prompt == "ab"
            if len(texts) == 3:
                break
        stream.close()
        assert "".join(texts).startswith("aba"[: len("".join(texts))])
        await _idle(core)

    run(test, FakeCore(step_seconds=0.005))


def test_a_slow_reader_gets_everything_in_one_piece(run):
    async def test(engine, core):
        stream = await engine.add_request("r", None, [A], LONG)
        await _idle(core)
        output = stream.take()
        assert len(output.outputs[0].token_ids) == 300
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
        assert stream.take() is None
        stream.close()

    run(test)


def test_wake_ups_do_not_pile_up(run):
    """While the loop is busy the engine adds nothing to it but one wake-up."""

    may_go_on = threading.Event()

    def rule(*_):
        assert may_go_on.wait(10)
        return A

    async def test(engine, core):
        stream = await engine.add_request("r", None, [A], LONG)
        loop = asyncio.get_running_loop()
        calls = []
        real = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a: (calls.append(a), real(*a))[1]
        steps = core.num_steps
        may_go_on.set()
        while core.has_unfinished():  # blocks the loop on purpose
            pass
        loop.call_soon_threadsafe = real
        assert core.num_steps - steps > 50
        assert len(calls) <= 2
        assert len(engine._to_wake) <= 1
        await _read(stream)

    run(test, FakeCore(rule=rule))


def test_closing_a_stream_frees_its_blocks(run):
    async def test(engine, core):
        stream = await engine.add_request("r", None, [A] * 50, LONG)
        async for _ in stream:
            break
        assert core.scheduler.num_running == 1
        stream.close()
        stream.close()
        await _idle(core)

    run(test, FakeCore(step_seconds=0.005))


def test_cancelled_while_being_added(run):
    async def test(engine, core):
        tasks = [
            asyncio.ensure_future(engine.add_request(f"r{i}", None, [A], LONG)) for i in range(50)
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for stream in done:
            if not isinstance(stream, BaseException):
                stream.close()
        await _idle(core)

    run(test, FakeCore(step_seconds=0.01))


def test_refusals(run):
    async def test(engine, core):
        with pytest.raises(ValueError, match="empty"):
            await engine.add_request("r", None, [], LONG)
        first = await engine.add_request("r", None, [A], LONG)
        with pytest.raises(ValueError, match="'r' is in use"):
            await engine.add_request("r", None, [A], LONG)
        adding = [engine.add_request(f"o{i}", None, [A], LONG) for i in range(20)]
        others = await asyncio.gather(*adding, return_exceptions=True)
        refused = [o for o in others if isinstance(o, BaseException)]
        assert {type(o) for o in refused} == {QueueFullError}
        others = [o for o in others if o not in refused]
        assert len(others) >= 2
        for stream in (first, *others):
            stream.close()

    run(test, FakeCore(max_num_seqs=1, max_num_queued_reqs=3, step_seconds=0.01))


def test_all_of_n_or_none(run):
    async def test(engine, core):
        params = SamplingParams(n=5, max_tokens=3)
        with pytest.raises(QueueFullError):
            await engine.add_request("r", None, [A], params)
        assert core.scheduler.num_waiting == 0
        params = SamplingParams(n=2, max_tokens=3)
        assert len(await _read(await engine.add_request("r", None, [A], params))) == 6

    run(test, FakeCore(max_num_queued_reqs=3))


def test_merge(run):
    async def test(engine, core):
        wake = asyncio.Event()
        streams = [
            await engine.add_request(
                f"r{i}", None, [A + i], SamplingParams(max_tokens=2 + i, ignore_eos=True), wake=wake
            )
            for i in range(3)
        ]
        counts = {0: 0, 1: 0, 2: 0}
        async for i, output in merge(streams):
            counts[i] += len(output.outputs[0].token_ids)
        for stream in streams:
            stream.close()
        assert counts == {0: 2, 1: 3, 2: 4}

    run(test)


def test_a_failing_step_ends_every_stream(run):
    failures = []

    async def test(engine, core):
        streams = [await engine.add_request(f"r{i}", None, [A], LONG) for i in range(3)]
        core.fail = MemoryError("out of memory")
        for stream in streams:
            with pytest.raises(EngineDeadError, match="MemoryError: out of memory"):
                await _read(stream)
        with pytest.raises(EngineDeadError):
            await engine.add_request("late", None, [A], LONG)
        await asyncio.sleep(0.01)
        assert isinstance(engine.errored, MemoryError)
        assert failures == [engine.errored]
        assert engine.num_unfinished == 0

    run(test, FakeCore(step_seconds=0.01), on_error=failures.append)


def test_waiting_to_be_added_when_the_engine_fails(run):
    async def test(engine, core):
        stream = await engine.add_request("r", None, [A], LONG)
        core.fail = RuntimeError("broken")
        waiting = [engine.add_request(f"w{i}", None, [A], LONG) for i in range(5)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        for result in results:
            if not isinstance(result, BaseException):
                with pytest.raises(EngineDeadError):
                    await _read(result)
            else:
                assert isinstance(result, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await _read(stream)

    run(test, FakeCore(step_seconds=0.02))


def test_drain_lets_requests_finish(run):
    async def test(engine, core):
        stream = await engine.add_request("r", None, [A], LONG)
        reading = asyncio.ensure_future(_read(stream))
        await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(engine.drain(20))
        await asyncio.sleep(0)
        with pytest.raises(EngineDrainingError):
            await engine.add_request("late", None, [A], LONG)
        assert len(await reading) == 300
        assert await draining

    run(test, FakeCore(step_seconds=0.001))


def test_drain_ends_the_rest(run):
    async def test(engine, core):
        stream = await engine.add_request("r", None, [A], LONG)
        reading = asyncio.ensure_future(_read(stream))
        assert not await engine.drain(0.1)
        with pytest.raises(EngineDrainingError, match=r"did not finish in 0.1 s"):
            await reading

    run(test, FakeCore(step_seconds=0.01))


def test_preempted_requests_complete(run):
    async def test(engine, core):
        params = SamplingParams(max_tokens=60, ignore_eos=True)

        async def one(i):
            output_metrics = None
            stream = await engine.add_request(f"r{i}", None, [A + i] * 20, params)
            ids = []
            async for output in stream:
                ids += output.outputs[0].token_ids
                output_metrics = output.metrics
            stream.close()
            assert ids == [A + i] * 60
            return output_metrics.num_preemptions

        assert sum(await asyncio.gather(*(one(i) for i in range(8)))) > 0

    run(test, FakeCore(num_blocks=50))


def test_metrics_are_fed(run):
    core = FakeCore(step_seconds=0.001)
    metrics = EngineMetrics(core.scheduler, model_name="m", config={})

    async def test(engine, core):
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        await _read(await engine.add_request("r", None, [A, A], params))
        left = await engine.add_request("s", None, [A], LONG)
        left.close()
        await _idle(core)

    run(test, core, metrics=metrics)
    assert metrics.ttft.count >= 1
    assert metrics.e2e.count == 1
    assert metrics.prompt_tokens >= 2
    assert metrics.generation_tokens >= 5
    text = metrics.render().decode()
    assert (
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 1.0' in text
    )
