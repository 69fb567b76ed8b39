"""What the GPU attention kernels share: operands by name, loads from pages, the softmax step.

All of it runs inside Pallas kernels lowered to Triton. References are whole arrays in device
memory (global memory); values are tiles in registers, and the compiler stages loads through shared
memory. Indices are arrays, never slices, so that head sizes that are no power of two can be
masked and the same code runs in interpret mode.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Heads:
    """Static shape of the heads as a kernel sees them.

    Attributes:
      group: query heads per KV head.
      group_pad: `group` padded to a power of two.
      head_dim, head_dim_pad: numbers per head, and padded to a power of two.
      value_offset: see gpu_layout.
      page_size: tokens per page.
      compute_dtype: type of both operands of the dots.
    """

    group: int
    group_pad: int
    head_dim: int
    head_dim_pad: int
    value_offset: int
    page_size: int
    compute_dtype: Any


@dataclasses.dataclass(frozen=True)
class Scores:
    """Static part of how scores are made: scale, soft cap, sliding window."""

    sm_scale: float
    soft_cap: float | None
    sliding_window: int | None


def columns(heads: Heads) -> Int32[Array, "1 D"]:
    return jnp.arange(heads.head_dim_pad, dtype=jnp.int32)[None, :]


def column_mask(heads: Heads) -> Bool[Array, "1 D"] | None:
    """Real columns of a padded head; None where nothing is padded."""
    if heads.head_dim == heads.head_dim_pad:
        return None
    return columns(heads) < heads.head_dim


def both(a: Array, b: Array | None, shape: tuple[int, ...]) -> Array:
    """The conjunction of two masks, the second of which may be missing, at full shape."""
    return jnp.broadcast_to(a if b is None else a & b, shape)


def load_rows(
    ref: Any, row: Int32[Array, "M 1"], head: Int32[Array, "M 1"], mask: Array, heads: Heads
) -> Num[Array, "M D"]:
    """Rows [row, head, :] of a [T, Hq, D] array, zero where masked."""
    shape = (row.shape[0], heads.head_dim_pad)
    full = both(mask, column_mask(heads), shape)
    return plt.load(ref.at[row, head, columns(heads)], mask=full, other=0.0)


def load_tokens(
    pages_ref: Any,
    page: Int32[Array, " N"],
    head: Int32[Array, ""],
    offset: Int32[Array, " N"],
    mask: Bool[Array, " N"] | None,
    heads: Heads,
) -> Num[Array, "N D"]:
    """Tokens [page, head, offset, :] of [pages, H, S, D], in the compute type, zero where masked.

    Masked tokens are not read: they may hold anything, NaN included.
    """
    shape = (page.shape[0], heads.head_dim_pad)
    view = pages_ref.at[page[:, None], head, offset[:, None], columns(heads)]
    masks = [
        m for m in (None if mask is None else mask[:, None], column_mask(heads)) if m is not None
    ]
    if masks:
        full = jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape)
        tile = plt.load(view, mask=full, other=jnp.zeros((), pages_ref.dtype))
    else:
        tile = plt.load(view)
    return tile.astype(heads.compute_dtype)


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Float32[Array, "M N"]:
    """A tensor-core dot with float32 sums; float32 operands keep full precision (no TF32)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, trans_b=trans_b, precision=precision)


def empty_softmax(rows: int, heads: Heads) -> tuple[Array, Array, Array]:
    """Running (weighted sum [M, D], maximum [M], sum [M]) of no scores at all."""
    return (
        jnp.zeros((rows, heads.head_dim_pad), jnp.float32),
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def softmax_step(
    q: Num[Array, "M D"],
    k: Num[Array, "N D"],
    v: Num[Array, "N D"],
    mask: Bool[Array, "M N"] | None,
    k_scale: Float32[Array, ""] | None,
    carry: tuple[Array, Array, Array],
    scores: Scores,
) -> tuple[Array, Array, Array]:
    """One block of online softmax (Milakov and Gimelshein, arXiv 1805.02867), in powers of two.

    Scores are kept as log2: exp2 is one instruction, and the factor log2(e) goes into the scale.
    A row that has seen nothing keeps the maximum -inf and the sum 0.
    """
    acc, m, l = carry
    s = dot(q, k, trans_b=True)
    scale = scores.sm_scale if k_scale is None else scores.sm_scale * k_scale
    if scores.soft_cap is None:
        s = s * (scale * LOG2E)
    else:
        # cap * tanh(x / cap), with tanh(y) = 1 - 2 / (exp(2 y) + 1), which has no library call.
        e = jnp.exp2(s * (scale * (2 * LOG2E / scores.soft_cap)))
        s = (scores.soft_cap * LOG2E) * (1.0 - 2.0 / (e + 1.0))
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    m_new = jnp.maximum(m, jnp.max(s, axis=1))
    m_safe = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    p = jnp.exp2(s - m_safe[:, None])
    alpha = jnp.exp2(m - m_safe)
    l_new = l * alpha + jnp.sum(p, axis=1)
    acc_new = acc * alpha[:, None] + dot(p.astype(v.dtype), v)
    return acc_new, m_new, l_new


def finish_softmax(
    acc: Float[Array, "M D"],
    m: Float32[Array, " M"],
    l: Float32[Array, " M"],
    sink: Float32[Array, " M"] | None,
    v_scale: Float32[Array, ""] | None,
) -> Float32[Array, "M D"]:
    """The attention of each row; zero for a row that saw nothing."""
    if sink is not None:
        sink = sink * LOG2E
        top = jnp.maximum(m, sink)
        rescale = jnp.exp2(m - top)
        l = l * rescale + jnp.exp2(sink - top)
        acc = acc * rescale[:, None]
    out = acc / jnp.where(l > 0, l, 1.0)[:, None]
    return out if v_scale is None else out * v_scale


class Operands:
    """Inputs of a pallas_call by name, some of them optional, so that kernels read by name."""

    def __init__(self, **arrays: Array | None):
        self.names = tuple(name for name, array in arrays.items() if array is not None)
        self.arrays = [array for array in arrays.values() if array is not None]


def bind(names: tuple[str, ...], refs: tuple[Any, ...]) -> dict[str, Any]:
    """A kernel's input references by name; dict.get gives None for a missing operand."""
    return dict(zip(names, refs))


def scalar(ref: Any | None, index: Any) -> Array | None:
    """ref[index], or None where the operand is missing."""
    return None if ref is None else ref[index]


__all__ = [
    "Heads",
    "Operands",
    "Scores",
    "bind",
    "both",
    "column_mask",
    "columns",
    "dot",
    "empty_softmax",
    "finish_softmax",
    "load_rows",
    "load_tokens",
    "scalar",
    "softmax_step",
]
