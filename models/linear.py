"""Linear layers: one module, several physical layouts."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Quantization = Literal["int8"]


class Linear(nnx.Module):
    """y = x @ kernel (+ bias), in x's dtype with float32 accumulation.

    The logical weight is [in_features, out_features] in floating point. How it is stored is the
    module's own business; set it with `load`, read it back with `logical`.

    Attributes:
      in_features, out_features: sizes.
      dtype: of the stored weight unless quantised.
      axes: logical names of (in, out), for sharding.
      quantization: None, or "int8": int8 weights with one float32 scale per output channel. On
        CPU the activations are quantised too, per token and on the fly (W8A8).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: DTypeLike,
        axes: tuple[str | None, str | None] = (None, None),
        bias: bool = False,
        quantization: Quantization | None = None,
    ):
        """Zero weights; `load` fills them."""
        self.in_features, self.out_features = in_features, out_features
        self.dtype = jnp.dtype(dtype)
        self.quantization = quantization
        if quantization not in (None, "int8"):
            raise ValueError(f"quantization={quantization!r} is neither None nor 'int8'")
        stored = jnp.int8 if quantization else self.dtype
        self.weight = nnx.Param(jnp.zeros((in_features, out_features), stored), axes=axes)
        if quantization:
            self.scale = nnx.Param(jnp.ones(out_features, jnp.float32), axes=axes[1:])
        self.bias = nnx.Param(jnp.zeros(out_features, self.dtype), axes=axes[1:]) if bias else None

    def load(
        self, kernel: Float[Array, "in_features out_features"], bias: Array | None = None
    ) -> None:
        """Takes the logical weight (any float dtype, numpy or JAX) and lays it out."""
        if tuple(kernel.shape) != (self.in_features, self.out_features):
            raise ValueError(
                f"weight of shape {tuple(kernel.shape)} must be "
                f"({self.in_features}, {self.out_features})"
            )
        if (bias is None) != (self.bias is None):
            raise ValueError("a bias is missing" if bias is None else "this layer takes no bias")
        if self.quantization:
            self.weight[...], self.scale[...] = quantize_weight(jnp.asarray(kernel, jnp.float32))
        else:
            self.weight[...] = jnp.asarray(kernel, self.dtype)
        if self.bias is not None:
            self.bias[...] = jnp.asarray(bias, self.dtype)

    def logical(self) -> Float[Array, "in_features out_features"]:
        """The weight as [in_features, out_features] in `dtype`."""
        if self.quantization:
            return (self.weight[...] * self.scale[...]).astype(self.dtype)
        return self.weight[...]

    def __call__(self, x: Float[Array, "T in_features"]) -> Float[Array, "T out_features"]:
        """[T, in_features] -> [T, out_features]."""
        if self.quantization:
            y = int8_matmul(x, self.weight[...], self.scale[...])
        else:
            y = jnp.dot(x, self.weight[...], preferred_element_type=jnp.float32).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def quantize_weight(kernel: Float[Array, "K N"]) -> tuple[Array, Array]:
    """Symmetric int8 per output channel: (int8 [K, N], float32 scale [N]), kernel ~ int8 * scale."""
    top = jnp.abs(kernel).max(axis=0)
    scale = jnp.where(top > 0, top, 1.0) / 127
    return jnp.round(kernel / scale).astype(jnp.int8), scale.astype(jnp.float32)


def int8_matmul(x: Float[Array, "T K"], weight: Array, scale: Array) -> Float[Array, "T N"]:
    """x @ (weight * scale) in x's dtype: W8A8 with a scale per token on CPU, else weight-only."""
    if jax.default_backend() != "cpu":
        y = jnp.dot(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * scale).astype(x.dtype)
    value = x.astype(jnp.float32)
    top = jnp.abs(value).max(axis=-1, keepdims=True)
    step = jnp.where(top > 0, top, 1.0) / 127
    rounded = jnp.round(value / step).astype(jnp.int8)
    y = jnp.dot(rounded, weight, preferred_element_type=jnp.int32)
    return (y.astype(jnp.float32) * step * scale).astype(x.dtype)
