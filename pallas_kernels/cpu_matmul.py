"""Matrix products with packed weights by the native CPU kernel (see cpu_kernels/matmul.cc).

A weight [K, N] is packed as [ceil(N / 32), K / P, 32, P], P = 4 / itemsize: panels of 32 output
channels, P neighbouring inputs of a channel side by side. Channels beyond N are zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import cpu_build

PANEL = 32
WEIGHT_DTYPES = ("float32", "bfloat16", "int8")


def supported(in_features: int, dtype: DTypeLike) -> bool:
    """Whether weights of this dtype and K can be packed."""
    return (
        np.dtype(dtype).name in WEIGHT_DTYPES and in_features % (4 // np.dtype(dtype).itemsize) == 0
    )


def packed_shape(
    in_features: int, out_features: int, dtype: DTypeLike
) -> tuple[int, int, int, int]:
    """Shape of a packed weight."""
    pack = 4 // np.dtype(dtype).itemsize
    return (-(-out_features // PANEL), in_features // pack, PANEL, pack)


@jax.jit
def pack(kernel: Shaped[Array, "K N"]) -> Shaped[Array, "panels K_over_P 32 P"]:
    """Packs a weight, in its own dtype."""
    k, n = kernel.shape
    panels, steps, _, width = packed_shape(k, n, kernel.dtype)
    padded = jnp.pad(kernel, ((0, 0), (0, panels * PANEL - n)))
    return padded.reshape(steps, width, panels, PANEL).transpose(2, 0, 3, 1)


def unpack(
    packed: Shaped[Array, "panels K_over_P 32 P"], out_features: int
) -> Shaped[Array, "K N"]:
    """The inverse of `pack`."""
    panels, steps, _, width = packed.shape
    kernel = packed.transpose(1, 3, 0, 2).reshape(steps * width, panels * PANEL)
    return kernel[:, :out_features]


def columns(
    packed: Shaped[Array, "panels K_over_P 32 P"], indices: Int32[Array, " T"]
) -> Shaped[Array, "T K"]:
    """Columns `indices` of the weight as rows, for tied embeddings.

    Gathers bits: XLA:CPU gathers bfloat16 by way of float32, and a loop over steps would convert
    the whole weight ahead of it.
    """
    bits = jax.lax.bitcast_convert_type(packed, f"uint{8 * packed.dtype.itemsize}")
    taken = bits.at[indices // PANEL, :, indices % PANEL].get(mode="promise_in_bounds")
    taken = jax.lax.bitcast_convert_type(taken, packed.dtype)
    return taken.reshape(indices.shape[0], -1)


def matmul(
    x: Float[Array, "T K"],
    packed: Shaped[Array, "panels K_over_P 32 P"],
    out_features: int,
    *,
    scale: Float32[Array, " N"] | None = None,
    column_sum: Int32[Array, " N"] | None = None,
    bias: Float32[Array, " N"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "T N"]:
    """x @ weight (* scale) (+ bias) with float32 or int32 sums.

    Args:
      x: float32 or bfloat16. With bfloat16 weights and float32 inputs products are exact; with
        float32 weights inputs are widened; with int8 weights each row is quantised to int8.
      packed: from `pack`.
      out_features: N.
      scale: per output channel; needed with int8 weights.
      column_sum: sums of the int8 weight over K; needed with int8 weights.
      bias: per output channel.
      out_dtype: float32 or bfloat16; None is x's.

    Each row's result is bit by bit the same whatever other rows are in the batch.
    """
    out_dtype = x.dtype if out_dtype is None else np.dtype(out_dtype)
    if packed.dtype == jnp.float32 or x.dtype not in (jnp.float32, jnp.bfloat16):
        x = x.astype(jnp.float32)
    native_out = out_dtype if out_dtype in (jnp.float32, jnp.bfloat16) else jnp.float32
    none = jnp.zeros(0, jnp.float32)
    call = jax.ffi.ffi_call(
        cpu_build.target("matmul"), jax.ShapeDtypeStruct((x.shape[0], out_features), native_out)
    )
    y = call(
        x,
        packed,
        none if scale is None else scale,
        jnp.zeros(0, jnp.int32) if column_sum is None else column_sum,
        none if bias is None else bias.astype(jnp.float32),
    )
    return y.astype(out_dtype)
