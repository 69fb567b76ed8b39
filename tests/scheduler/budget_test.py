"""The token budget, chunking and the order of rows."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler import RequestStatus


def test_all_that_fits_is_scheduled_in_queue_order(make_driver):
    driver = make_driver()
    for i in range(5):
        driver.add(f"r{i}", 4 + i)
    output = driver.step()
    assert output.num_tokens.tolist() == [4, 5, 6, 7, 8]
    names = [r.request_id for r in driver.scheduler.slot_requests[driver.scheduler.running]]
    assert names == [f"r{i}" for i in range(5)]


def test_running_requests_come_before_waiting_ones(make_driver):
    driver = make_driver(max_num_batched_tokens=8)
    first = driver.add("first", 6)
    driver.step()
    second = driver.add("second", 20)
    output = driver.step()
    assert output.slots.tolist() == [first.slot, second.slot]
    assert output.num_tokens.tolist() == [1, 7]


def test_budget_and_slots_are_never_exceeded(make_driver):
    rng = np.random.default_rng(0)
    driver = make_driver(num_blocks=200, max_num_batched_tokens=11, max_num_seqs=5)
    for i in range(20):
        driver.add(f"r{i}", int(rng.integers(1, 40)), max_tokens=int(rng.integers(1, 20)))
    full = 0
    while driver.scheduler.has_unfinished():
        output = driver.step()
        assert output.total_num_tokens <= 11
        assert driver.scheduler.num_running <= 5
        full += output.total_num_tokens == 11
    assert full > 10


def test_slots_limit_admission(make_driver):
    driver = make_driver(max_num_seqs=3)
    requests = [driver.add(f"r{i}", 4, max_tokens=1 + i) for i in range(5)]
    driver.schedule()
    assert [r.status == RequestStatus.RUNNING for r in requests] == [True] * 3 + [False] * 2
    driver.update()
    driver.schedule()
    assert requests[3].status == RequestStatus.RUNNING, "the first ended and made room"
    assert requests[4].status == RequestStatus.WAITING


def test_long_prompts_share_the_budget_by_the_threshold(make_driver):
    driver = make_driver(
        num_blocks=1000,
        block_size=16,
        max_num_batched_tokens=1024,
        max_model_len=2048,
        long_prefill_token_threshold=400,
    )
    for name in "abc":
        driver.add(name, 800, max_tokens=2)
    assert driver.step().num_tokens.tolist() == [400, 400, 224]
    assert driver.step().num_tokens.tolist() == [400, 400, 224]
    output = driver.step()
    assert output.num_tokens.tolist() == [1, 1, 352]


def test_threshold_does_not_slow_a_lone_request(make_driver):
    driver = make_driver(
        num_blocks=300,
        max_num_batched_tokens=512,
        max_model_len=900,
        long_prefill_token_threshold=64,
    )
    driver.add("alone", 800, max_tokens=2)
    assert driver.step().num_tokens.tolist() == [512]
    driver.add("company", 4, max_tokens=2)
    assert driver.step().num_tokens.tolist() == [64, 4]


def test_prompts_are_chunked_by_what_is_left_of_the_budget(make_driver, counted):
    driver = make_driver(max_num_batched_tokens=16)
    requests = [driver.add(name, 24, max_tokens=3) for name in "ab"]
    plans = [driver.step() for _ in range(4)]
    assert [p.num_tokens.tolist() for p in plans] == [[16], [8, 8], [1, 15], [1, 1]]
    # A chunk samples only if it ends the prompt.
    assert [p.samples.tolist() for p in plans] == [
        [False],
        [True, False],
        [True, False],
        [True, True],
    ]
    driver.drain()
    for request in requests:
        counted(request)


def test_without_chunking_a_prompt_that_does_not_fit_stops_admission(make_driver):
    driver = make_driver(
        enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64, num_blocks=100
    )
    for name, length in [("a", 40), ("b", 30), ("c", 4)]:
        driver.add(name, length, max_tokens=8)
    assert driver.step().num_tokens.tolist() == [40]
    assert driver.step().num_tokens.tolist() == [1, 30, 4]


def test_head_of_line_blocks_the_queue(make_driver):
    driver = make_driver(num_blocks=21)
    driver.add("first", 60, max_tokens=10)
    driver.step()
    head = driver.add("large", 40)
    small = driver.add("small", 1)
    driver.step()
    assert head.status == small.status == RequestStatus.WAITING
    driver.scheduler.abort("large")
    driver.step()
    assert small.status == RequestStatus.RUNNING


def test_decodes_come_first_then_chunks_in_running_order(make_driver):
    driver = make_driver(max_num_batched_tokens=10, long_prefill_token_threshold=5)
    a, b = driver.add("a", 4), driver.add("b", 30)
    driver.step()
    c = driver.add("c", 1)
    output = driver.step()
    assert output.num_decodes == 1
    assert output.slots.tolist() == [a.slot, b.slot, c.slot]
    assert output.num_tokens.tolist() == [1, 5, 1]
    # A single known token is no decode: the engine has to upload it.
    assert output.samples.tolist() == [True, False, True]
    output = driver.step()
    assert output.slots.tolist() == [a.slot, c.slot, b.slot]
    assert output.num_decodes == 2


def test_an_empty_step_is_legal_and_drains_what_is_pending(make_driver):
    driver = make_driver()
    scheduler = driver.scheduler
    output = driver.schedule()
    assert len(output.slots) == output.total_num_tokens == output.num_decodes == 0
    assert len(scheduler.update(output, []).requests) == 0
    driver.add("a", 4)
    driver.step()
    scheduler.abort("a")
    output = driver.schedule()
    assert not len(output.slots)
    assert output.released.tolist() == [0]
    assert output.finished_request_ids == ("a",)
    output = driver.schedule()
    assert not len(output.released)
    assert output.finished_request_ids == ()
    assert scheduler.stats.num_steps == 1
    driver.check_idle()


def test_running_prefills_cannot_starve_decodes_or_admission_for_ever(make_driver):
    driver = make_driver(
        num_blocks=400, max_num_batched_tokens=16, max_model_len=200, max_num_seqs=4
    )
    # Prompts that eat the whole budget for many steps keep arriving.
    requests = []
    waits: dict[str, int] = {}
    for step in range(600):
        if step % 12 == 0 and len(requests) < 30:
            requests.append(driver.add(f"r{len(requests)}", 150, max_tokens=6))
        output = driver.step()
        served = {driver.scheduler.slot_requests[s] for s in output.slots}
        for request in requests:
            if request.status == RequestStatus.RUNNING and request not in served:
                waits[request.request_id] = waits.get(request.request_id, 0) + 1
    assert all(request.status.finished for request in requests)
    # At most the prefills ahead of it delay a running request: 3 others of 150 tokens each.
    assert max(waits.values(), default=0) <= 3 * 10 * 6


def test_row_facts_agree_with_the_arrays(make_driver):
    driver = make_driver(max_num_batched_tokens=16)
    for i in range(3):
        driver.add(f"r{i}", 9, max_tokens=4)
    scheduler = driver.scheduler
    while scheduler.has_unfinished():
        output = driver.schedule()
        ends = output.start + output.num_tokens
        assert (scheduler.num_computed[output.slots] == ends).all()
        assert (output.epochs == scheduler.slots.epochs[output.slots]).all()
        for array in (output.slots, output.num_tokens, output.start, output.epochs):
            assert array.dtype == np.int32
        for array in (output.joined, output.released, output.new_block_ids):
            assert array.dtype == np.int32
        while driver.pending:
            driver.update()


@pytest.mark.parametrize("budget", [8, 16, 64, 256])
@pytest.mark.parametrize("threshold", [0, 5])
def test_output_does_not_depend_on_chunking(make_driver, counted, budget, threshold):
    driver = make_driver(
        max_num_batched_tokens=budget, long_prefill_token_threshold=threshold, num_blocks=30
    )
    requests = [driver.add(f"r{i}", 3 + 5 * i, max_tokens=20) for i in range(6)]
    driver.drain()
    for request in requests:
        counted(request)
        assert request.num_output_tokens == 20
