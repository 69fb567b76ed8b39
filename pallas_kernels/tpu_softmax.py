"""The arithmetic of one tile of scores, shared by the attention kernels.

Scores are in base 2: log2(e) is folded into their scale, so that the exponential is one
transcendental operation without a multiplication.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

LOG2E = math.log2(math.e)
# Finite, so that differences of masked scores are numbers.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Static part of the softmax: scale on raw products and soft cap, for `dtype` operands."""

    sm_scale: float
    soft_cap: float | None
    dtype: jnp.dtype

    @property
    def precision(self) -> jax.lax.Precision:
        exact = self.dtype == jnp.float32
        return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    def operand(self, stored: jax.Array) -> jax.Array:
        """Stored keys or values as an MXU operand; every stored type is exact in bfloat16."""
        if stored.dtype == self.dtype:
            return stored
        if stored.dtype.itemsize == 1:
            stored = stored.astype(jnp.float32)
        return stored.astype(self.dtype)

    def products(self, q: jax.Array, keys: jax.Array) -> jax.Array:
        """q [M, L], keys [K, L] -> float32 [M, K]."""
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(
            q, keys, dims, precision=self.precision, preferred_element_type=jnp.float32
        )

    def weighted(self, weights: jax.Array, values: jax.Array) -> jax.Array:
        """weights float32 [M, K], values [K, L] -> float32 [M, L]."""
        dims = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(
            weights.astype(self.dtype),
            values,
            dims,
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def scores(self, products: jax.Array, key_scale: jax.Array | None) -> jax.Array:
        """Raw products to base-2 scores. key_scale broadcasts against products, or None for 1."""
        if self.soft_cap is None:
            scale = self.sm_scale * LOG2E
            return products * (scale if key_scale is None else key_scale * scale)
        scale = self.sm_scale / self.soft_cap
        scaled = products * (scale if key_scale is None else key_scale * scale)
        return jnp.tanh(scaled) * (self.soft_cap * LOG2E)


def update(
    scores: jax.Array, top: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One step of the running softmax.

    scores: [M, K]; top: [M, 128], the running maximum in every lane; total: [M, 128], partial sums
    by lane (added across lanes once, at the end). Returns the weights [M, K], the factor on what
    was accumulated before [M, 128], and the new top and total.
    """
    new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
    factor = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - spread(new_top, scores.shape[1]))
    lanes = top.shape[1]
    total = total * factor
    for start in range(0, scores.shape[1], lanes):
        total = total + weights[:, start : start + lanes]
    return weights, factor, new_top, total


def spread(lanes: jax.Array, width: int) -> jax.Array:
    """[M, 128] with equal lanes -> [M, width], width a multiple of 128: no data moves."""
    if lanes.shape[1] == width:
        return lanes
    return jnp.concatenate([lanes] * (width // lanes.shape[1]), axis=1)


def normalize(accumulated: jax.Array, total: jax.Array) -> jax.Array:
    """accumulated [M, L] over the sum of total [M, 128]; zero where nothing was summed."""
    denominator = jnp.sum(total, axis=1, keepdims=True)
    return accumulated / jnp.where(denominator == 0.0, 1.0, denominator)
