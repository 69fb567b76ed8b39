"""Linear layers: one module, several physical layouts."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32

from pallas_kernels import cpu_build, cpu_matmul

Quantization = Literal["int8"]

# XLA's bfloat16 and int8 dots on CPU take a slow path below this many rows.
_FEWEST_ROWS = 8


class Linear(nnx.Module):
    """y = x @ kernel (+ bias) with float32 accumulation.

    The logical weight is [in_features, out_features] in floating point. How it is stored is the
    module's own business: set it with `load`, read it back with `logical` and `columns`. On CPU,
    where the native kernels are available, weights lie packed as they want them.

    Attributes:
      in_features, out_features: sizes.
      dtype: of the stored weight unless quantised.
      axes: logical names of (in, out), for sharding.
      quantization: None, or "int8": int8 weights with one float32 scale per output channel. On
        CPU the activations are quantised too, per token and on the fly (W8A8).
      batch_invariant: a row's result is bit by bit the same whatever other rows are computed with
        it. The native kernels always are; elsewhere it costs a fixed row tile. Also an argument
        of the call.
      transposed: where it is not packed, the weight is stored as [out, in], so that `columns`
        reads contiguous memory.
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
        batch_invariant: bool = False,
        transposed: bool = False,
    ):
        """Zero weights; `load` fills them."""
        if quantization not in (None, "int8"):
            raise ValueError(f"quantization={quantization!r} is neither None nor 'int8'")
        self.in_features, self.out_features = in_features, out_features
        self.dtype = jnp.dtype(dtype)
        self.quantization = quantization
        self.batch_invariant = batch_invariant
        stored = jnp.dtype(jnp.int8) if quantization else self.dtype
        self.packed = cpu_matmul.supported(in_features, stored) and cpu_build.available()
        if self.packed:
            shape = cpu_matmul.packed_shape(in_features, out_features, stored)
            stored_axes = (axes[1], axes[0], None, None)
        elif transposed:
            shape, stored_axes = (out_features, in_features), axes[::-1]
        else:
            shape, stored_axes = (in_features, out_features), axes
        self.transposed = transposed and not self.packed
        self.weight = nnx.Param(jnp.zeros(shape, stored), axes=stored_axes)
        self.bias = nnx.Param(jnp.zeros(out_features, self.dtype), axes=axes[1:]) if bias else None
        if quantization:
            self.scale = nnx.Param(jnp.ones(out_features, jnp.float32), axes=axes[1:])
            if self.packed:
                self.column_sum = nnx.Param(jnp.zeros(out_features, jnp.int32), axes=axes[1:])

    def load(
        self,
        kernel: Float[Array | np.ndarray, "in_features out_features"],
        bias: Float[Array | np.ndarray, " out_features"] | None = None,
    ) -> None:
        """Takes the logical weight (any float dtype, numpy or JAX) and lays it out.

        Parameters may be abstract before; they take the weight's sharding.
        Raises ValueError where shapes do not fit or the bias is missing or unexpected.
        """
        if tuple(kernel.shape) != (self.in_features, self.out_features):
            raise ValueError(
                f"weight of shape {tuple(kernel.shape)} must be "
                f"({self.in_features}, {self.out_features})"
            )
        if (bias is None) != (self.bias is None):
            raise ValueError("the bias is missing" if bias is None else "there is no bias here")
        if self.quantization:
            stored, scale = quantize_weight(kernel)
            self.scale.set_value(scale)
            if self.packed:
                self.column_sum.set_value(stored.sum(axis=0, dtype=jnp.int32))
        else:
            stored = jnp.asarray(kernel, self.dtype)
        if self.packed:
            stored = cpu_matmul.pack(stored)
        self.weight.set_value(stored.T if self.transposed else stored)
        if self.bias is not None and bias is not None:
            self.bias.set_value(jnp.asarray(bias, self.dtype))

    def logical(self) -> Float[Array, "in_features out_features"]:
        """The weight as [in_features, out_features] in `dtype`."""
        weight = self.weight[...]
        if self.packed:
            weight = cpu_matmul.unpack(weight, self.out_features)
        elif self.transposed:
            weight = weight.T
        if self.quantization:
            weight = weight.astype(jnp.float32) * self.scale[...]
        return weight.astype(self.dtype)

    def columns(self, indices: Int32[Array, " T"]) -> Float[Array, "T in_features"]:
        """Columns of the logical weight, as rows in `dtype`: the embedding of a tied output."""
        if self.packed:
            taken = cpu_matmul.columns(self.weight[...], indices)
        elif self.transposed:
            taken = self.weight[...][indices]
        else:
            taken = self.weight[...][:, indices].T
        if self.quantization:
            taken = taken.astype(jnp.float32) * self.scale[...][indices, None]
        return taken.astype(self.dtype)

    def __call__(
        self,
        x: Float[Array, "T in_features"],
        *,
        out_dtype: DTypeLike | None = None,
        batch_invariant: bool = False,
    ) -> Float[Array, "T out_features"]:
        """[T, in_features] -> [T, out_features] in `out_dtype`, by default x's dtype."""
        out_dtype = x.dtype if out_dtype is None else jnp.dtype(out_dtype)
        bias = None if self.bias is None else self.bias[...]
        weight = self.weight[...]
        if self.packed:
            return cpu_matmul.matmul(
                x,
                weight,
                self.out_features,
                scale=self.scale[...] if self.quantization else None,
                column_sum=self.column_sum[...] if self.quantization else None,
                bias=bias,
                out_dtype=out_dtype,
            )
        invariant = batch_invariant or self.batch_invariant
        if self.transposed:
            weight = weight.T
        if self.quantization:
            scale = self.scale[...]
            y = _by_rows(lambda rows: int8_matmul(rows, weight, scale), x, invariant)
        else:
            y = _by_rows(lambda rows: float_matmul(rows, weight), x, invariant)
        if bias is not None:
            y = y + bias.astype(jnp.float32)
        return y.astype(out_dtype)


@jax.jit
def quantize_weight(
    kernel: Float[Array | np.ndarray, "K N"],
) -> tuple[Int8[Array, "K N"], Float32[Array, " N"]]:
    """Symmetric int8 per output channel: (int8 [K, N], float32 scale [N]), kernel ~ int8 * scale."""
    value = jnp.asarray(kernel, jnp.float32)
    top = jnp.abs(value).max(axis=0)
    scale = jnp.where(top > 0, top, 1.0) / 127
    return jnp.round(value / scale).astype(jnp.int8), scale


def float_matmul(x: Float[Array, "T K"], weight: Float[Array, "K N"]) -> Float[Array, "T N"]:
    """x @ weight with float32 sums."""
    if weight.dtype != x.dtype:
        wide = jnp.promote_types(weight.dtype, x.dtype)
        x, weight = x.astype(wide), weight.astype(wide)
    return jnp.dot(x, weight, preferred_element_type=jnp.float32)


def int8_matmul(
    x: Float[Array, "T K"], weight: Float[Array, "K N"], scale: Float[Array, " N"]
) -> Float[Array, "T N"]:
    """x @ (weight * scale) in float32: W8A8 with a scale per token on CPU, else weight-only."""
    if jax.default_backend() != "cpu":
        y = jnp.dot(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        return y * scale
    value = x.astype(jnp.float32)
    top = jnp.abs(value).max(axis=-1, keepdims=True)
    step = jnp.where(top > 0, top, 1.0) / 127
    rounded = jnp.round(value / step).astype(jnp.int8)
    y = jnp.dot(rounded, weight, preferred_element_type=jnp.int32)
    return y.astype(jnp.float32) * step * scale


def _by_rows(dot, x: Float[Array, "T K"], batch_invariant: bool) -> Float[Array, "T N"]:
    """Applies `dot` to x in a number of rows that is fast on CPU, or always the same."""
    rows = x.shape[0]
    if batch_invariant:
        # A dot of one shape computes each row alike, whatever the other rows hold.
        tiles = -(-rows // _FEWEST_ROWS)
        tiled = jnp.pad(x, ((0, tiles * _FEWEST_ROWS - rows), (0, 0)))
        y = jax.lax.map(dot, tiled.reshape(tiles, _FEWEST_ROWS, -1))
        return y.reshape(tiles * _FEWEST_ROWS, -1)[:rows]
    narrow = x.dtype != jnp.float32 and jax.default_backend() == "cpu"
    if narrow and rows < _FEWEST_ROWS:
        return dot(jnp.pad(x, ((0, _FEWEST_ROWS - rows), (0, 0))))[:rows]
    return dot(x)
