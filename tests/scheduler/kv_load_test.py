"""Requests that wait for KV from elsewhere, holding blocks, and whom they must not wedge."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler import RequestStatus


@pytest.fixture
def with_loader(make_driver, make_loader):
    def make(names, fraction=1.0, **config):
        driver = make_driver(**config)
        return driver, make_loader(driver, set(names), fraction)

    return make


def test_a_load_holds_blocks_and_then_runs_what_is_left(with_loader, counted):
    driver, loader = with_loader("a")
    scheduler = driver.scheduler
    a = driver.add("a", 18, max_tokens=4)
    output = driver.schedule()
    (load,) = output.kv_loads
    assert (load.request, load.start, load.num_tokens) == (a, 0, 17)
    assert len(load.block_ids) == 5
    assert not len(output.slots)
    assert a.status == RequestStatus.WAITING_FOR_KV
    assert scheduler.pool.num_free == 64 - 5
    assert scheduler.num_waiting == 1
    scheduler.check_integrity()
    assert not driver.schedule().kv_loads
    assert scheduler.stats.num_watchdog_violations == 0
    loader.finish(load)
    output = driver.step()
    assert (output.start.tolist(), output.num_tokens.tolist()) == ([17], [1])
    assert a.status == RequestStatus.RUNNING
    driver.drain()
    counted(a)
    assert scheduler.stats.num_scheduled_tokens == 1 + 3


def test_what_was_not_loaded_is_computed(with_loader, counted):
    for loaded in (0, 7):
        driver, loader = with_loader("a")
        a = driver.add("a", 18, max_tokens=4)
        (load,) = driver.schedule().kv_loads
        loader.finish(load, loaded)
        output = driver.step()
        assert output.start.tolist() == [loaded]
        driver.drain()
        counted(a)


def test_a_loading_request_is_skipped_and_keeps_its_place(with_loader):
    driver, loader = with_loader("b", max_num_seqs=2)
    for name in "abcd":
        driver.add(name, 8, max_tokens=6)
    scheduler = driver.scheduler
    output = driver.step()
    (load,) = output.kv_loads
    running = [scheduler.slot_requests[s].request_id for s in output.slots]
    assert running == ["a", "c"], "the one behind it is not held up"
    loader.finish(load)
    while scheduler.num_running == 2:
        driver.step()
    driver.step()
    assert scheduler.get_request("b").status == RequestStatus.RUNNING
    assert scheduler.get_request("b").slot == 0
    driver.drain()


def test_a_loaded_request_is_not_stranded_behind_a_head_that_does_not_fit(with_loader):
    driver, loader = with_loader(["loaded"], num_blocks=21)
    driver.add("running", 36, max_tokens=12)
    driver.add("loaded", 16, max_tokens=4)
    (load,) = driver.step().kv_loads
    head = driver.add("large", 60, max_tokens=4)
    driver.step()
    assert head.status == RequestStatus.WAITING
    loader.finish(load)
    driver.step()
    assert load.request.status == RequestStatus.RUNNING
    driver.drain()


def test_blocks_owed_to_running_prefills_are_reserved(with_loader):
    driver, _ = with_loader(
        ["load"],
        num_blocks=21,
        max_num_batched_tokens=8,
        reserve_full_sequence=False,
    )
    scheduler = driver.scheduler
    driver.add("prefill", 60, max_tokens=4)
    driver.step()
    assert scheduler.reserved_blocks == 13
    load = driver.add("load", 24, max_tokens=2)
    driver.schedule()
    assert scheduler.pool.num_free >= 6
    assert load.status == RequestStatus.WAITING, "6 blocks are free, but owed"


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("fraction", [0.3, 0.7, 1.0])
def test_two_loads_that_fit_alone_but_not_together_never_deadlock(
    with_loader, counted, reserve, fraction
):
    rng = np.random.default_rng(5)
    for _ in range(20):
        driver, loader = with_loader(
            ["load1", "load2"],
            fraction,
            num_blocks=21,
            max_num_batched_tokens=int(rng.choice([8, 16, 64])),
            reserve_full_sequence=reserve,
            watermark=float(rng.choice([0.0, 0.1, 0.5])),
        )
        scheduler = driver.scheduler
        names = ["load1", "load2", "prefill1", "prefill2", "prefill3"]
        requests = []
        for name in rng.permutation(names):
            low = 44 if name.startswith("load") else 10
            requests.append(driver.add(str(name), int(rng.integers(low, 60)), max_tokens=12))
        loads: list = []
        for _ in range(400):
            output = driver.step()
            loads += output.kv_loads
            scheduler.check_integrity()
            if loads and rng.random() < 0.2:
                loader.finish(loads.pop(int(rng.integers(len(loads)))))
                scheduler.check_integrity()
            if not scheduler.has_unfinished():
                break
        assert not scheduler.has_unfinished(), "deadlock"
        assert scheduler.stats.num_watchdog_violations == 0
        for request in requests:
            counted(request)
            assert request.num_output_tokens == 12


def test_abort_during_a_load_frees_its_blocks_only_when_the_load_ends(with_loader):
    driver, loader = with_loader("a")
    scheduler = driver.scheduler
    driver.add("a", 18, max_tokens=4)
    (load,) = driver.schedule().kv_loads
    assert scheduler.abort("a")
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()
    assert scheduler.pool.num_free == 64 - 5, "the loader still writes there"
    assert not scheduler.reset_prefix_cache(force=True)
    assert driver.schedule().finished_request_ids == ("a",)
    loader.finish(load)
    driver.check_idle()
    with pytest.raises(ValueError, match="waits for no KV load"):
        scheduler.finish_kv_load("a", 3)


def test_abort_after_a_load_frees_its_blocks(with_loader):
    driver, loader = with_loader("a", max_num_seqs=1)
    driver.add("a", 18, max_tokens=4)
    (load,) = driver.schedule().kv_loads
    loader.finish(load)
    driver.scheduler.check_integrity()
    driver.scheduler.abort("a")
    driver.schedule()
    driver.check_idle()


def test_more_tokens_than_asked_for_are_refused(with_loader):
    driver, _ = with_loader("a")
    driver.add("a", 18, max_tokens=4)
    driver.schedule()
    with pytest.raises(ValueError, match=r"num_tokens=18 .* \[0, 17\]"):
        driver.scheduler.finish_kv_load("a", 18)
    driver.scheduler.finish_kv_load("a", 0)


def test_loads_start_after_cached_blocks_and_are_cached_themselves(with_loader, counted):
    driver, loader = with_loader(["b"], enable_prefix_caching=True)
    prompt = np.arange(30)
    driver.add("a", prompt=prompt[:9], max_tokens=1)
    driver.drain()
    b = driver.add("b", prompt=prompt, max_tokens=3)
    (load,) = driver.schedule().kv_loads
    assert (load.start, load.num_tokens) == (8, 21)
    assert b.num_cached_tokens == 8
    loader.finish(load)
    driver.drain()
    counted(b)
    c = driver.add("c", prompt=prompt, max_tokens=3)
    driver.drain()
    assert c.num_cached_tokens == 28
    counted(c)


def test_forced_reset_sends_loaded_requests_back_to_their_place(with_loader, counted):
    driver, loader = with_loader("ab", max_num_seqs=1, max_num_batched_tokens=8)
    requests = [driver.add(name, 12, max_tokens=3) for name in "abc"]
    loads = driver.schedule().kv_loads
    assert [load.request.request_id for load in loads] == ["a", "b"]
    for load in reversed(loads):
        loader.finish(load)
    assert driver.scheduler.reset_prefix_cache(force=True)
    driver.scheduler.check_integrity()
    order = [r.request_id for r in driver.scheduler.waiting_requests]
    assert order == ["c", "a", "b"], "what has run comes first, then the queue as it was"
    loader.names = set()
    driver.drain()
    for request in requests:
        counted(request)
