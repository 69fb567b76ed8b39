"""The fixed watermark: what it holds back, and what it never touches."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler import Request, RequestStatus, SchedulerConfig, check_watermark


@pytest.mark.parametrize("bad", [1.0, 1, 1.5, -0.1, float("nan"), float("inf"), "abc", None, "nan"])
def test_watermark_outside_its_range_is_refused(bad):
    with pytest.raises(ValueError, match="watermark"):
        SchedulerConfig(num_blocks=11, watermark=bad)
    with pytest.raises(ValueError, match="--watermark"):
        check_watermark(bad)


def test_watermark_is_off_by_default_and_text_is_parsed():
    assert SchedulerConfig(num_blocks=100).watermark_blocks == 0
    assert SchedulerConfig(num_blocks=100, watermark="0.05").watermark_blocks == 5  # type: ignore
    assert check_watermark("auto") == "auto"


@pytest.mark.parametrize(
    ("fraction", "num_blocks", "reserve"),
    [(0.05, 11, 0), (0.1, 11, 1), (0.5, 11, 5), (0.99, 11, 10), (0.29, 100, 28), (0.0, 11, 0)],
)
def test_reserve_counts_the_null_block_and_rounds_down(fraction, num_blocks, reserve):
    assert SchedulerConfig(num_blocks=num_blocks, watermark=fraction).watermark_blocks == reserve


def test_equality_admits_and_one_block_more_waits(make_driver):
    # 20 usable blocks, 4 of them reserved (floor of 0.2 x 21).
    for prompt_blocks, admitted in ((6, True), (7, False)):
        driver = make_driver(num_blocks=21, watermark=0.2)
        driver.add("first", 39)
        assert driver.step().joined.tolist() == [0]
        assert driver.scheduler.pool.num_free == 10
        second = driver.add("second", 4 * prompt_blocks)
        driver.step()
        assert (second.status == RequestStatus.RUNNING) == admitted
        assert driver.scheduler.num_waiting == (not admitted)


def test_first_admission_of_a_step_makes_the_watermark_bind_for_the_second(make_driver):
    driver = make_driver(num_blocks=21, watermark=0.9)
    first, second = driver.add("first", 40), driver.add("second", 4)
    driver.step()
    assert first.status == RequestStatus.RUNNING
    assert second.status == RequestStatus.WAITING


def test_an_idle_engine_admits_what_fits_whatever_the_watermark(make_driver):
    driver = make_driver(num_blocks=21, watermark=0.9)
    request = driver.add("whole pool", 79, max_tokens=1)
    driver.schedule()
    assert driver.scheduler.pool.num_free == 0
    assert request.status == RequestStatus.RUNNING


def test_growth_of_running_requests_uses_the_pool_to_its_last_block(make_driver):
    driver = make_driver(num_blocks=21, watermark=0.9)
    request = driver.add("only", 8, max_tokens=72)
    lowest = 20
    while driver.scheduler.has_unfinished():
        driver.step()
        lowest = min(lowest, driver.scheduler.pool.num_free)
    assert lowest == 0
    assert request.num_output_tokens == 72
    assert driver.scheduler.stats.num_preemptions == 0


def test_later_chunks_of_a_prompt_ignore_the_watermark_without_full_reservation(make_driver):
    driver = make_driver(
        num_blocks=21, watermark=0.2, max_num_batched_tokens=16, reserve_full_sequence=False
    )
    driver.add("small", 4, max_tokens=30)
    long = driver.add("long", 56, max_tokens=4)
    driver.step()
    # The first chunk of 12 tokens takes 3 blocks and leaves 16: above the reserve of 4.
    assert long.status == RequestStatus.RUNNING
    for _ in range(3):
        driver.step()
    assert driver.scheduler.num_computed[long.slot] == 56
    assert driver.scheduler.pool.num_free < driver.scheduler.config.watermark_blocks + 2


@pytest.mark.parametrize("reserve", [True, False])
def test_full_reservation_tests_the_whole_known_sequence(make_driver, reserve):
    driver = make_driver(
        num_blocks=21, watermark=0.2, max_num_batched_tokens=16, reserve_full_sequence=reserve
    )
    driver.add("small", 16, max_tokens=30)
    driver.step()
    # 15 blocks are free after the small one grew; 14 + 4 reserved do not fit, a chunk does.
    long = driver.add("long", 56, max_tokens=4)
    driver.step()
    assert (long.status == RequestStatus.RUNNING) == (not reserve)


def test_chunk_must_fit_above_the_watermark_without_full_reservation(make_driver):
    driver = make_driver(
        num_blocks=21, watermark=0.9, max_num_batched_tokens=16, reserve_full_sequence=False
    )
    driver.add("small", 4, max_tokens=30)
    driver.step()
    late = driver.add("late", 4)
    driver.step()
    assert late.status == RequestStatus.WAITING


def test_future_output_is_never_reserved(make_driver):
    driver = make_driver(num_blocks=21)
    requests = [driver.add(f"r{i}", 16, max_tokens=60) for i in range(5)]
    driver.step()
    assert all(request.status == RequestStatus.RUNNING for request in requests)


def test_resumed_request_must_clear_the_watermark_unless_nothing_runs(make_driver):
    driver = make_driver(num_blocks=21, watermark=0.3)
    driver.add("old", 24, max_tokens=60)
    driver.add("middle", 13, max_tokens=60)
    young = driver.add("young", 15, max_tokens=60)
    while not young.num_preemptions:
        driver.step()
    scheduler = driver.scheduler
    scheduler.abort("middle")
    driver.step()
    needed = scheduler.kv.blocks_for(young.num_tokens)
    reserve = scheduler.config.watermark_blocks
    assert needed <= scheduler.pool.num_free < needed + reserve
    assert young.status == RequestStatus.PREEMPTED
    scheduler.abort("old")
    assert needed + reserve <= 20
    driver.add("behind", 4)
    driver.step()
    assert young.status == RequestStatus.RUNNING


def test_refused_admission_changes_nothing(make_driver):
    driver = make_driver(num_blocks=21, enable_prefix_caching=True, max_model_len=80)
    shared = np.arange(16)
    driver.add("first", prompt=np.append(shared, 5000), max_tokens=8)
    driver.step()
    driver.scheduler.abort("first")
    driver.add("filler", 52, max_tokens=20)
    driver.step()
    hopeful = driver.add("hopeful", prompt=np.append(np.tile(shared, 1), np.arange(6000, 6030)))
    pool = driver.scheduler.pool
    for _ in range(2):
        counts, free = pool.ref_counts.copy(), pool.num_free
        order = pool._lru.ids().tolist()
        plan = driver.scheduler.schedule()
        assert hopeful.status == RequestStatus.WAITING
        held = np.setdiff1d(np.flatnonzero(pool.ref_counts != counts), plan.new_block_ids)
        assert not len(held), "a refused request touched reference counts"
        assert pool.num_free == free - len(plan.new_block_ids)
        assert pool._lru.ids().tolist() == order
        driver.scheduler.update(plan, np.full(len(plan.slots), 9, np.int32))
    stats = driver.scheduler.stats
    assert stats.num_prefix_requests == 2, "a retry is not another query"


def test_cached_blocks_that_nobody_uses_count_as_capacity(make_driver):
    driver = make_driver(num_blocks=11, enable_prefix_caching=True)
    prompt = np.arange(17)
    driver.add("first", prompt=prompt, max_tokens=1)
    driver.drain()
    driver.add("runner", 19, max_tokens=20)
    driver.step()
    # 5 blocks are free, and the 4 that the next one hits are among them: it needs 5, reserve 0.
    assert driver.scheduler.pool.num_free == 5
    again = driver.add("again", prompt=prompt, max_tokens=1)
    config = driver.scheduler.config
    assert config.watermark_blocks == 0
    driver.schedule()
    assert again.num_cached_tokens == 16
    assert driver.scheduler.pool.num_free == 0


def test_hit_but_unused_blocks_are_charged_against_the_watermark(make_driver):
    for watermark, admitted in ((0.0, True), (0.1, False)):
        driver = make_driver(num_blocks=11, enable_prefix_caching=True, watermark=watermark)
        prompt = np.arange(17)
        driver.add("first", prompt=prompt, max_tokens=1)
        driver.drain()
        driver.add("runner", 19, max_tokens=20)
        driver.step()
        again = driver.add("again", prompt=prompt, max_tokens=1)
        driver.schedule()
        assert (again.status == RequestStatus.RUNNING) == admitted


@pytest.mark.parametrize("watermark", [0.0, 0.1, 0.5, 0.9])
def test_a_lone_request_behaves_the_same_for_any_watermark(make_driver, watermark):
    plans = []
    for fraction in (0.0, watermark):
        driver = make_driver(num_blocks=21, watermark=fraction)
        driver.add("a", 30, max_tokens=30)
        plan = []
        while driver.scheduler.has_unfinished():
            output = driver.step()
            plan.append((output.num_tokens.tolist(), output.new_block_ids.tolist()))
        plans.append(plan)
    assert plans[0] == plans[1]


def test_a_drained_engine_starts_again_whatever_the_watermark(make_driver):
    driver = make_driver(num_blocks=21, watermark=0.9)
    for name in ("a", "b", "c"):
        request = driver.add(name, 60, max_tokens=5)
        driver.drain()
        assert request.status == RequestStatus.FINISHED_LENGTH


def test_watermark_lowers_preemptions_of_a_loaded_pool(make_driver):
    counts = {}
    for watermark in (0.0, 0.25):
        driver = make_driver(num_blocks=41, watermark=watermark)
        requests = [driver.add(f"r{i}", 8, max_tokens=40) for i in range(24)]
        driver.drain()
        assert all(request.num_output_tokens == 40 for request in requests)
        counts[watermark] = driver.scheduler.stats.num_preemptions
    assert counts[0.25] < counts[0.0]


def test_one_block_is_the_null_block(make_driver):
    driver = make_driver(num_blocks=21)
    assert driver.scheduler.pool.num_usable == driver.scheduler.pool.num_free == 20
    driver.add("a", 79, max_tokens=1)
    driver.schedule()
    assert 0 not in driver.scheduler.block_table[0, :20]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens=32"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 256, "max_model_len": 512},
            "max_model_len=512",
        ),
        ({"num_blocks": 1}, "num_blocks=1"),
        ({"block_size": 0}, "block_size=0"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"overlap_depth": -1}, "overlap_depth=-1"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs=-1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1"),
        ({"scheduling_policy": "sjf"}, "sjf"),
    ],
)
def test_bad_limits_name_the_value_and_the_flag(config, message):
    with pytest.raises(ValueError, match=message) as error:
        SchedulerConfig(**({"num_blocks": 11} | config))
    assert "--" in str(error.value)


def test_policy_is_asked_only_when_something_runs_and_it_fits(make_driver):
    driver = make_driver(num_blocks=21)
    asked = []

    class Spy(type(driver.scheduler.admission)):
        def admits(self, scheduler, request, **facts):
            asked.append((request.request_id, facts))
            return super().admits(scheduler, request, **facts)

    driver.scheduler.admission = Spy(0)
    driver.add("first", 40)
    driver.add("second", 8)
    driver.add("too large now", 60)
    driver.step()
    assert asked == [
        (
            "second",
            {
                "num_known_tokens": 8,
                "num_cached_tokens": 0,
                "num_new_blocks": 2,
                "num_free_blocks": 10,
            },
        )
    ]


def test_request_larger_than_the_pool_is_refused_with_the_arithmetic(make_driver):
    scheduler = make_driver(num_blocks=11).scheduler
    with pytest.raises(ValueError, match=r"40 prompt \+ 1 output = 41 tokens.*10 usable.*40"):
        scheduler.add(Request("r", np.zeros(40, np.int32), 1))
    scheduler.add(Request("fits", np.zeros(39, np.int32), 1))
