"""The arithmetic of break-even admission: what a candidate gains and what it may cost.

Two questions are asked about a batch with a candidate in it, both in steps from now.

*Now or later?* Until the next requests end, the free blocks only shrink. If blocks given back
bring them up to today's level first, waiting would have admitted the candidate at that moment:
its early presence was free row-steps. If the free blocks run out first, the candidate, being the
youngest, is preempted. Let V(x) be the expected row-steps gained per preemption risked, with x
free blocks: expected time in this game divided by the probability of losing it. Growth eats one
block after the other and ends give back many at once, so V follows the equation of a scale
function of such a process (first-step analysis):

    V'(t) = 1 + rate(t) * (V(t) - E V(t - payback)),   V(0) = 0

with t the steps of growth that fit into x blocks, rate the expected ends per step, and payback
the steps of growth that an ended request's blocks make up for. Nobody about to end: V = t, the
fluid limit. One sure end within reach: V is without bound. V times the worth of a row-step is
compared with the cost of a recomputation.

*At all?* A peak may lie far ahead, beyond ends in the near future. The expected use of the pool
is projected over the whole horizon, and the row-steps until the overflow are weighed against the
recomputation at that time.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

_BINS = 24
_MAX_PROJECTED_ROWS = 64
# A hazard that stands for certainty: exp(-30) is as good as nothing.
_CERTAIN = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The running requests and, last, the candidate.

    Attributes:
      tokens: float64 [n], known tokens, prompt and output.
      generated: int64 [n], output tokens so far.
      bounds: int64 [n], most output tokens.
      free_blocks: blocks left once all of them hold what they know. May be negative.
      capacity_blocks: blocks of the whole pool that can be used.
      block_size: tokens per block.
      classes: int64 [n], row of the hazard table for each request where it has several.
    """

    tokens: NDArray[np.float64]
    generated: NDArray[np.int64]
    bounds: NDArray[np.int64]
    free_blocks: float
    capacity_blocks: int
    block_size: int
    classes: NDArray[np.int64] | None = None

    @property
    def steps_to_fill(self) -> float:
        """Steps until growth has used the free blocks, if nobody ends."""
        return max(self.free_blocks * self.block_size / len(self.tokens), 1e-9)


def row_steps_per_preemption(
    batch: Batch, cumulative_hazard: NDArray[np.float64], stride: int, enough: float
) -> float:
    """V of the module's comment: row-steps gained before giving way, per preemption risked.

    Args:
      batch: the candidate included.
      cumulative_hazard, stride: of `LengthModel`; float64 [entries] or [classes, entries].
      enough: a value of V at which the caller's mind is made up; the sum stops there.
    """
    fill = batch.steps_to_fill
    if fill >= enough or batch.free_blocks <= 0:
        return fill if batch.free_blocks > 0 else 0.0
    bins = max(1, min(_BINS, int(fill)))
    width = fill / bins
    now = batch.generated
    times = (np.arange(bins + 1) * width).astype(np.int64)
    reach = np.minimum(now[:, None] + times, batch.bounds[:, None])
    if stride > 1:
        reach //= stride
    hazard = _look_up(cumulative_hazard, batch.classes, reach)
    by_bin = hazard.sum(axis=0)
    # Times are whole steps, so bins differ by one; rates are per bin of equal width.
    rates = (by_bin[1:] - by_bin[:-1]) * (width / np.maximum(np.diff(times), 1))
    weights = hazard[:, -1] - hazard[:, 0]
    left = batch.bounds - now
    (sure,) = np.nonzero(left <= fill)
    if len(sure):
        weights[sure] += _CERTAIN
        at = np.minimum((np.maximum(left[sure], 0) / width).astype(np.int64), bins - 1)
        rates = rates + _CERTAIN * np.bincount(at, minlength=bins)
    total = float(weights.sum())
    if total <= 0.0:
        return fill
    # Steps of growth that each request's blocks make up for, in bins.
    paybacks = (batch.tokens + 0.5 * fill) / len(batch.tokens) / width
    return _solve(rates.tolist(), *_payback_shares(paybacks, weights / total, bins), width, enough)


def _look_up(
    cumulative_hazard: NDArray[np.float64],
    classes: NDArray[np.int64] | None,
    entries: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Values of the hazard table at int64 [n, k] entries, each row in the table of its class."""
    width = cumulative_hazard.shape[-1]
    entries = np.minimum(entries, width - 1)
    if classes is not None:
        entries += (classes * width)[:, None]
    return cumulative_hazard.ravel()[entries]


def _payback_shares(
    paybacks: NDArray[np.float64], weights: NDArray[np.float64], bins: int
) -> tuple[float, float, NDArray[np.float64]]:
    """Splits ends into small ones (below one bin: their mean) and large ones (by whole bins).

    Returns:
      Bins made up for by small ends (weighted), the share of large ends, and float64 [bins + 2]
      the shares of large ends by payback; those of `bins` and more end the game.
    """
    small = paybacks < 1.0
    drift = float((weights * paybacks)[small].sum())
    large = ~small
    sizes, shares = np.minimum(paybacks[large], bins), weights[large]
    whole = sizes.astype(np.int64)
    upper = shares * (sizes - whole)
    by_payback = np.zeros(bins + 2)
    np.add.at(by_payback, whole, shares - upper)
    np.add.at(by_payback, whole + 1, upper)
    return drift, float(shares.sum()), by_payback


def _solve(
    rates: list[float],
    drift: float,
    large_share: float,
    by_payback: NDArray[np.float64],
    width: float,
    enough: float,
) -> float:
    """Integrates V' = 1 + rate (V - E V(t - payback)) over bins of `width` steps."""
    values = np.zeros(len(rates) + 1)
    value = 0.0
    for j, rate in enumerate(rates):
        # Small ends are a drift against the growth; once they outweigh it nothing is risked.
        growth = 1.0 - rate * drift
        if growth <= 0.02:
            return math.inf
        large = rate * large_share / growth
        returned = rate * float(by_payback[1 : j + 1] @ values[j - 1 :: -1]) if j else 0.0
        factor = math.exp(min(large, 50.0))
        mean = (factor - 1.0) / large if large > 1e-9 else 1.0
        value = max(value * factor + (width - returned) / growth * mean, value + width)
        if value >= enough:
            return value
        values[j + 1] = value
    return value


def expected_gain_and_cost(
    batch: Batch,
    cumulative_hazard: NDArray[np.float64],
    stride: int,
    times: NDArray[np.int64],
    own_tokens: float,
) -> tuple[float, float]:
    """Weighs the candidate's row-steps until the pool overflows against its recomputation.

    Args:
      batch: the candidate included.
      cumulative_hazard, stride: of `LengthModel`; float64 [entries] or [classes, entries].
      times: int64 [k], steps from now at which the pool is looked at, ascending from 0.
      own_tokens: what the candidate would recompute if it were preempted at once.

    Returns:
      Expected share of a step's fixed cost that its presence saves, summed over steps; and the
      expected tokens to recompute.
    """
    n, size = len(batch.tokens), batch.block_size
    rows, scale = _sample_rows(batch.tokens)
    tokens, now, bounds = batch.tokens[rows], batch.generated[rows], batch.bounds[rows]
    classes = None if batch.classes is None else batch.classes[rows]
    later = now[:, None] + times
    alive = later < bounds[:, None]
    if stride > 1:
        later, now = later // stride, now // stride
    present = _look_up(cumulative_hazard, classes, now[:, None]) - _look_up(
        cumulative_hazard, classes, later
    )
    np.exp(present, out=present)
    present *= alive
    # A row's last block is half empty on average.
    blocks = tokens[:, None] + times
    blocks += 0.5 * (size - 1)
    blocks /= size
    expected = blocks * present
    candidate, stays = blocks[-1], present[-1]
    used = scale * expected[:-1].sum(axis=0) + candidate
    share = np.minimum(candidate / used, 1.0 / n)
    blocks -= expected  # in place: `candidate` is gone from here on
    blocks *= expected
    spread = scale * blocks[:-1].sum(axis=0)
    full = _normal_cdf((used - batch.capacity_blocks) / np.sqrt(spread + 1.0))
    full = np.maximum.accumulate(full)
    density = (1.0 - full) * stays * share
    gain = float((0.5 * (density[1:] + density[:-1]) * np.diff(times)).sum())
    middle = 0.5 * (times[1:] + times[:-1])
    loss = np.diff(full) * 0.5 * (stays[1:] + stays[:-1])
    cost = float((loss * (own_tokens + middle)).sum() + full[0] * own_tokens)
    return gain, cost


def _sample_rows(tokens: NDArray[np.float64]) -> tuple[NDArray[np.intp] | slice, float]:
    """Rows that stand for a large batch, the last one among them, and how many each stands for.

    Running order is order of age, so that evenly spaced rows are a good sample of ages and sizes.
    The number is by tokens, so that today's use of the pool is right.
    """
    n = len(tokens)
    if n <= _MAX_PROJECTED_ROWS:
        return slice(None), 1.0
    rows = np.linspace(0, n - 1, _MAX_PROJECTED_ROWS).astype(np.intp)
    return rows, float(tokens[:-1].sum() / tokens[rows[:-1]].sum())


def _normal_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logistic approximation of the normal distribution function, within 0.01."""
    return 1.0 / (1.0 + np.exp(-1.702 * np.clip(x, -25.0, 25.0)))


__all__ = ["Batch", "expected_gain_and_cost", "row_steps_per_preemption"]
