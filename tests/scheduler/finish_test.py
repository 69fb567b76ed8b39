"""How requests end, are refused, and are reported."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler import QueueFullError, Request, RequestStatus


def test_stop_token_ends_and_is_reported(make_driver):
    driver = make_driver()
    prompt = np.arange(100, 108)
    request = driver.add("a", prompt=prompt, max_tokens=50, stop_token_ids=(5, 112, 9))
    driver.drain()
    assert request.status == RequestStatus.FINISHED_STOPPED
    assert request.status.finish_reason == "stop"
    assert request.stop_reason == 112
    assert request.output_token_ids == [108, 109, 110, 111, 112]
    assert driver.results[-1].finished == [request]


def test_ignored_eos_is_not_a_stop(make_driver):
    driver = make_driver()
    request = driver.add("a", prompt=np.arange(8), max_tokens=20, ignore_eos=True)
    driver.drain()
    assert request.status == RequestStatus.FINISHED_LENGTH
    assert request.stop_reason is None
    assert request.num_output_tokens == 20


def test_stop_wins_over_length_at_the_same_token(make_driver):
    driver = make_driver()
    request = driver.add("a", prompt=np.arange(8), max_tokens=3, stop_token_ids=(10,))
    driver.drain()
    assert request.status == RequestStatus.FINISHED_STOPPED


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_exact(make_driver, max_tokens):
    driver = make_driver()
    request = driver.add("a", 5, max_tokens=max_tokens)
    driver.drain()
    assert request.status == RequestStatus.FINISHED_LENGTH
    assert request.status.finish_reason == "length"
    assert request.num_output_tokens == max_tokens
    assert driver.scheduler.stats.num_scheduled_tokens == 5 + max_tokens - 1


def test_max_model_len_ends_a_sequence(make_driver):
    driver = make_driver(max_model_len=20)
    request = driver.add("a", 15, max_tokens=1000)
    driver.drain()
    assert request.status == RequestStatus.FINISHED_LENGTH
    assert request.num_tokens == 20
    assert request.warning is None


def test_many_stop_ids_of_different_numbers(make_driver):
    driver = make_driver()
    requests = [
        driver.add("none", prompt=[100], max_tokens=9),
        driver.add("one", prompt=[200], max_tokens=9, stop_token_ids=(203,)),
        driver.add("many", prompt=[300], max_tokens=9, stop_token_ids=tuple(range(305, 405))),
        driver.add("none again", prompt=[400], max_tokens=9),
    ]
    driver.drain()
    assert [r.num_output_tokens for r in requests] == [9, 3, 5, 9]
    # The slots' next owners do not inherit stop ids.
    late = [driver.add(f"late{i}", prompt=[300], max_tokens=9) for i in range(4)]
    driver.drain()
    assert [r.num_output_tokens for r in late] == [9] * 4


@pytest.mark.parametrize("moment", ["waiting", "running", "preempted", "finished"])
def test_abort_works_everywhere_and_once(make_driver, moment):
    driver = make_driver(num_blocks=13, max_model_len=64)
    scheduler = driver.scheduler
    requests = [driver.add(name, 15, max_tokens=20) for name in "abc"]
    target = requests[2]
    if moment != "waiting":
        driver.step()
    while moment == "preempted" and target.status != RequestStatus.PREEMPTED:
        driver.step()
    if moment == "finished":
        driver.drain()
        assert not scheduler.abort("c")
        return
    known = target.num_tokens
    assert target.status.name.lower() == moment
    assert scheduler.abort("c")
    assert not scheduler.abort("c")
    assert target.status == RequestStatus.FINISHED_ABORTED
    assert target.status.finish_reason == "abort"
    assert target.num_tokens == known, "what was generated can still be read"
    scheduler.check_integrity()
    assert driver.schedule().finished_request_ids == ("c",)
    while driver.pending:
        driver.update()
    driver.drain()


def test_unknown_ids_are_ignored(make_driver):
    scheduler = make_driver().scheduler
    assert not scheduler.abort("nobody")
    assert not scheduler.finish("nobody", RequestStatus.FINISHED_ERROR)
    with pytest.raises(ValueError, match="RUNNING does not end"):
        scheduler.finish("nobody", RequestStatus.RUNNING)


def test_stop_string_found_by_the_engine(make_driver):
    driver = make_driver()
    request = driver.add("a", 4, max_tokens=50)
    driver.step()
    assert driver.scheduler.finish("a", RequestStatus.FINISHED_STOPPED, "\n\n")
    assert request.stop_reason == "\n\n"
    assert request.num_output_tokens == 1
    driver.schedule()
    driver.check_idle()


def test_an_error_ends_only_its_request(make_driver, counted):
    driver = make_driver()
    bad, good = driver.add("bad", 4, max_tokens=9), driver.add("good", 4, max_tokens=9)
    driver.step()
    driver.scheduler.finish("bad", RequestStatus.FINISHED_ERROR)
    driver.drain()
    assert bad.status.finish_reason == "error"
    assert good.num_output_tokens == 9
    counted(good)


def test_finished_ids_are_reported_once_in_the_next_output(make_driver):
    driver = make_driver()
    for i in range(4):
        driver.add(f"r{i}", 4, max_tokens=2 + i)
    reported = [driver.step().finished_request_ids for _ in range(10)]
    assert [ids for ids in reported if ids] == [("r0",), ("r1",), ("r2",), ("r3",)]
    # The model ends r0 with the second step's tokens; the third output says so.
    assert reported[2] == ("r0",)


def test_after_everything_the_pool_is_whole(make_driver):
    for caching in (False, True):
        driver = make_driver(num_blocks=20, enable_prefix_caching=caching)
        for i in range(10):
            driver.add(f"r{i}", 5 + i, max_tokens=12)
        driver.drain()
        pool = driver.scheduler.pool
        assert pool.num_free == 19
        assert (pool.num_cached > 0) == caching


def test_request_can_be_read_before_during_and_after(make_driver):
    driver = make_driver()
    request = driver.request("a", prompt=[7, 8], max_tokens=3)
    assert request.output_token_ids == []
    driver.scheduler.add(request)
    assert (request.num_tokens, request.num_output_tokens) == (2, 0)
    driver.step()
    assert request.output_token_ids == [9]
    assert request.all_token_ids.tolist() == [7, 8, 9]
    driver.drain()
    assert request.output_token_ids == [9, 10, 11]
    assert request.slot == -1


# --- Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "ignore_eos", "message"),
    [
        (0, 1, False, "empty prompt"),
        (4, 0, False, "max_tokens=0"),
        (64, 1, False, "64 prompt tokens.*max_model_len=64.*63"),
        (48, 1, False, r"48 prompt \+ 1 output = 49 tokens.*12 usable blocks of 4 tokens hold 48"),
        (20, 29, True, r"promises 49 tokens \(20 prompt \+ 29 output.*12 usable blocks.*hold 48"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_arithmetic(
    make_driver, prompt_len, max_tokens, ignore_eos, message
):
    driver = make_driver(num_blocks=13, max_model_len=64)
    with pytest.raises(ValueError, match=message):
        driver.add("a", prompt_len, max_tokens, ignore_eos=ignore_eos)
    assert not driver.scheduler.has_unfinished()
    driver.add("a", 4, 4)
    driver.drain()


def test_boundaries_are_accepted(make_driver):
    driver = make_driver(num_blocks=13, max_model_len=64)
    prompt_at_limit = driver.add("a", 47, 1)
    promise_at_limit = driver.add("b", 20, 28, ignore_eos=True)
    no_promise = driver.add("c", 20, 44)
    driver.drain()
    assert prompt_at_limit.num_output_tokens == 1
    assert promise_at_limit.num_output_tokens == 28
    assert no_promise.status == RequestStatus.FINISHED_LENGTH


def test_ids_are_unique_and_requests_are_used_once(make_driver):
    driver = make_driver()
    request = driver.add("a", 4, 1)
    with pytest.raises(ValueError, match="'a' is already queued"):
        driver.add("a", 4, 1)
    driver.drain()
    with pytest.raises(ValueError, match="added before"):
        driver.scheduler.add(request)
    driver.add("a", 4, 1)


def test_queue_limit_refuses_fresh_requests_only(make_driver):
    driver = make_driver(num_blocks=13, max_model_len=64, max_num_queued_reqs=2)
    for name in "ab":
        driver.add(name, 15, max_tokens=20)
    driver.step()
    driver.add("c", 15, max_tokens=20)
    driver.step()
    while not driver.scheduler.stats.num_preemptions:
        driver.step()
    # c is preempted and waits, and does not count.
    driver.add("d", 4)
    driver.add("e", 4)
    with pytest.raises(QueueFullError, match="2 requests wait and max_num_queued_reqs is 2"):
        driver.add("f", 4)
    assert driver.scheduler.stats.num_refused == 1
    driver.scheduler.abort("e")
    driver.add("f", 4)
    driver.drain()


def test_a_request_that_outgrows_the_pool_alone_ends_with_a_warning(make_driver, counted):
    driver = make_driver(num_blocks=7, max_model_len=64)
    request = driver.add("a", 8, max_tokens=50)
    after = driver.add("b", 8, max_tokens=4)
    driver.drain()
    assert request.status == RequestStatus.FINISHED_LENGTH
    assert request.num_tokens == 25, "6 blocks hold 24 tokens, and the last was sampled"
    assert "24" in request.warning
    assert "--num_kv_blocks" in request.warning
    assert request.num_preemptions == 0
    assert request in driver.ended
    counted(request)
    assert after.num_output_tokens == 4
    assert driver.scheduler.stats.num_pool_too_small == 1
    assert driver.scheduler.stats.num_watchdog_violations == 0


def test_the_end_of_an_outgrown_request_is_announced_in_the_plan(make_driver):
    driver = make_driver(num_blocks=7, max_model_len=64)
    request = driver.add("a", 8, max_tokens=50)
    output = driver.step()
    while not output.ended_requests:
        output = driver.step()
    assert output.ended_requests == (request,)
    assert output.finished_request_ids == ("a",)
    assert output.released.tolist() == [0]
    assert not len(output.slots)
    driver.check_idle()


def test_outgrown_request_ends_instead_of_preempting_itself(make_driver):
    driver = make_driver(num_blocks=13, max_model_len=64)
    large = driver.add("large", 46, max_tokens=10)
    driver.step()
    driver.step()
    driver.step()
    # It fills the pool; the next token would need a 13th block.
    output = driver.step()
    assert output.ended_requests == (large,)
    assert driver.scheduler.stats.num_preemptions == 0


def test_watchdog_counts_a_stall(make_driver):
    driver = make_driver()
    driver.add("a", 4)
    # A fault planted in the queue: the head claims tokens in flight that nobody will deliver.
    driver.scheduler.waiting.peek().num_stale_samples = 1
    driver.scheduler.schedule()
    assert driver.scheduler.stats.num_watchdog_violations == 1


def test_numbers_of_a_request_are_those_of_its_first_admission(make_driver):
    driver = make_driver(num_blocks=16, max_model_len=64, enable_prefix_caching=True)
    prefix = list(range(12))
    driver.add("a", prompt=[*prefix, 500], max_tokens=30)
    driver.step()
    b = driver.add("b", prompt=[*prefix, 600], max_tokens=30)
    driver.step()
    assert b.num_cached_tokens == 12
    first = b.first_scheduled_time
    driver.drain()
    assert b.num_preemptions > 0
    assert b.num_cached_tokens == 12
    assert b.first_scheduled_time == first
    assert b.prompt_len == 13


def test_a_plain_list_of_prompt_tokens_is_taken(make_driver):
    driver = make_driver()
    request = Request("list", [5, 6, 7], 2)  # type: ignore[arg-type]
    driver.scheduler.add(request)
    assert request.prompt_token_ids.dtype == np.int32
    driver.drain()
    assert request.output_token_ids == [8, 9]
