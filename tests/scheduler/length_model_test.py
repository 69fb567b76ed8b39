"""The length model against known distributions, censored and changing ones."""

import numpy as np
import pytest

from scheduler.length_model import LengthModel


def feed(model: LengthModel, lengths: np.ndarray, bound: int | None = None) -> None:
    """Each length is observed from its start to its end, or to `bound` where that comes first."""
    for length in lengths.tolist():
        seen = length if bound is None else min(length, bound)
        model.observe_progress(np.array([0]), np.array([seen]))
        if seen == length:
            model.observe_end(length)


def test_nothing_known_is_log_uniform():
    model = LengthModel(8191)
    for length in (63, 511, 4095):
        left = 13 - np.log2(length + 1)
        assert model.survival(0, length) == pytest.approx(left / 13, abs=0.02)
        assert model.survival(length, 2 * length + 1) == pytest.approx(1 - 1 / left, abs=0.02)
    assert model.survival(100, 100) == 1.0


def test_survival_of_a_known_distribution():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(400), 0.8, 4000).astype(int).clip(1, 8000)
    model = LengthModel(8192)
    feed(model, lengths)
    for at in (100, 400, 1000):
        assert model.survival(0, at) == pytest.approx(np.mean(lengths > at), abs=0.03)
    old = lengths[lengths > 400]
    assert model.survival(400, 1000) == pytest.approx(np.mean(old > 1000), abs=0.04)


def test_requests_cut_short_are_not_taken_for_short_ones():
    lengths = np.random.default_rng(1).integers(100, 1000, 3000)
    model = LengthModel(8192)
    feed(model, lengths, bound=500)
    assert model.num_finished == np.count_nonzero(lengths <= 500)
    assert model.survival(0, 400) == pytest.approx(np.mean(lengths > 400), abs=0.03)
    # Beyond the bound nothing was seen: the prior speaks, not a wall at 500.
    assert model.survival(500, 900) > 0.3


def test_running_requests_are_evidence():
    """128 requests have run for 1000 tokens and none has ended: ends before 1000 are unlikely."""
    model = LengthModel(8192)
    before = np.zeros(128, np.int64)
    for _ in range(10):
        model.observe_progress(before, before + 100)
        before = before + 100
    assert model.survival(0, 1000) > 0.9
    assert model.survival(1000, 2001) == pytest.approx(2 / 3, abs=0.05)


def test_progress_in_pieces_equals_progress_at_once():
    whole, pieces = LengthModel(4096), LengthModel(4096)
    whole.observe_progress(np.array([3, 40]), np.array([777, 1500]))
    for a, b in (([3, 40], [20, 41]), ([20, 41], [300, 900]), ([300, 900], [777, 1500])):
        pieces.observe_progress(np.array(a), np.array(b))
    np.testing.assert_allclose(whole.cumulative_hazard, pieces.cumulative_hazard)


def test_forgets_an_old_regime():
    model = LengthModel(8192, memory_requests=100)
    rng = np.random.default_rng(2)
    feed(model, rng.integers(100, 200, 1000))
    assert model.survival(0, 300) < 0.02
    feed(model, rng.integers(1000, 2000, 500))
    assert model.survival(0, 300) > 0.9
    assert model.survival(0, 2200) < 0.1


@pytest.mark.parametrize("max_length", [1, 2, 100, 131072, 1_000_000])
def test_any_longest_length(max_length):
    model = LengthModel(max_length)
    feed(model, np.array([1, max(1, max_length // 2), max_length]))
    hazard = model.cumulative_hazard
    assert len(hazard) <= 8192 + 2
    assert np.isfinite(hazard).all() and (np.diff(hazard) >= 0).all() and hazard[0] == 0
    assert 0.0 <= model.survival(0, max_length) <= 1.0


def test_a_class_starts_from_its_parent_and_then_speaks_for_itself():
    everyone = LengthModel(4096)
    feed(everyone, np.random.default_rng(0).integers(100, 200, 300))
    mine = LengthModel(4096, parent=everyone)
    assert mine.survival(0, 150) == pytest.approx(everyone.survival(0, 150))
    feed(mine, np.random.default_rng(1).integers(1000, 1100, 100))
    assert everyone.survival(0, 300) < 0.05
    assert mine.survival(0, 300) > 0.9
