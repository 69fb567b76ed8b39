"""Writes a step's keys and values into the pages, in place, quantising where the pages ask."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Int32, Num

from pallas_kernels.gpu_common import Heads, Operands, bind, both, column_mask, columns, scalar
from pallas_kernels.gpu_layout import GpuPages

# Tokens of one program: few, so that a decode step of a few rows still fills the device.
_BLOCK_T = 8


def _round_to_even(x: Array) -> Array:
    """Round half to even, of which Triton's dialect has no operation."""
    lower = jnp.floor(x)
    above = x - lower
    odd = lower - 2.0 * jnp.floor(lower * 0.5)
    return lower + jnp.where((above > 0.5) | ((above == 0.5) & (odd == 1.0)), 1.0, 0.0)


def _to_stored(x: Array, scale: Array | None, dtype: Any) -> Array:
    """x / scale in the pages' type: rounded to nearest even, saturated for one-byte types."""
    if jnp.dtype(dtype).itemsize > 1 and scale is None:
        return x.astype(dtype)
    value = x.astype(jnp.float32)
    if scale is not None:
        value = value / scale
    if jnp.issubdtype(dtype, jnp.integer):
        return _round_to_even(jnp.clip(value, -128.0, 127.0)).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        value = jnp.clip(value, -limit, limit)
    return value.astype(dtype)


def _write_kernel(*all_refs: Any, names: tuple[str, ...], heads: Heads) -> None:
    """grid (blocks of tokens, KV heads). All refs in global memory; pages are aliased."""
    refs, outs = bind(names, all_refs), all_refs[len(names) :]
    block, kv_head = pl.program_id(0), pl.program_id(1)
    token = block * _BLOCK_T + jnp.arange(_BLOCK_T, dtype=jnp.int32)
    slot = plt.load(refs["slots"].at[token], mask=token < refs["k"].shape[0], other=0)
    page, offset = slot // heads.page_size, slot % heads.page_size
    shape = (_BLOCK_T, heads.head_dim_pad)
    # Padding tokens point into the null page, which nobody reads: it is not written either.
    mask = both((page > 0)[:, None], column_mask(heads), shape)
    for name, out, shift in (("k", outs[0], 0), ("v", outs[-1], heads.value_offset)):
        x = plt.load(refs[name].at[token[:, None], kv_head, columns(heads)], mask=mask, other=0.0)
        stored = _to_stored(x, scalar(refs.get(f"{name}_scale"), kv_head), out.dtype)
        target = out.at[(page + shift)[:, None], kv_head, offset[:, None], columns(heads)]
        plt.store(target, stored, mask=mask)


@functools.partial(jax.jit, static_argnames=("heads", "interpret"))
def write(
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: GpuPages,
    slots: Int32[Array, " T"],
    heads: Heads,
    *,
    k_scale: Float32[Array, " H"] | None,
    v_scale: Float32[Array, " H"] | None,
    interpret: bool,
) -> GpuPages:
    """Stores token t's key and value at slots[t]; donate the pages to update them in place."""
    names = [f"pages{i}" for i in range(len(pages))]
    operands = Operands(
        k=k, v=v, slots=slots, k_scale=k_scale, v_scale=v_scale, **dict(zip(names, pages))
    )
    result = pl.pallas_call(
        functools.partial(_write_kernel, names=operands.names, heads=heads),
        grid=(pl.cdiv(k.shape[0], _BLOCK_T), k.shape[1]),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pages],
        input_output_aliases={operands.names.index(name): i for i, name in enumerate(names)},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="kv_write_kernel",
    )(*operands.arrays)
    return tuple(result)


__all__ = ["write"]
