"""Steps in flight: planning on tokens that are not known yet, late and unwanted tokens."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler import RequestStatus


def _fill(driver) -> None:
    """Schedules until as many steps are in flight as may be."""
    while len(driver.pending) <= driver.scheduler.config.overlap_depth:
        if not len(driver.schedule().slots):
            return


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_exact_max_tokens_and_no_step_past_it(make_driver, counted, depth, max_tokens):
    driver = make_driver(overlap_depth=depth)
    request = driver.add("a", 6, max_tokens=max_tokens)
    driver.drain()
    counted(request)
    assert request.num_output_tokens == max_tokens
    stats = driver.scheduler.stats
    assert stats.num_scheduled_tokens == 6 + max_tokens - 1
    assert stats.num_discarded_tokens == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_in_flight_runs_again_only_within_the_overlap(make_driver, depth):
    driver = make_driver(overlap_depth=depth)
    driver.add("a", 6, max_tokens=20)
    for ahead in range(depth + 1):
        output = driver.schedule()
        assert len(output.slots) == 1
        assert output.num_decodes == (ahead > 0)
    late = driver.add("late", 5)
    output = driver.schedule()
    assert output.slots.tolist() == [late.slot], "others may run meanwhile"
    assert not len(driver.schedule().slots)
    driver.update()
    driver.update() if depth else None


def test_two_batches_in_flight_without_overlap_hold_different_requests(make_driver, counted):
    driver = make_driver(overlap_depth=0)
    a = driver.add("a", 6, max_tokens=4)
    first = driver.schedule()
    b = driver.add("b", 6, max_tokens=4)
    second = driver.schedule()
    assert (first.slots.tolist(), second.slots.tolist()) == ([a.slot], [b.slot])
    driver.update()
    third = driver.schedule()
    assert third.slots.tolist() == [a.slot]
    driver.update()
    driver.drain()
    counted(a)
    counted(b)


def test_chunks_follow_each_other_without_waiting(make_driver):
    driver = make_driver(max_num_batched_tokens=8, overlap_depth=2)
    driver.add("a", 20, max_tokens=4)
    outputs = [driver.schedule() for _ in range(3)]
    assert [o.start.tolist() for o in outputs] == [[0], [8], [16]]
    assert [o.samples.tolist() for o in outputs] == [[False], [False], [True]]


def test_a_late_stop_discards_the_extra_token(make_driver):
    driver = make_driver(overlap_depth=1)
    request = driver.add("a", prompt=np.arange(8), max_tokens=50, stop_token_ids=(9,))
    driver.schedule()
    driver.schedule()
    driver.schedule()
    assert len(driver.pending) == 2
    driver.update()
    driver.schedule()
    result = driver.update()
    assert result.finished == [request]
    assert request.stop_reason == 9
    while driver.pending:
        assert not len(driver.update().requests)
    assert request.output_token_ids == [8, 9]
    assert driver.scheduler.stats.num_discarded_tokens == 1
    driver.schedule()
    driver.check_idle()


def test_abort_in_flight_ignores_late_tokens(make_driver):
    driver = make_driver(overlap_depth=2)
    driver.add("a", 6, max_tokens=20)
    _fill(driver)
    driver.scheduler.abort("a")
    # The slot has a new owner when the late tokens arrive.
    heir = driver.add("heir", 5, max_tokens=3)
    driver.schedule()
    assert heir.slot == 0
    for _ in range(3):
        assert not len(driver.update().requests)
    driver.drain()
    assert heir.num_output_tokens == 3
    assert driver.scheduler.stats.num_discarded_tokens == 3


def _preempted_in_flight(make_driver, **config):
    driver = make_driver(num_blocks=9, max_model_len=64, overlap_depth=1, **config)
    a = driver.add("a", 14, max_tokens=18)
    b = driver.add("b", 15, max_tokens=16)
    while not b.num_preemptions:
        _fill(driver)
        if not b.num_preemptions:
            driver.update()
    return driver, a, b


def test_late_token_of_a_preempted_request_is_delivered_once(make_driver, counted):
    driver, a, b = _preempted_in_flight(make_driver)
    known = b.num_tokens
    assert b.status == RequestStatus.PREEMPTED
    assert b.num_stale_samples == 1
    result = driver.update()
    assert b in result.requests.tolist()
    assert result.rows.tolist() == sorted(result.rows.tolist())
    assert b.num_tokens == known + 1
    assert b.num_stale_samples == 0
    driver.scheduler.check_integrity()
    driver.drain()
    counted(a)
    counted(b)
    assert b.num_output_tokens == 16
    assert driver.scheduler.stats.num_generated_tokens == 18 + 16


def test_a_request_with_tokens_in_flight_is_not_resumed(make_driver):
    driver, _, b = _preempted_in_flight(make_driver)
    driver.scheduler.abort("a")
    assert driver.scheduler.pool.num_free == 8
    output = driver.schedule()
    assert b.slot == -1
    assert not len(output.slots)
    assert driver.scheduler.stats.num_watchdog_violations == 0
    while driver.pending:
        driver.update()
    driver.schedule()
    assert b.status == RequestStatus.RUNNING


def test_late_token_may_end_a_preempted_request(make_driver):
    driver = make_driver(num_blocks=9, max_model_len=64, overlap_depth=1)
    driver.add("a", 14, max_tokens=18)
    b = driver.add("b", prompt=np.arange(15), max_tokens=16, stop_token_ids=(16,))
    while not b.num_preemptions:
        assert not b.status.finished
        _fill(driver)
        if not b.num_preemptions:
            driver.update()
    result = driver.update()
    assert b in result.finished
    assert b.status == RequestStatus.FINISHED_STOPPED
    assert b.stop_reason == 16
    driver.scheduler.check_integrity()
    driver.drain()


def test_abort_of_a_preempted_request_drops_its_late_token(make_driver):
    driver, _, b = _preempted_in_flight(make_driver)
    driver.scheduler.abort("b")
    known = b.num_tokens
    driver.scheduler.check_integrity()
    assert b not in driver.update().requests.tolist()
    assert b.num_tokens == known
    driver.drain()


def test_forced_reset_drops_tokens_in_flight_and_samples_them_again(make_driver, counted):
    driver = make_driver(overlap_depth=1, enable_prefix_caching=True)
    requests = [driver.add(name, 9, max_tokens=12) for name in "ab"]
    for _ in range(4):
        driver.step()
    assert driver.pending
    known = [r.num_tokens for r in requests]
    assert not driver.scheduler.reset_prefix_cache()
    assert driver.scheduler.reset_prefix_cache(force=True)
    driver.scheduler.check_integrity()
    assert [r.request_id for r in driver.scheduler.waiting_requests] == ["a", "b"]
    assert driver.scheduler.pool.num_cached == 0
    for request in requests:
        # The device's tokens for it are forgotten as well.
        driver.model.history[request.request_id] = request.all_token_ids.tolist()
    while driver.pending:
        assert not len(driver.update().requests)
    assert [r.num_tokens for r in requests] == known
    driver.drain()
    for request in requests:
        counted(request)
        assert request.num_output_tokens == 12
    assert driver.scheduler.stats.preemptions_by_reason["reset"] == 2


def test_outputs_are_updated_in_order_and_once(make_driver):
    driver = make_driver(overlap_depth=1)
    driver.add("a", 6, max_tokens=20)
    _fill(driver)
    (first, tokens), (second, _) = driver.pending
    with pytest.raises(ValueError, match=r"step 1 was updated out of order; the oldest .* is 0"):
        driver.scheduler.update(second, tokens)
    driver.update()
    with pytest.raises(ValueError, match="out of order"):
        driver.scheduler.update(first, tokens)
    with pytest.raises(ValueError, match=r"shape \(2,\).*needs \(1,\)"):
        driver.scheduler.update(second, [1, 2])
    driver.update()


def test_outgrown_request_reads_its_tokens_in_flight_first(make_driver, counted):
    driver = make_driver(num_blocks=7, max_model_len=64, overlap_depth=2)
    request = driver.add("a", 8, max_tokens=50)
    driver.drain()
    assert request.status == RequestStatus.FINISHED_LENGTH
    assert request.num_tokens == 25
    assert request.warning
    counted(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [False, True])
def test_pressure_with_overlap_keeps_every_sequence(make_driver, counted, depth, policy, caching):
    driver = make_driver(
        num_blocks=20,
        overlap_depth=depth,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
        max_num_batched_tokens=24,
    )
    requests = [driver.add(f"r{i}", 5 + 3 * i, max_tokens=30, priority=i % 3) for i in range(8)]
    driver.drain()
    assert driver.scheduler.stats.num_preemptions > 3
    for request in requests:
        counted(request)
        assert request.num_output_tokens == 30


def test_the_same_load_needs_the_same_work_at_every_depth(make_driver):
    work = set()
    for depth in (0, 1, 2):
        driver = make_driver(num_blocks=200, overlap_depth=depth)
        for i in range(8):
            driver.add(f"r{i}", 5 + i, max_tokens=20)
        driver.drain()
        work.add(driver.scheduler.stats.num_scheduled_tokens)
    assert len(work) == 1


# --- Several decode steps at once --------------------------------------------------------------


def test_quiet_decodes_run_several_steps_at_once(make_driver, counted):
    driver = make_driver()
    requests = [driver.add(name, 6, max_tokens=25) for name in "ab"]
    steps = []
    while driver.scheduler.has_unfinished():
        steps.append(driver.schedule(max_steps=4).num_steps)
        driver.scheduler.check_integrity()
        while driver.pending:
            driver.update()
            driver.scheduler.check_integrity()
    assert steps == [1, 4, 4, 4, 4, 4, 4]
    for request in requests:
        counted(request)
        assert request.num_output_tokens == 25
    assert driver.scheduler.stats.num_scheduled_tokens == 2 * (6 + 24)


def test_results_of_several_steps_are_in_order(make_driver):
    driver = make_driver(enable_prefix_caching=True)
    a = driver.add("a", prompt=[100], max_tokens=50)
    b = driver.add("b", prompt=[200], max_tokens=50, stop_token_ids=(203,))
    driver.step()
    driver.schedule(max_steps=4)
    result = driver.update()
    assert result.tokens.tolist() == [102, 103, 104, 105, 202, 203]
    assert result.rows.tolist() == [0, 0, 0, 0, 1, 1]
    assert result.requests.tolist() == [a] * 4 + [b] * 2
    assert result.finished == [b]
    assert driver.scheduler.stats.num_discarded_tokens == 2
    driver.scheduler.check_integrity()
    driver.drain()
    assert a.num_output_tokens == 50


def test_a_run_of_steps_ends_at_the_nearest_length_limit(make_driver):
    driver = make_driver(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=16)
    driver.add("a", 6, max_tokens=4)
    driver.add("b", 6, max_tokens=9)
    driver.step()
    assert driver.schedule(max_steps=8).num_steps == 3
    driver.update()
    assert driver.scheduler.num_running == 1
    driver.scheduler.check_integrity()


@pytest.mark.parametrize("reason", ["waiting", "prefill", "limit", "watermark"])
def test_several_steps_are_not_planned_when_something_could_be_lost(make_driver, reason):
    driver = make_driver(
        num_blocks=9, max_num_seqs=2, max_num_batched_tokens=8, watermark=0.25, max_model_len=32
    )
    driver.add("a", 6, max_tokens=2 if reason == "limit" else 20)
    driver.step()
    if reason == "waiting":
        driver.add("b", 1)
        driver.step()
        driver.add("c", 1)
    elif reason == "prefill":
        driver.add("b", 16, max_tokens=4)
    elif reason == "watermark":
        while driver.scheduler.pool.num_free > 2:
            driver.step()
    output = driver.schedule(max_steps=4)
    assert output.num_steps == 1


def test_several_steps_with_overlap_and_a_late_stop(make_driver, counted):
    driver = make_driver(overlap_depth=1, num_blocks=200)
    requests = [
        driver.add(
            f"r{i}",
            prompt=[1000 * (i + 1)],
            max_tokens=40,
            stop_token_ids=(1000 * (i + 1) + 9 + i,),
        )
        for i in range(4)
    ]
    while driver.scheduler.has_unfinished() or driver.pending:
        output = driver.schedule(max_steps=3)
        driver.scheduler.check_integrity()
        while len(driver.pending) > (1 if len(output.slots) else 0):
            driver.update()
            driver.scheduler.check_integrity()
    for i, request in enumerate(requests):
        counted(request)
        assert request.num_output_tokens == 9 + i
    driver.schedule()
    driver.check_idle()
