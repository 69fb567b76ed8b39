"""How long a step takes: a linear model, presets of it, and a learner from observed steps."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True)
class StepTimeModel:
    """Seconds of a step: base + per_prefill_token * p + per_decode_seq * d + per_context_token * c.

    Attributes:
      base: seconds of a step whatever it runs (weights read, launch).
      per_prefill_token: seconds for each token of rows that are not decodes.
      per_decode_seq: seconds for each decoding row.
      per_context_token: seconds for each token of context, summed over the decoding rows.
    """

    base: float
    per_prefill_token: float
    per_decode_seq: float
    per_context_token: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"step model: {field.name}={value} must be a number of at least 0")
        if self.base <= 0:
            raise ValueError(f"step model: base={self.base} must be more than 0 seconds")

    def seconds(self, num_prefill_tokens: int, num_decodes: int, context_tokens: int) -> float:
        """Duration of one step in seconds."""
        return (
            self.base
            + self.per_prefill_token * num_prefill_tokens
            + self.per_decode_seq * num_decodes
            + self.per_context_token * context_tokens
        )


PRESETS: dict[str, StepTimeModel] = {
    # A large mixture-of-experts model on a GB200 node, as fitted to its published benchmark.
    "gb200": StepTimeModel(2.938e-3, 7.259e-6, 5e-6, 10e-9),
    # SmolLM2-135M in float32 on two CPU cores: bound by arithmetic, so a row is nearly full price.
    "cpu": StepTimeModel(30e-3, 0.5e-3, 6e-3, 1e-6),
    # The same engine where attention dominates: no fixed cost worth sharing among rows.
    "flat": StepTimeModel(1e-4, 20e-6, 1e-4, 50e-9),
}

_MEMORY_STEPS = 20_000.0
_MIN_STEPS = 8


class StepTimeLearner:
    """Least squares over observed steps, relative errors, old steps fading out.

    Normal equations of the four coefficients are kept, so that an observation is a handful of
    multiplications and memory does not grow. Coefficients below zero are taken out one by one
    (a step does not get faster with more work).
    """

    def __init__(self, memory_steps: float = _MEMORY_STEPS) -> None:
        """`memory_steps`: steps after which an observation weighs 1/e."""
        self._keep = math.exp(-1.0 / memory_steps)
        self._weight = 1.0
        self._sums = [0.0] * 10
        self._rights = [0.0] * 4
        self.num_steps = 0
        self._has_prefill = False
        self._has_pure_decode = False

    @property
    def is_ready(self) -> bool:
        """Whether steps with and without prefill were seen, so that their costs can be told apart."""
        return self.num_steps >= _MIN_STEPS and self._has_prefill and self._has_pure_decode

    def observe(
        self, step_seconds: float, num_prefill_tokens: int, num_decodes: int, context_tokens: int
    ) -> None:
        """One step that took `step_seconds`; steps without a positive finite time are ignored."""
        if not (step_seconds > 0.0 and math.isfinite(step_seconds)):
            return
        # Instead of letting all sums fade, later observations weigh more.
        self._weight /= self._keep
        if self._weight > 1e100:
            self._rescale()
        w = self._weight / (step_seconds * step_seconds)
        p, d, c = float(num_prefill_tokens), float(num_decodes), float(context_tokens)
        s, r = self._sums, self._rights
        wp, wd, wc = w * p, w * d, w * c
        s[0] += w
        s[1] += wp
        s[2] += wd
        s[3] += wc
        s[4] += wp * p
        s[5] += wp * d
        s[6] += wp * c
        s[7] += wd * d
        s[8] += wd * c
        s[9] += wc * c
        r[0] += w * step_seconds
        r[1] += wp * step_seconds
        r[2] += wd * step_seconds
        r[3] += wc * step_seconds
        self.num_steps += 1
        if num_prefill_tokens:
            self._has_prefill = True
        elif num_decodes:
            self._has_pure_decode = True

    def _rescale(self) -> None:
        self._sums = [value / self._weight for value in self._sums]
        self._rights = [value / self._weight for value in self._rights]
        self._weight = 1.0

    def model(self) -> StepTimeModel | None:
        """The fitted model, or None while nothing tells prefill from decode."""
        if not self.is_ready:
            return None
        s = self._sums
        normal = np.array(
            [
                [s[0], s[1], s[2], s[3]],
                [s[1], s[4], s[5], s[6]],
                [s[2], s[5], s[7], s[8]],
                [s[3], s[6], s[8], s[9]],
            ]
        )
        solution = _non_negative(normal, np.array(self._rights))
        return StepTimeModel(max(solution[0], 1e-9), *solution[1:])


def fit_interval_times(intervals: NDArray[np.float64]) -> StepTimeModel:
    """Fits a model to stretches of busy time, relative errors weighing equally.

    Args:
      intervals: float64 [n, 5]: seconds, and the sums over the stretch of steps, prefill tokens,
        decoding rows and context tokens. Single steps have 1 for steps.

    Raises:
      ValueError: the stretches are too alike to tell a fixed cost.
    """
    scaled = intervals[:, 1:] / intervals[:, :1]
    solution = _non_negative(scaled.T @ scaled, scaled.sum(axis=0))
    if solution[0] * scaled[:, 0].mean() < 1e-3:
        raise ValueError(
            "the steps observed do not show a fixed cost per step; observe lighter and heavier load"
        )
    return StepTimeModel(*solution)


def _non_negative(normal: NDArray[np.float64], right: NDArray[np.float64]) -> list[float]:
    """Solves normal @ x = right with x >= 0, dropping the most negative unknown until none is."""
    scale = np.sqrt(np.maximum(np.diag(normal), 1e-300))
    matrix = normal / np.outer(scale, scale)
    vector = right / scale
    kept = [i for i in range(len(right)) if normal[i, i] > 0]
    solution = np.zeros(len(right))
    while kept:
        # The ridge decides between unknowns that the steps seen so far cannot tell apart.
        part = matrix[np.ix_(kept, kept)] + 1e-9 * np.eye(len(kept))
        values = np.linalg.solve(part, vector[kept])
        worst = int(np.argmin(values))
        if values[worst] >= 0:
            solution[kept] = values
            break
        del kept[worst]
    return (solution / scale).tolist()


__all__ = ["PRESETS", "StepTimeLearner", "StepTimeModel", "fit_interval_times"]
