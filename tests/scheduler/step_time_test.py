"""The step-time model and its learner."""

import math

import numpy as np
import pytest

from scheduler.step_time import PRESETS, StepTimeLearner, StepTimeModel, fit_interval_times

TRUE = StepTimeModel(2.938e-3, 7.259e-6, 5e-6, 10e-9)


def observe(learner, model, steps, rng, noise=0.0):
    for _ in range(steps):
        prefill = int(rng.integers(0, 4000)) if rng.random() < 0.1 else 0
        decodes = int(rng.integers(1, 128))
        context = decodes * int(rng.integers(500, 5000))
        seconds = model.seconds(prefill, decodes, context)
        learner.observe(seconds * math.exp(noise * rng.normal()), prefill, decodes, context)


def test_seconds_is_the_sum_of_its_terms():
    expected = 2.938e-3 + 100 * 7.259e-6 + 3 * 5e-6 + 9000 * 10e-9
    assert TRUE.seconds(100, 3, 9000) == pytest.approx(expected)
    assert PRESETS["gb200"] == TRUE


def test_learns_exact_steps():
    learner = StepTimeLearner()
    observe(learner, TRUE, 200, np.random.default_rng(0))
    model = learner.model()
    assert model is not None
    for name in ("base", "per_prefill_token", "per_decode_seq", "per_context_token"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=1e-2)


def test_learns_noisy_steps_and_never_goes_negative():
    learner = StepTimeLearner()
    free_rows = StepTimeModel(10e-3, 50e-6, 0.0, 0.0)
    observe(learner, free_rows, 2000, np.random.default_rng(1), noise=0.2)
    model = learner.model()
    assert model is not None
    assert model.base == pytest.approx(10e-3, rel=0.1)
    assert model.per_prefill_token == pytest.approx(50e-6, rel=0.1)
    assert model.per_decode_seq >= 0 and model.per_context_token >= 0


def test_follows_a_change():
    learner = StepTimeLearner(memory_steps=500)
    rng = np.random.default_rng(2)
    observe(learner, TRUE, 2000, rng)
    twice = StepTimeModel(2 * TRUE.base, 2 * TRUE.per_prefill_token, 5e-6, 10e-9)
    observe(learner, twice, 4000, rng)
    model = learner.model()
    assert model is not None and model.base == pytest.approx(twice.base, rel=0.02)


def test_says_nothing_before_it_can_tell_prefill_from_decode():
    learner = StepTimeLearner()
    for _ in range(50):
        learner.observe(0.01, 0, 8, 1000)
    assert learner.model() is None
    learner.observe(0.05, 512, 8, 1000)
    assert learner.model() is not None


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_ignores_times_that_are_none(seconds):
    learner = StepTimeLearner()
    learner.observe(seconds, 10, 1, 10)
    assert learner.num_steps == 0


def test_fits_intervals():
    rng = np.random.default_rng(3)
    counts = rng.integers([1, 0, 1, 100], [300, 20000, 30000, 10**8], (60, 4)).astype(float)
    terms = np.array([TRUE.base, TRUE.per_prefill_token, TRUE.per_decode_seq, 10e-9])
    model = fit_interval_times(np.column_stack((counts @ terms, counts)))
    assert model.base == pytest.approx(TRUE.base, rel=1e-3)
    assert model.per_prefill_token == pytest.approx(TRUE.per_prefill_token, rel=1e-3)


def test_intervals_without_a_fixed_cost_are_refused():
    rows = np.array([[d * 1e-3, 10, 0, d, 0] for d in (10.0, 20.0, 40.0, 80.0)])
    with pytest.raises(ValueError, match="fixed cost"):
        fit_interval_times(rows)


@pytest.mark.parametrize(
    ("field", "value"), [("base", 0.0), ("base", math.nan), ("per_prefill_token", -1e-6)]
)
def test_refuses_a_wrong_model(field, value):
    terms = {"base": 1e-3, "per_prefill_token": 0, "per_decode_seq": 0, "per_context_token": 0}
    with pytest.raises(ValueError, match=field):
        StepTimeModel(**{**terms, field: value})
