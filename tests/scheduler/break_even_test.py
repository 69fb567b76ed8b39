"""The arithmetic of break-even admission against closed forms and Monte Carlo."""

import math

import numpy as np
import pytest

from scheduler.break_even import Batch, expected_gain_and_cost, row_steps_per_preemption

NO_HAZARD = np.zeros(1)
FAR = 10**6


def batch(tokens, generated, bounds, free_blocks, capacity=1000, block_size=16):
    return Batch(
        np.array(tokens, float),
        np.array(generated, np.int64),
        np.array(bounds, np.int64),
        free_blocks,
        capacity,
        block_size,
    )


def constant_hazard(rate: float, length: int = 20000) -> np.ndarray:
    return rate * np.arange(length + 1.0)


def test_nobody_ends_is_the_time_to_fill_the_pool():
    rows = batch([1000] * 10, [0] * 10, [FAR] * 10, 100)
    # 100 blocks of 16 tokens shared by 10 rows that grow by one token a step.
    assert rows.steps_to_fill == 160
    assert row_steps_per_preemption(rows, NO_HAZARD, FAR + 1, math.inf) == pytest.approx(160)


def test_a_sure_end_within_reach_removes_the_risk():
    rows = batch([1000] * 10, [0] * 10, [FAR] * 9 + [100], 100)
    assert row_steps_per_preemption(rows, NO_HAZARD, FAR + 1, math.inf) > 1e9
    late = batch([1000] * 10, [0] * 10, [FAR] * 9 + [200], 100)
    assert row_steps_per_preemption(late, NO_HAZARD, FAR + 1, math.inf) == pytest.approx(160)


def test_no_blocks_left_is_worth_nothing():
    for free in (0, -5):
        rows = batch([1000] * 4, [0] * 4, [FAR] * 4, free)
        assert row_steps_per_preemption(rows, NO_HAZARD, FAR + 1, math.inf) == 0.0


@pytest.mark.parametrize("rate", [1e-4, 3e-4, 1e-3])
def test_large_ends_follow_the_exponential(rate):
    """Each end gives back more than growth can have taken: V = (exp(n rate T) - 1) / (n rate)."""
    n, free = 10, 200
    rows = batch([50000] * n, [0] * n, [FAR] * n, free, capacity=40000)
    total, fill = n * rate, free * 16 / n
    got = row_steps_per_preemption(rows, constant_hazard(rate), 1, math.inf)
    assert got == pytest.approx((math.exp(total * fill) - 1) / total, rel=0.03)


def test_small_ends_are_a_drift_against_growth():
    """Ends that give back little slow the growth down: V = T / (1 - rate * payback)."""
    n, free, rate = 100, 2000, 5e-3
    rows = batch([16] * n, [0] * n, [FAR] * n, free, capacity=40000)
    fill = free * 16 / n
    payback = (16 + 0.5 * fill) / n
    got = row_steps_per_preemption(rows, constant_hazard(rate), 1, math.inf)
    assert got == pytest.approx(fill / (1 - n * rate * payback), rel=0.05)


def test_matches_a_simulated_game():
    """Time in the game divided by the chance of losing it, played 20000 times."""
    rng = np.random.default_rng(0)
    n, size, free, rate = 20, 300.0, 60.0, 1.5e-3
    rows = batch([size] * n, [0] * n, [FAR] * n, free)
    fill, payback = rows.steps_to_fill, (size + 0.5 * rows.steps_to_fill) / n
    games, lost, steps = 20000, 0, 0.0
    for _ in range(games):
        level = 0.0  # in steps of growth above the start
        while True:
            wait = rng.exponential(1 / (n * rate))
            if level + wait >= fill:
                lost, steps = lost + 1, steps + fill - level
                break
            steps += wait
            level += wait - payback
            if level <= 0:
                break
    expected = steps / lost
    got = row_steps_per_preemption(rows, constant_hazard(rate), 1, math.inf)
    assert got == pytest.approx(expected, rel=0.1)


def test_stops_once_the_mind_is_made_up():
    rows = batch([5000] * 10, [0] * 10, [FAR] * 10, 500, capacity=40000)
    full = row_steps_per_preemption(rows, constant_hazard(1e-3), 1, math.inf)
    assert full > 2000
    assert 2000 <= row_steps_per_preemption(rows, constant_hazard(1e-3), 1, 2000.0) < full


def test_stride_of_the_hazard_table_changes_little():
    rows = batch([2000] * 10, [500] * 10, [FAR] * 10, 300, capacity=40000)
    fine = row_steps_per_preemption(rows, constant_hazard(1e-3), 1, math.inf)
    coarse = row_steps_per_preemption(rows, constant_hazard(1e-3)[::4], 4, math.inf)
    assert coarse == pytest.approx(fine, rel=0.1)


TIMES = np.unique(np.concatenate(([0], np.geomspace(8, 8192, 48)))).astype(np.int64)


def test_projection_sees_a_peak_behind_an_early_end():
    """One row ends at once and makes room, but the others are going to fill the pool and more."""
    tokens, bounds = [1500] * 10 + [100], [7000] * 10 + [6500]
    rows = batch(tokens, [0] * 11, bounds, 30, capacity=1000)
    gain, cost = expected_gain_and_cost(rows, NO_HAZARD, FAR + 1, TIMES, 100.0)
    # 1000 blocks hold 16000 tokens; they are full after about 80 steps.
    assert cost == pytest.approx(100 + 80, rel=0.25)
    assert gain < 80 / 11


def test_projection_of_a_batch_that_fits_costs_nothing():
    rows = batch([100] * 5, [0] * 5, [200] * 5, 900, capacity=1000)
    gain, cost = expected_gain_and_cost(rows, NO_HAZARD, FAR + 1, TIMES, 100.0)
    assert cost < 1e-6
    assert gain == pytest.approx(200 / 5, rel=0.1)
