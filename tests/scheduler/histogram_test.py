"""Summaries of streams."""

import numpy as np
import pytest

from scheduler.histogram import Histogram, Timeline


@pytest.mark.parametrize("q", [1, 50, 90, 99, 99.5, 100])
def test_percentiles_are_within_half_a_percent(q):
    values = np.random.default_rng(0).lognormal(-5, 1.5, 20000)
    histogram = Histogram()
    for chunk in np.split(values, 200):
        histogram.add_many(chunk)
    assert histogram.count == 20000
    expected = np.percentile(values, q, method="inverted_cdf")
    assert histogram.percentile(q) == pytest.approx(expected, rel=0.006)


def test_repeated_values_are_exact():
    histogram = Histogram()
    histogram.add_many(np.full(90, 0.0123))
    histogram.add_many(np.full(10, 4.5))
    assert histogram.percentile(50) == pytest.approx(0.0123, rel=1e-9)
    assert histogram.percentile(99) == pytest.approx(4.5, rel=1e-9)


def test_empty_and_extreme():
    assert Histogram().percentile(50) == 0.0
    histogram = Histogram()
    histogram.add_many(np.array([1e-12, 1e9]))
    assert histogram.percentile(1) == pytest.approx(1e-12)
    assert histogram.percentile(100) == pytest.approx(1e9)


@pytest.mark.parametrize("n", [0, 1, 4096, 4097, 50000])
def test_timeline_keeps_ends_and_order(n):
    timeline = Timeline(columns=2)
    for i in range(n):
        timeline.add(float(i), float(i % 1000))
    samples = timeline.samples()
    assert samples.shape[1] == 2 and len(samples) <= 4097
    if n:
        assert (np.diff(samples[:, 0]) > 0).all() and samples[-1, 0] == n - 1
        assert timeline.maximum[1] == min(n - 1, 999)
    if n > 10000:
        assert len(samples) > 2000
