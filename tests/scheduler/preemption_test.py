"""Preemption: who gives way, what is kept, in which order they come back."""

from __future__ import annotations

import logging

import pytest

from scheduler import RequestStatus


def _pressed(make_driver, **config):
    """Three requests of which the pool can let two grow; returns driver and requests."""
    driver = make_driver(num_blocks=13, max_model_len=64, **config)
    requests = [driver.add(name, 15, max_tokens=20) for name in "abc"]
    driver.step()
    assert driver.scheduler.num_running == 3
    return driver, requests


def test_the_most_recently_admitted_request_gives_way(make_driver):
    driver, (a, b, c) = _pressed(make_driver)
    driver.step()
    output = driver.step()
    assert [p.request for p in output.preemptions] == [c]
    (preemption,) = output.preemptions
    assert preemption.cause == "a"
    assert preemption.reason == "growth"
    assert preemption.num_blocks_freed == 4
    assert preemption.num_tokens_to_recompute == 16
    assert c.status == RequestStatus.PREEMPTED
    assert c.num_preemptions == 1
    assert c.slot == -1
    assert c.num_output_tokens == 2, "what it generated is kept"
    assert b.status == a.status == RequestStatus.RUNNING
    assert output.released.tolist() == [2]


def test_a_step_that_preempted_admits_nobody(make_driver):
    driver, _ = _pressed(make_driver)
    driver.step()
    tiny = driver.add("tiny", 1, max_tokens=1)
    output = driver.step()
    assert output.preemptions
    assert driver.scheduler.pool.num_free >= 1
    assert tiny.status == RequestStatus.WAITING
    assert not len(output.joined)


def test_the_tail_preempts_itself(make_driver):
    driver = make_driver(num_blocks=7, max_model_len=64)
    driver.add("a", 10, max_tokens=30)
    tail = driver.add("b", 11, max_tokens=30)
    output = driver.step()
    while not output.preemptions:
        output = driver.step()
    (preemption,) = output.preemptions
    assert (preemption.request, preemption.cause, preemption.reason) == (tail, "b", "self")
    assert output.slots.tolist() == [0]


def test_victims_come_back_in_order_of_arrival(make_driver):
    driver = make_driver(num_blocks=17, max_model_len=64, max_num_batched_tokens=64)
    # The first takes a long time to grow, in large steps, so that several must go at once.
    for name in "bcde":
        driver.add(name, 15, max_tokens=20)
    driver.step()
    driver.scheduler.abort("b")
    driver.step()
    scheduler = driver.scheduler
    while scheduler.stats.num_preemptions < 2:
        driver.step()
        scheduler.check_integrity()
    names = [r.request_id for r in scheduler.waiting_requests if r.num_preemptions]
    assert names == sorted(names)


def test_several_victims_in_one_step_keep_their_order(make_driver):
    driver = make_driver(
        num_blocks=13,
        max_model_len=64,
        long_prefill_token_threshold=16,
        reserve_full_sequence=False,
    )
    driver.add("long", 44, max_tokens=4)
    for name in "bcd":
        driver.add(name, 1, max_tokens=30)
    driver.step()
    driver.step()
    output = driver.step()
    assert [p.request.request_id for p in output.preemptions] == ["d", "c"]
    assert [r.request_id for r in driver.scheduler.waiting_requests] == ["c", "d"]


def test_fresh_requests_stay_behind_preempted_ones(make_driver):
    driver, (_, _, c) = _pressed(make_driver)
    driver.step()
    driver.add("fresh", 4)
    driver.step()
    assert [r.request_id for r in driver.scheduler.waiting_requests] == ["c", "fresh"]
    assert driver.scheduler.waiting_requests[0] is c


@pytest.mark.parametrize("budget", [256, 8])
def test_resume_computes_prompt_and_output_again_then_samples_the_next(
    make_driver, counted, budget
):
    driver = make_driver(num_blocks=13, max_model_len=64, max_num_batched_tokens=budget)
    requests = [driver.add(name, 15, max_tokens=20) for name in "abc"]
    driver.drain()
    assert driver.scheduler.stats.num_preemptions >= 1
    for request in requests:
        counted(request)
        assert request.num_output_tokens == 20


def test_resumed_request_is_announced_with_all_its_tokens_and_blocks(make_driver):
    driver, (_, _, c) = _pressed(make_driver)
    while not c.num_preemptions:
        driver.step()
    known = c.num_tokens
    for name in "ab":
        driver.scheduler.abort(name)
    output = driver.step()
    assert output.joined.tolist() == [0]
    assert output.num_decodes == 0
    assert (output.start.tolist(), output.num_tokens.tolist()) == ([0], [known])
    assert output.samples.tolist() == [True]
    assert known > c.prompt_len
    assert driver.scheduler.num_blocks_held[0] == driver.scheduler.kv.blocks_for(known)


def test_recomputed_tokens_are_counted_where_they_fall(make_driver):
    driver, requests = _pressed(make_driver)
    driver.drain()
    stats = driver.scheduler.stats
    assert stats.num_preemptions == sum(r.num_preemptions for r in requests) > 0
    assert stats.num_recomputed_tokens == sum(r.num_recomputed_tokens for r in requests)
    # Without a prefix cache every token lost is computed again, and no other twice.
    assert stats.num_recomputed_tokens == stats.num_tokens_lost
    once = sum(r.num_tokens - 1 for r in requests)
    assert stats.num_scheduled_tokens == once + stats.num_recomputed_tokens


def test_prefix_cache_saves_recomputation(make_driver):
    lost = {}
    for caching in (False, True):
        driver, requests = _pressed(make_driver, enable_prefix_caching=caching)
        driver.drain()
        assert all(r.num_output_tokens == 20 for r in requests)
        stats = driver.scheduler.stats
        assert stats.num_preemptions > 0
        lost[caching] = stats.num_recomputed_tokens
        assert (stats.resumed_prefix_hits > 0) == caching
        assert stats.prefix_hits == 0, "resumptions are counted apart"
    assert lost[True] < lost[False]


def test_no_preemption_while_blocks_are_free(make_driver):
    driver = make_driver(num_blocks=200)
    for i in range(8):
        driver.add(f"r{i}", 8, max_tokens=60)
    driver.drain()
    assert driver.scheduler.stats.num_preemptions == 0


def test_abort_makes_blocks_available_to_the_next_call(make_driver):
    driver, (_, _, c) = _pressed(make_driver)
    driver.step()
    driver.scheduler.abort("a")
    output = driver.step()
    assert not output.preemptions
    assert c.status == RequestStatus.RUNNING


def test_every_preemption_frees_blocks_at_once(make_driver):
    for caching in (False, True):
        driver = make_driver(num_blocks=14, max_model_len=64, enable_prefix_caching=caching)
        prompt = list(range(8))
        for i in range(6):
            driver.add(f"r{i}", prompt=[*prompt, 1000 * i], max_tokens=25)
        while driver.scheduler.has_unfinished():
            for preemption in driver.step().preemptions:
                assert preemption.num_blocks_freed > 0
        assert driver.scheduler.stats.num_preemptions > 0


def test_preemption_is_logged_with_its_reason(make_driver, caplog):
    with caplog.at_level(logging.INFO, logger="scheduler"):
        driver, _ = _pressed(make_driver)
        driver.step()
        driver.step()
    (line,) = [r.getMessage() for r in caplog.records if "preempted" in r.getMessage()]
    assert line == (
        "preempted request_id=c reason=growth cause=a blocks_freed=4 tokens_to_recompute=16 "
        "num_preemptions=1"
    )


def test_cap_passes_over_requests_that_were_preempted_often(make_driver, counted):
    driver = make_driver(num_blocks=33, max_model_len=128, max_preemptions_per_request=1)
    requests = [driver.add(f"r{i}", 8, max_tokens=90) for i in range(6)]
    victims = []
    while driver.scheduler.has_unfinished():
        running = [driver.scheduler.slot_requests[s] for s in driver.scheduler.running]
        before = {r.request_id: r.num_preemptions for r in running}
        for preemption in driver.step().preemptions:
            request = preemption.request
            victims.append(request.request_id)
            if before[request.request_id] >= 1:
                # Beyond its cap only when all others but the oldest are at theirs too.
                others = [r for r in running[1:] if r is not request and r.slot >= 0]
                assert all(r.num_preemptions >= 1 for r in others)
        driver.scheduler.check_integrity()
    assert len(victims) > len(set(victims)) or len(victims) > 1
    for request in requests:
        counted(request)
        assert request.num_output_tokens == 90


def test_cap_bounds_how_often_the_unlucky_one_is_preempted(make_driver):
    def preemptions_of_the_lowest(cap: int | None) -> int:
        driver = make_driver(
            num_blocks=40, max_preemptions_per_request=cap, scheduling_policy="priority"
        )
        lowest = driver.add("lowest", 8, max_tokens=110, priority=9)
        for step in range(2000):
            # Bursts of better requests, each of which would drive out the lowest again.
            if step % 30 == 0 and step < 300:
                for i in range(4):
                    driver.add(f"r{step}.{i}", 8, max_tokens=24)
            before = lowest.num_preemptions
            driver.step()
            if cap is not None and lowest.num_preemptions > max(before, cap):
                running = driver.scheduler.slot_requests[driver.scheduler.running]
                assert all(r.num_preemptions >= cap for r in running[1:])
            if not driver.scheduler.has_unfinished():
                return lowest.num_preemptions
        raise AssertionError("unfinished")

    assert preemptions_of_the_lowest(None) >= 7
    assert preemptions_of_the_lowest(1) <= 2


def test_the_oldest_running_request_is_never_a_victim_of_others(make_driver):
    for cap in (None, 0, 1):
        driver = make_driver(num_blocks=13, max_model_len=64, max_preemptions_per_request=cap)
        for name in "abcd":
            driver.add(name, 8, max_tokens=30)
        while driver.scheduler.has_unfinished():
            running = driver.scheduler.running.tolist()
            first = driver.scheduler.slot_requests[running[0]] if running else None
            victims = [p.request for p in driver.step().preemptions]
            assert first not in victims


def test_goodput_returns_after_a_burst(make_driver):
    def steady(burst: bool) -> int:
        driver = make_driver(num_blocks=41, max_model_len=128)
        if burst:
            for i in range(30):
                driver.add(f"burst{i}", 8, max_tokens=60)
            driver.drain()
            assert driver.scheduler.stats.num_preemptions > 0
        for i in range(4):
            driver.add(f"steady{i}", 8, max_tokens=20)
        return driver.drain()

    assert steady(burst=True) == steady(burst=False)


def test_progress_under_the_harshest_pressure(make_driver, counted):
    driver = make_driver(num_blocks=11, block_size=4, max_model_len=64)
    requests = [driver.add(f"r{i}", 8, max_tokens=30) for i in range(8)]
    steps = driver.drain()
    for request in requests:
        counted(request)
        assert request.num_output_tokens == 30
    assert steps < 8 * 40
    assert driver.scheduler.stats.num_watchdog_violations == 0
