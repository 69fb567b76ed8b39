"""The priority policy: order of admission, choice of victims, rollback within a step."""

from __future__ import annotations

import numpy as np

from scheduler import RequestStatus


def _admitted(driver) -> list[str]:
    """Ids in the order in which they are first admitted while the driver runs dry."""
    order = []
    while driver.scheduler.has_unfinished():
        output = driver.schedule()
        order += [driver.scheduler.slot_requests[s].request_id for s in output.joined]
        while driver.pending:
            driver.update()
    return order


def test_lower_value_first_ties_by_arrival(make_driver):
    driver = make_driver(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in [("a", 2), ("b", 0), ("c", 1), ("d", 0), ("e", 2)]:
        driver.add(name, 4, max_tokens=2, priority=priority)
    assert _admitted(driver) == ["b", "d", "c", "a", "e"]


def test_arrival_time_orders_equals(make_driver):
    driver = make_driver(scheduling_policy="priority", max_num_seqs=1)
    for name, arrival in [("late", 3.0), ("early", 1.0), ("middle", 2.0)]:
        driver.add(name, 4, max_tokens=1, arrival_time=arrival)
    assert _admitted(driver) == ["early", "middle", "late"]


def test_equal_priorities_behave_like_fcfs(make_driver):
    plans = []
    for policy in ("fcfs", "priority"):
        driver = make_driver(scheduling_policy=policy, num_blocks=20, max_num_seqs=4)
        for i in range(8):
            driver.add(f"r{i}", 5 + 2 * i, max_tokens=20, priority=7, arrival_time=float(i))
        plan = []
        while driver.scheduler.has_unfinished():
            output = driver.step()
            victims = [p.request.request_id for p in output.preemptions]
            plan.append((output.slots.tolist(), output.num_tokens.tolist(), victims))
        assert driver.scheduler.stats.num_preemptions
        plans.append(plan)
    assert plans[0] == plans[1]


def test_order_holds_under_random_insertion_and_slot_limits(make_driver):
    rng = np.random.default_rng(3)
    driver = make_driver(scheduling_policy="priority", max_num_seqs=2)
    scheduler = driver.scheduler
    added = 0
    while added < 40 or scheduler.has_unfinished():
        for _ in range(rng.integers(0, 3)):
            if added < 40:
                name = f"r{added}"
                driver.add(
                    name, 4, max_tokens=int(rng.integers(1, 4)), priority=int(rng.integers(3))
                )
                added += 1
        waiting = list(scheduler.requests.values())
        output = driver.step()
        joined = [
            r for r in waiting if r.first_scheduled_time is not None and r.slot in output.joined
        ]
        left = [r for r in waiting if r.status == RequestStatus.WAITING]
        for request in joined:
            if request.slot >= 0:
                assert all(request.priority <= other.priority for other in left)


def _pressed(make_driver, priorities, **config):
    driver = make_driver(num_blocks=13, max_model_len=64, scheduling_policy="priority", **config)
    requests = [
        driver.add(name, 15, max_tokens=20, priority=priority)
        for name, priority in zip("abc", priorities)
    ]
    driver.step()
    driver.step()
    return driver, requests


def test_victim_has_the_largest_priority_and_leaves_no_trace_in_the_plan(make_driver, planned):
    # c arrives when the others run, so the victim b was scheduled in this step before it.
    driver = make_driver(num_blocks=12, max_model_len=64, scheduling_policy="priority")
    b = driver.add("b", 15, max_tokens=20, priority=5)
    c = driver.add("c", 15, max_tokens=20, priority=0)
    d = driver.add("d", 11, max_tokens=20, priority=1)
    driver.step()
    driver.step()
    assert driver.scheduler.running.tolist() == [c.slot, d.slot, b.slot]
    output = driver.step()
    assert [p.request for p in output.preemptions] == [b]
    assert output.released.tolist() == [2]
    assert 2 not in output.slots
    assert 2 not in output.new_block_slots


def test_a_victim_scheduled_earlier_in_the_step_is_rolled_back(make_driver):
    driver = make_driver(num_blocks=10, max_model_len=64, scheduling_policy="priority")
    low = driver.add("low", 15, max_tokens=20, priority=5)
    driver.step()
    high = driver.add("high", 16, max_tokens=20, priority=0)
    driver.step()
    scheduler = driver.scheduler
    assert scheduler.running.tolist() == [low.slot, high.slot]
    assert scheduler.pool.num_free == 1
    # low takes the last block, then high needs one: low goes, with the block it just got.
    output = driver.step()
    assert [p.request for p in output.preemptions] == [low]
    assert output.preemptions[0].num_blocks_freed == 5
    assert output.slots.tolist() == [high.slot]
    assert output.total_num_tokens == 1
    assert output.new_block_slots.tolist() == [high.slot]
    scheduler.check_integrity()
    driver.drain()
    assert low.num_output_tokens == high.num_output_tokens == 20


def test_returned_budget_serves_rows_behind_the_victim(make_driver):
    driver = make_driver(
        num_blocks=13,
        max_model_len=64,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
        scheduling_policy="priority",
        reserve_full_sequence=False,
    )
    low = driver.add("low", 7, max_tokens=30, priority=5)
    driver.step()
    driver.add("high", 28, max_tokens=2, priority=0)
    driver.add("other", 28, max_tokens=2, priority=1)
    assert driver.step().num_tokens.tolist() == [1, 8, 7]
    assert driver.step().num_tokens.tolist() == [1, 8, 7]
    output = driver.step()
    assert [p.request for p in output.preemptions] == [low]
    assert output.num_tokens.tolist() == [8, 8]


def test_self_preempted_lowest_does_not_stop_the_others(make_driver):
    driver = make_driver(num_blocks=9, max_model_len=64, scheduling_policy="priority")
    low = driver.add("low", 15, max_tokens=20, priority=5)
    driver.step()
    high = driver.add("high", 14, max_tokens=20, priority=0)
    driver.step()
    # low needs a fifth block first and is the lowest itself; high still decodes in this step.
    output = driver.step()
    assert [(p.request, p.reason) for p in output.preemptions] == [(low, "self")]
    assert output.slots.tolist() == [high.slot]


def test_victims_get_no_boost(make_driver):
    driver, (_, _, c) = _pressed(make_driver, (0, 0, 5))
    driver.add("better", 15, max_tokens=4, priority=1)
    output = driver.step()
    assert [p.request for p in output.preemptions] == [c]
    assert [r.request_id for r in driver.scheduler.waiting_requests] == ["better", "c"]


def test_preempted_requests_go_before_fresh_ones_of_equal_priority(make_driver):
    driver, (_, _, c) = _pressed(make_driver, (0, 0, 5))
    driver.add("equal", 15, max_tokens=4, priority=5, arrival_time=-1.0)
    driver.step()
    assert [r.request_id for r in driver.scheduler.waiting_requests] == ["c", "equal"]
    assert c.status == RequestStatus.PREEMPTED


def test_a_waiting_higher_priority_does_not_evict_a_running_lower_one(make_driver):
    driver = make_driver(num_blocks=13, max_model_len=64, scheduling_policy="priority")
    low = driver.add("low", 40, max_tokens=4, priority=9)
    driver.step()
    high = driver.add("high", 12, max_tokens=4, priority=0)
    output = driver.step()
    assert not output.preemptions
    assert low.status == RequestStatus.RUNNING
    assert high.status == RequestStatus.WAITING
    driver.drain()
    assert driver.scheduler.stats.num_preemptions == 0


def test_cap_holds_under_priority_too(make_driver, counted):
    driver = make_driver(
        num_blocks=25,
        max_model_len=128,
        scheduling_policy="priority",
        max_preemptions_per_request=1,
    )
    requests = [driver.add(f"r{i}", 8, max_tokens=50, priority=i % 3) for i in range(6)]
    driver.drain()
    assert driver.scheduler.stats.num_preemptions > 0
    for request in requests:
        counted(request)
