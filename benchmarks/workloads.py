"""Named workloads with fixed seeds, for comparing admission policies beside recorded traces.

Each generator states in one line what it stresses. Sizes and seeds are part of the definition:
they were fixed before any policy was measured on them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from scheduler.workload import Workload, make_workload


def _lognormal(
    rng: np.random.Generator, median: float, sigma: float, low: int, high: int, n: int
) -> NDArray[np.int64]:
    return np.clip(rng.lognormal(np.log(median), sigma, n), low, high).astype(np.int64)


def _uniform(rng: np.random.Generator, mean: float, spread: float, n: int) -> NDArray[np.int64]:
    return rng.uniform(mean * (1 - spread), mean * (1 + spread), n).astype(np.int64)


def heavy_tail(seed: int = 11, n: int = 1500) -> Workload:
    """Lognormal outputs (median 400, mean about 800) under a max_tokens of 7000 that tells nothing."""
    rng = np.random.default_rng(seed)
    prompts = _lognormal(rng, 300, 0.8, 16, 1100, n)
    outputs = _lognormal(rng, 400, 1.2, 4, 7000, n)
    return make_workload(
        "heavy_tail", prompts, outputs, max_tokens=7000, max_concurrency=200, num_blocks=8000
    )


def chat_and_reasoning(seed: int = 12, n: int = 1200) -> Workload:
    """Three short chats to one long chain of thought, told apart by nothing but their age."""
    rng = np.random.default_rng(seed)
    reasons = rng.random(n) < 0.25
    prompts = _lognormal(rng, 250, 0.7, 16, 1500, n)
    outputs = np.where(
        reasons, _lognormal(rng, 3000, 0.35, 500, 6500, n), _lognormal(rng, 220, 0.6, 8, 1500, n)
    )
    return make_workload(
        "chat_and_reasoning", prompts, outputs, max_concurrency=160, num_blocks=9000
    )


def long_prompts(seed: int = 13, n: int = 600) -> Workload:
    """Prompts of 2000-7000 tokens, answers of about 200: recomputing is dear, growth is small."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2000, 7000, n)
    outputs = _lognormal(rng, 180, 0.6, 10, 1000, n)
    return make_workload("long_prompts", prompts, outputs, max_concurrency=64, num_blocks=10000)


def bursts(seed: int = 14, n: int = 1200) -> Workload:
    """Open loop: a trickle, and every 25 s a burst of 110 requests within one second."""
    rng = np.random.default_rng(seed)
    size = 150
    at: list[float] = []
    for burst in range(-(-n // size)):
        start = 25.0 * burst
        at.extend(start + rng.random(110))
        at.extend(start + 25.0 * rng.random(size - 110))
    arrivals = np.sort(np.array(at[:n]))
    prompts = _uniform(rng, 500, 0.6, n)
    outputs = _lognormal(rng, 1300, 0.5, 100, 5000, n)
    return make_workload("bursts", prompts, outputs, arrivals=arrivals, num_blocks=8000)


def regime_change(seed: int = 15, n: int = 1200) -> Workload:
    """Outputs of about 500 tokens for the first half, of about 3000 for the second."""
    rng = np.random.default_rng(seed)
    first = np.arange(n) < n // 2
    prompts = _uniform(rng, 600, 0.5, n)
    outputs = np.where(first, _uniform(rng, 500, 0.4, n), _uniform(rng, 3000, 0.3, n))
    return make_workload("regime_change", prompts, outputs, max_concurrency=140, num_blocks=10000)


def tiny_pool(seed: int = 16, n: int = 500) -> Workload:
    """A pool that holds about six requests at full length: the law of large numbers is no help."""
    rng = np.random.default_rng(seed)
    prompts = _uniform(rng, 120, 0.5, n)
    outputs = _uniform(rng, 500, 0.6, n)
    return make_workload(
        "tiny_pool", prompts, outputs, max_concurrency=24, num_blocks=256, max_model_len=2048
    )


def short_answers(seed: int = 17, n: int = 4000) -> Workload:
    """Open loop near saturation, answers of about 60 tokens: rows come and go within a second."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / 95.0, n))
    prompts = _lognormal(rng, 700, 0.7, 32, 4000, n)
    outputs = _lognormal(rng, 60, 0.7, 2, 400, n)
    return make_workload("short_answers", prompts, outputs, arrivals=arrivals, num_blocks=4000)


def promised_lengths(seed: int = 18, n: int = 700) -> Workload:
    """Every output runs to its own max_tokens, so that the bound is the length."""
    rng = np.random.default_rng(seed)
    prompts = _uniform(rng, 400, 0.8, n)
    outputs = rng.choice(np.array([256, 1024, 4096]), n, p=[0.4, 0.4, 0.2])
    return make_workload(
        "promised_lengths",
        prompts,
        outputs,
        max_tokens=outputs,
        max_concurrency=128,
        num_blocks=7000,
    )


def half_load(seed: int = 19, n: int = 600) -> Workload:
    """Never uses half the pool: no watermark may cost anything here."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / 6.0, n))
    prompts = _uniform(rng, 600, 0.5, n)
    outputs = _uniform(rng, 800, 0.6, n)
    return make_workload("half_load", prompts, outputs, arrivals=arrivals, num_blocks=3000)


GENERATORS: dict[str, Callable[..., Workload]] = {
    generator.__name__: generator
    for generator in (
        heavy_tail,
        chat_and_reasoning,
        long_prompts,
        bursts,
        regime_change,
        tiny_pool,
        short_answers,
        promised_lengths,
        half_load,
    )
}
