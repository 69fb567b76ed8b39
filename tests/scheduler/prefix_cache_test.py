"""Prefix caching: what hits, what is evicted first, what is kept apart."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler import RequestStatus
from scheduler.prefix_hash import block_hash, extend_block_hashes


def _driver(make_driver, **config):
    return make_driver(
        **({"block_size": 16, "num_blocks": 33, "enable_prefix_caching": True} | config)
    )


def _run(driver, name, prompt, **kwargs):
    request = driver.add(name, prompt=prompt, **({"max_tokens": 1} | kwargs))
    driver.drain()
    return request


# --- Hashes ------------------------------------------------------------------------------------


def test_hash_of_a_block_covers_all_tokens_before_it():
    chains = []
    for first in (0, 1):
        tokens = np.arange(64, dtype=np.int32)
        tokens[0] = first + 100
        chain: list[bytes] = []
        extend_block_hashes(chain, tokens, 16, 4)
        chains.append(chain)
    assert all(a != b for a, b in zip(*chains))
    assert len({*chains[0], *chains[1]}) == 8


def test_hashes_extend_block_by_block_to_the_same_chain():
    tokens = np.random.default_rng(0).integers(0, 2**31 - 1, 80, dtype=np.int32)
    whole: list[bytes] = []
    extend_block_hashes(whole, tokens, 16, 5, "salt")
    parts: list[bytes] = []
    for count in (1, 1, 3, 5):
        extend_block_hashes(parts, tokens, 16, count, "salt")
    assert parts == whole
    assert block_hash(whole[0], tokens[16:32].tobytes()) == whole[1]
    extend_block_hashes(parts, tokens, 16, 2)
    assert parts == whole


def test_equal_tokens_at_another_place_hash_differently():
    chain: list[bytes] = []
    extend_block_hashes(chain, np.zeros(64, np.int32), 16, 4)
    assert len(set(chain)) == 4


# --- Hits --------------------------------------------------------------------------------------


def test_exact_repeat_computes_its_last_block_again(make_driver):
    driver = _driver(make_driver)
    prompt = np.arange(64)
    _run(driver, "a", prompt)
    again = driver.add("b", prompt=prompt, max_tokens=1)
    output = driver.step()
    assert again.num_cached_tokens == 48
    assert (output.start.tolist(), output.num_tokens.tolist()) == ([48], [16])


@pytest.mark.parametrize(
    ("length", "hit"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)]
)
def test_only_full_blocks_hit_and_one_token_is_left_over(make_driver, length, hit):
    driver = _driver(make_driver)
    prompt = np.arange(length)
    _run(driver, "a", prompt)
    assert _run(driver, "b", prompt).num_cached_tokens == hit


def test_hit_while_the_owner_runs_shares_its_blocks(make_driver, counted):
    driver = _driver(make_driver)
    a = driver.add("a", prompt=np.arange(40), max_tokens=20)
    driver.step()
    b = driver.add("b", prompt=[*range(32), 900], max_tokens=20)
    output = driver.step()
    scheduler = driver.scheduler
    assert output.num_tokens.tolist() == [1, 1]
    shared = scheduler.block_table[b.slot, :2]
    assert shared.tolist() == scheduler.block_table[a.slot, :2].tolist()
    assert scheduler.pool.ref_counts[shared].tolist() == [2, 2]
    scheduler.abort("a")
    assert scheduler.pool.ref_counts[shared].tolist() == [1, 1]
    driver.drain()
    counted(b)


def test_hit_after_the_owner_ended_takes_blocks_off_the_free_list(make_driver):
    driver = _driver(make_driver)
    _run(driver, "a", np.arange(40))
    pool = driver.scheduler.pool
    free = pool.num_free
    b = driver.add("b", prompt=[*range(32), 900], max_tokens=20)
    driver.schedule()
    assert b.num_cached_tokens == 32
    assert pool.num_free == free - 3


def test_identical_prompts_of_one_step_share(make_driver, counted):
    driver = _driver(make_driver)
    prompt = np.arange(50)
    requests = [driver.add(name, prompt=prompt, max_tokens=5) for name in "ab"]
    output = driver.step()
    assert output.num_tokens.tolist() == [50, 2]
    assert output.start.tolist() == [0, 48]
    assert driver.scheduler.pool.num_free == 32 - 5
    driver.drain()
    for request in requests:
        counted(request)


def test_a_chunk_that_is_planned_can_be_shared_in_the_same_step(make_driver):
    driver = _driver(make_driver, max_num_batched_tokens=32)
    driver.add("a", prompt=np.arange(64), max_tokens=3)
    driver.step()
    b = driver.add("b", prompt=[*range(32), 7], max_tokens=3)
    output = driver.step()
    assert output.num_tokens.tolist() == [32]
    output = driver.step()
    assert b.num_cached_tokens == 32
    assert output.num_tokens.tolist() == [1, 1]


def test_next_turn_hits_prompt_and_output_of_the_last(make_driver, counted):
    driver = _driver(make_driver)
    a = _run(driver, "turn 1", np.arange(20), max_tokens=30)
    assert a.num_output_tokens == 30
    # Tokens 0..48 have KV: the last one, sampled, was never run.
    b = driver.add("turn 2", prompt=[*a.all_token_ids, 2000, 2001], max_tokens=4)
    driver.step()
    assert b.num_cached_tokens == 48
    driver.drain()
    counted(b)


def test_decode_fills_blocks_that_are_cached_when_full(make_driver):
    driver = _driver(make_driver)
    a = driver.add("a", prompt=np.arange(14), max_tokens=30)
    pool = driver.scheduler.pool
    driver.step()
    assert pool.num_cached == 0
    driver.step()
    driver.step()
    # 16 tokens are computed and known: 14 of the prompt, 2 of the output.
    assert pool.num_cached == 1
    assert driver.scheduler.kv.num_hashed[a.slot] == 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_only_known_tokens_are_cached(make_driver, depth):
    driver = _driver(make_driver, block_size=2, overlap_depth=depth)
    a = driver.add("a", prompt=np.arange(5), max_tokens=20)
    while driver.scheduler.has_unfinished():
        driver.step()
        if a.slot >= 0:
            hashed = int(driver.scheduler.kv.num_hashed[a.slot])
            assert 2 * hashed <= min(a.num_tokens, driver.scheduler.num_computed[a.slot])
            assert 2 * hashed >= a.num_tokens - 2 - depth - 1


def test_block_ids_of_a_request_are_append_only_and_twins_are_kept(make_driver):
    driver = _driver(make_driver, block_size=4)
    # Both generate the same tokens side by side, so equal blocks are computed twice.
    a = driver.add("a", prompt=[10, 11], max_tokens=12)
    b = driver.add("b", prompt=[10, 11], max_tokens=12, cache_salt=None)
    scheduler, pool = driver.scheduler, driver.scheduler.pool
    seen: dict[str, list[int]] = {"a": [], "b": []}
    while scheduler.has_unfinished():
        driver.schedule()
        for request in (a, b):
            blocks = scheduler.kv.blocks_of(request.slot).tolist()
            assert blocks[: len(seen[request.request_id])] == seen[request.request_id]
            seen[request.request_id] = blocks
        driver.update()
        scheduler.check_integrity()
    assert not set(seen["a"]) & set(seen["b"])
    assert pool.num_cached == 6
    assert len(pool._block_of) == 3
    # One twin goes; the hash still finds the other.
    c = driver.add("c", prompt=[10, 11, 12, 13, 14], max_tokens=1)
    driver.step()
    assert c.num_cached_tokens == 4


# --- Eviction ----------------------------------------------------------------------------------


def test_blank_blocks_are_reused_before_cached_ones(make_driver):
    driver = _driver(make_driver, num_blocks=11)
    _run(driver, "a", np.arange(64))
    pool = driver.scheduler.pool
    assert pool.num_cached == 4
    _run(driver, "b", np.arange(1000, 1090))
    assert pool.num_evictions == 0
    assert pool.num_cached == 9
    assert _run(driver, "c", np.arange(64)).num_cached_tokens == 48


def test_eviction_is_least_recently_used_and_a_tail_goes_before_its_head(make_driver):
    driver = _driver(make_driver, num_blocks=9)
    _run(driver, "old", np.arange(49))
    _run(driver, "new", np.arange(1000, 1049))
    # 3 + 3 cached and 2 blank: five blocks evict all of the older chain but nothing of the newer.
    _run(driver, "third", np.arange(2000, 2070))
    assert driver.scheduler.pool.num_evictions == 3
    assert _run(driver, "new again", np.arange(1000, 1049)).num_cached_tokens == 48

    driver = _driver(make_driver, num_blocks=9)
    _run(driver, "old", np.arange(81))
    _run(driver, "other", np.arange(1000, 1064))
    # 5 cached, 3 blank: four blocks evict one, the last of the chain.
    assert driver.scheduler.pool.num_evictions == 1
    assert _run(driver, "old again", np.arange(81)).num_cached_tokens == 64


def test_a_hit_protects_its_blocks_from_the_same_allocation(make_driver, counted):
    driver = _driver(make_driver, num_blocks=6)
    _run(driver, "a", np.arange(33))
    # Needs all 5 blocks: 2 hit and 3 new ones, which must not be the hit ones.
    b = driver.add("b", prompt=np.arange(75), max_tokens=4)
    driver.step()
    assert b.num_cached_tokens == 32
    assert len(set(driver.scheduler.kv.blocks_of(b.slot).tolist())) == 5
    driver.drain()
    counted(b)


def test_an_old_key_misses_after_its_block_was_reused(make_driver):
    driver = _driver(make_driver, num_blocks=6)
    _run(driver, "a", np.arange(64))
    _run(driver, "b", np.arange(1000, 1078))
    assert _run(driver, "c", np.arange(64)).num_cached_tokens == 0
    assert driver.scheduler.pool.num_evictions > 0


# --- Kept apart --------------------------------------------------------------------------------


def test_salt_separates_equal_prompts(make_driver):
    driver = _driver(make_driver)
    prompt = np.arange(40)
    _run(driver, "a", prompt, cache_salt="tenant 1")
    assert _run(driver, "b", prompt, cache_salt="tenant 2").num_cached_tokens == 0
    assert _run(driver, "c", prompt).num_cached_tokens == 0
    assert _run(driver, "d", prompt, cache_salt="tenant 1").num_cached_tokens == 32
    assert _run(driver, "e", prompt, cache_salt="").num_cached_tokens == 0


def test_request_may_skip_reading_but_still_writes(make_driver):
    driver = _driver(make_driver)
    prompt = np.arange(40)
    _run(driver, "a", prompt, skip_prefix_cache_read=True)
    assert _run(driver, "b", prompt, skip_prefix_cache_read=True).num_cached_tokens == 0
    assert driver.scheduler.stats.num_prefix_requests == 0
    assert _run(driver, "c", prompt).num_cached_tokens == 32


def test_off_means_no_hits_no_hashes_no_statistics(make_driver):
    driver = _driver(make_driver, enable_prefix_caching=False)
    prompt = np.arange(40)
    a = _run(driver, "a", prompt)
    assert _run(driver, "b", prompt).num_cached_tokens == 0
    assert a.block_hashes == []
    assert driver.scheduler.pool.num_cached == 0
    stats = driver.scheduler.stats
    assert stats.prefix_queries == stats.prefix_hits == stats.num_prefix_requests == 0


# --- Reset and statistics ----------------------------------------------------------------------


def test_reset_needs_idle_blocks_or_force(make_driver, counted):
    driver = _driver(make_driver)
    prompt = np.arange(40)
    _run(driver, "a", prompt)
    scheduler = driver.scheduler
    assert scheduler.reset_prefix_cache()
    assert scheduler.pool.num_cached == 0
    assert _run(driver, "b", prompt).num_cached_tokens == 0

    requests = [driver.add(name, prompt=np.arange(20), max_tokens=9) for name in "cde"]
    driver.step()
    assert not scheduler.reset_prefix_cache()
    assert scheduler.num_running == 3
    assert scheduler.reset_prefix_cache(force=True)
    assert scheduler.num_running == 0
    assert scheduler.waiting_requests == requests
    assert all(r.status == RequestStatus.PREEMPTED for r in requests)
    driver.drain()
    for request in requests:
        counted(request)


def test_one_query_for_each_admission(make_driver):
    driver = _driver(make_driver, num_blocks=9)
    _run(driver, "a", np.arange(40))
    driver.add("b", prompt=np.arange(1000, 1100), max_tokens=8)
    driver.step()
    c = driver.add("c", prompt=np.arange(40), max_tokens=8)
    for _ in range(4):
        driver.step()
    assert c.status == RequestStatus.WAITING
    stats = driver.scheduler.stats
    assert stats.num_prefix_requests == 2
    driver.drain()
    assert stats.num_prefix_requests == 3
    assert stats.prefix_queries == 40 + 100 + 40
    assert stats.prefix_hits == c.num_cached_tokens
