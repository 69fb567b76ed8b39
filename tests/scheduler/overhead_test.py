"""The cost of a step grows far slower than the batch."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import scheduler_overhead as overhead


def test_cost_grows_far_slower_than_the_batch():
    # The fastest tenth of the steps: other work on the machine only ever adds.
    def cost(running: int) -> float:
        return float(np.quantile(overhead.time_decode(running, False, 150), 0.1))

    small, large = cost(32), cost(1024)
    assert large < 8 * small, "32 times the requests"


def test_benchmark_prints_its_rows_as_json(capsys):
    overhead.main(["--json", "--running", "1", "4", "--steps", "30"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["running"], row["prefix_caching"]) for row in rows] == [
        (1, False),
        (1, True),
        (4, False),
        (4, True),
    ]
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("running", "limit_us"), [(32, 60), (256, 150), (1024, 400), (4096, 1500)])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_decode_stays_within_its_budget(running, limit_us, prefix_caching):
    assert 1e6 * np.median(overhead.time_decode(running, prefix_caching, 1000)) <= limit_us


@pytest.mark.slow
@pytest.mark.parametrize(("prefix_caching", "limit_us"), [(False, 500), (True, 1000)])
def test_prefill_stays_within_its_budget(prefix_caching, limit_us):
    assert 1e6 * np.median(overhead.time_prefill(prefix_caching, 200)) <= limit_us
