"""How long outputs get: the hazard of ending at each length, learnt while requests run.

The model is the life-table estimate of survival analysis (the binned relative of the Kaplan-Meier
estimator): per bin of output length it counts how many requests ended there, of those that were at
risk. A request that still runs, was cut by its max_tokens or was aborted is at risk for the part
of a bin that it was seen in and then drops out, so the model is not misled by the short requests
that finish first. Where nothing has been seen, a scale-free prior of the weight of one
request stands in: log-uniform, every doubling up to the longest length is equally likely.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BIN_RATIO = 1.04
_TABLE_ENTRIES = 8192
_PRIOR_REQUESTS = 1.0


class LengthModel:
    """Distribution of output lengths in tokens, conditional on what was generated already.

    Attributes:
      stride: output tokens per entry of `cumulative_hazard`.
      num_finished: requests that ended by themselves.
    """

    def __init__(
        self,
        max_length: int,
        memory_requests: float | None = None,
        parent: LengthModel | None = None,
    ) -> None:
        """Args:
        max_length: longest output in tokens.
        memory_requests: ended requests after which evidence weighs 1/e; None never forgets.
        parent: model of a wider population with the same max_length, whose word counts as much as
          one request where this one has seen little.
        """
        self._parent = parent
        edges = [0]
        while edges[-1] < max_length:
            edges.append(min(max(edges[-1] + 1, int(edges[-1] * _BIN_RATIO)), max_length))
        bounds = np.array(edges, np.float64)
        self.stride = max(1, -(-max_length // _TABLE_ENTRIES))
        self.num_finished = 0
        self._num_bins = len(bounds) - 1
        self._last = int(bounds[-1])
        self._bounds = bounds
        self._widths = np.diff(bounds)
        lengths = np.arange(0, self._last + 2 * self.stride, self.stride)
        self._table_bins, self._table_parts = self._locate(lengths)
        left = np.log(max_length + 1.0) - np.log(bounds + 1.0)
        self._prior = _PRIOR_REQUESTS * (1.0 - left[1:] / left[:-1])
        self._at_risk = np.zeros(self._num_bins)
        self._ended = np.zeros(self._num_bins)
        # Evidence fades by giving later evidence more weight.
        self._weight = 1.0
        self._growth = 1.0 if memory_requests is None else float(np.exp(1.0 / memory_requests))
        self._hazard: NDArray[np.float64] | None = None

    def _locate(self, lengths: NDArray[np.integer]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Bins that lengths lie in and the part of the bin that lies below, in [0, 1]."""
        found = np.searchsorted(self._bounds, lengths, side="right") - 1
        bins = np.clip(found, 0, self._num_bins - 1)
        parts = (lengths - self._bounds[bins]) / self._widths[bins]
        return bins, np.clip(parts, 0.0, 1.0)

    def _passed(self, lengths: NDArray[np.integer]) -> NDArray[np.floating]:
        """Bins passed by outputs of these lengths, summed: float64 [bins]."""
        bins, parts = self._locate(lengths)
        count = np.bincount(bins, minlength=self._num_bins)
        beyond = count.sum() - np.cumsum(count)
        return beyond + np.bincount(bins, weights=parts, minlength=self._num_bins)

    def observe_progress(self, before: NDArray[np.integer], now: NDArray[np.integer]) -> None:
        """Requests whose outputs grew from `before` to `now` tokens, int [requests] each."""
        self._at_risk += self._weight * (self._passed(now) - self._passed(before))
        self._hazard = None

    def observe_end(self, length: int) -> None:
        """A request ended by itself (not by a limit, not aborted) after `length` tokens."""
        bins, _ = self._locate(np.array([max(length - 1, 0)]))
        i = int(bins[0])
        # It was at risk in the whole bin, though it was seen in a part of it only.
        unseen = (self._bounds[i + 1] - length) / self._widths[i]
        self._at_risk[i] += self._weight * max(unseen, 0.0)
        self._ended[i] += self._weight
        self.num_finished += 1
        self._weight *= self._growth
        if self._weight > 1e100:
            self._at_risk /= self._weight
            self._ended /= self._weight
            self._weight = 1.0
        self._hazard = None

    def _shares(self) -> NDArray[np.floating]:
        """Of those that enter a bin, the share that ends in it: float64 [bins]."""
        ended, at_risk = self._ended / self._weight, self._at_risk / self._weight
        prior = self._prior if self._parent is None else _PRIOR_REQUESTS * self._parent._shares()
        # Ends are counted at once, what running requests tell a little later.
        return (ended + prior) / (np.maximum(at_risk, ended) + _PRIOR_REQUESTS)

    @property
    def cumulative_hazard(self) -> NDArray[np.float64]:
        """-log of the share of outputs longer than i * stride tokens, float64 [entries].

        The probability that an output of g tokens so far reaches h tokens is
        exp(cumulative_hazard[g / stride] - cumulative_hazard[h / stride]).
        """
        if self._hazard is None:
            rate = -np.log1p(-np.minimum(self._shares(), 1.0 - 1e-9))
            upto = np.concatenate(([0.0], np.cumsum(rate)))
            self._hazard = upto[self._table_bins] + rate[self._table_bins] * self._table_parts
        return self._hazard

    def survival(self, length: int, beyond: int) -> float:
        """Probability that an output of `length` tokens so far reaches `beyond` tokens."""
        table = self.cumulative_hazard
        last = len(table) - 1
        now, then = (min(n // self.stride, last) for n in (length, beyond))
        return float(np.exp(table[now] - table[then]))


__all__ = ["LengthModel"]
