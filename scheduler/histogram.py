"""Summaries of unbounded streams in bounded memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_LOWEST = 1e-6
_PER_E = 200.0
_NUM_BINS = 5000


class Histogram:
    """Positive values in logarithmic bins of half a percent, each with its sum.

    A percentile is the mean of the values in its bin, so it is exact where a bin holds one
    distinct value and within half a percent elsewhere. Values below 1 us count as 1 us.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BINS, np.int64)
        self._sums = np.zeros(_NUM_BINS)

    def add_many(self, values: NDArray[np.floating]) -> None:
        """Adds float [n] values, n at least 1."""
        low, high = float(values.min()), float(values.max())
        if high - low <= 1e-9 * high:
            i = self._bin(high)
            self._counts[i] += len(values)
            self._sums[i] += high * len(values)
            return
        bins = (np.log(np.maximum(values, _LOWEST) / _LOWEST) * _PER_E).astype(np.int64)
        np.minimum(bins, _NUM_BINS - 1, out=bins)
        np.add.at(self._counts, bins, 1)
        np.add.at(self._sums, bins, values)

    def _bin(self, value: float) -> int:
        return min(int(math.log(max(value, _LOWEST) / _LOWEST) * _PER_E), _NUM_BINS - 1)

    @property
    def count(self) -> int:
        """Values added so far."""
        return int(self._counts.sum())

    def percentile(self, q: float) -> float:
        """Value below which q percent lie; 0.0 if there is none."""
        total = self.count
        if not total:
            return 0.0
        rank = max(1, math.ceil(q / 100.0 * total))
        i = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(self._sums[i] / self._counts[i])


class Timeline:
    """Evenly thinned samples of a series; at most 4096 are kept."""

    def __init__(self, columns: int) -> None:
        """`columns`: numbers in each sample."""
        self.maximum = np.full(columns, -math.inf)
        self._rows = np.zeros((4096, columns))
        self._count = 0
        self._stride = 1
        self._skipped = 0
        self._last: tuple[float, ...] = ()

    def add(self, *values: float) -> None:
        """Adds one sample."""
        self._last = values
        np.maximum(self.maximum, values, out=self.maximum)
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        if self._count == len(self._rows):
            kept = self._rows[1::2].copy()
            self._rows[: len(kept)] = kept
            self._count = len(kept)
            self._stride *= 2
        self._rows[self._count] = values
        self._count += 1

    def samples(self) -> NDArray[np.float64]:
        """float64 [samples, columns], in order, the last sample included."""
        rows = self._rows[: self._count]
        if self._skipped:
            rows = np.concatenate((rows, [self._last]))
        return rows.copy()


__all__ = ["Histogram", "Timeline"]
