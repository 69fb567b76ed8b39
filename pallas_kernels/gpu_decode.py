"""Decode attention on GPU: one query token per row, the context split over programs.

Flash-decoding (Dao et al., 2023): a program takes one row, one KV head and one split of the row's
context, and keeps all query heads of the KV head's group in one tile, so that each key and value is
read once. With more than one split a second kernel merges the partial results.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float32, Num

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.gpu_common import (
    Heads,
    Operands,
    Scores,
    bind,
    both,
    column_mask,
    columns,
    empty_softmax,
    finish_softmax,
    load_rows,
    load_tokens,
    scalar,
    softmax_step,
)
from pallas_kernels.gpu_layout import GpuPages
from pallas_kernels.gpu_tables import MIN_SPLIT, Tiles


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static part of a decode step. `decode_only`: every row has at most one query token."""

    tiles: Tiles
    splits: int
    decode_only: bool


def _is_active(refs: dict[str, Any], row: Array, plan: _Plan) -> Array:
    """Whether this row is decoded here: one query token, and among the decoding rows."""
    active = refs["cu_q_lens"][row + 1] - refs["cu_q_lens"][row] == 1
    return active if plan.decode_only else active & (row < refs["num_decodes"][0])


def _span(kv_len: Array, scores: Scores, plan: _Plan) -> tuple[Array, Array, Array]:
    """(first block, blocks per split, splits in use) of a row's visible context, in blocks."""
    block_n = plan.tiles.block_n
    first = jnp.zeros_like(kv_len)
    if scores.sliding_window is not None:
        first = jnp.maximum(kv_len - scores.sliding_window, 0) // block_n
    blocks = (kv_len + block_n - 1) // block_n - first
    if plan.splits == 1:
        return first, blocks, jnp.minimum(blocks, 1)
    least = max(1, MIN_SPLIT // block_n)
    per_split = jnp.maximum((blocks + plan.splits - 1) // plan.splits, least)
    return first, per_split, (blocks + per_split - 1) // per_split


def _store_tokens(
    o_ref: Any,  # [T, Hq, D]
    out: Float32[Array, "M D"],
    refs: dict[str, Any],
    row: Array,
    head: Array,  # [M, 1]
    head_mask: Array,  # [M, 1]
    active: Array,
    rows: int,
    heads: Heads,
) -> None:
    """Writes a row's attention to its token, and zeros to the padding token of the same number."""
    tokens = o_ref.shape[0]
    shape = out.shape
    mask = both(head_mask, column_mask(heads), shape)
    token = refs["cu_q_lens"][row]
    where = jnp.broadcast_to(active, shape) & mask
    plt.store(o_ref.at[token, head, columns(heads)], out.astype(o_ref.dtype), mask=where)
    padding = (row >= refs["cu_q_lens"][rows]) & (row < tokens)
    where = jnp.broadcast_to(padding, shape) & mask
    plt.store(o_ref.at[row, head, columns(heads)], jnp.zeros(shape, o_ref.dtype), mask=where)


def _decode_kernel(
    *all_refs: Any, names: tuple[str, ...], heads: Heads, scores: Scores, plan: _Plan, rows: int
) -> None:
    """grid (KV heads, rows, splits); refs: see `decode_attention`. All global memory."""
    refs, outs = bind(names, all_refs), all_refs[len(names) :]
    kv_head, row, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    block_m, block_n = plan.tiles.block_m, plan.tiles.block_n
    active = _is_active(refs, row, plan)
    kv_len = jnp.where(active, refs["kv_lens"][row], 0)
    first, per_split, _ = _span(kv_len, scores, plan)
    end = (kv_len + block_n - 1) // block_n
    lower = first + split * per_split
    upper = jnp.minimum(lower + per_split, end)

    member = jnp.arange(block_m, dtype=jnp.int32)[:, None]
    head, head_mask = kv_head * heads.group + member, member < heads.group
    token = jnp.broadcast_to(refs["cu_q_lens"][row], (block_m, 1))
    q = load_rows(refs["q"], token, head, head_mask & active, heads).astype(heads.compute_dtype)
    k_scale = scalar(refs.get("k_scale"), kv_head)
    v_scale = scalar(refs.get("v_scale"), kv_head)
    k_ref, v_ref = refs["k_pages"], refs.get("v_pages", refs["k_pages"])

    def step(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        n = block * block_n + jnp.arange(block_n, dtype=jnp.int32)
        seen = n < kv_len
        if scores.sliding_window is not None:
            seen &= n >= kv_len - scores.sliding_window
        page = plt.load(refs["page_indices"].at[row, n // heads.page_size], mask=seen, other=0)
        offset = n % heads.page_size
        k = load_tokens(k_ref, page, kv_head, offset, seen, heads)
        v = load_tokens(v_ref, page + heads.value_offset, kv_head, offset, seen, heads)
        mask = jnp.broadcast_to(seen[None, :], (block_m, block_n))
        return softmax_step(q, k, v, mask, k_scale, carry, scores)

    acc, m, l = jax.lax.fori_loop(lower, upper, step, empty_softmax(block_m, heads))

    if plan.splits == 1:
        sink = None
        if "sinks" in refs:
            sink = plt.load(refs["sinks"].at[head[:, 0]], mask=head_mask[:, 0], other=-jnp.inf)
        out = finish_softmax(acc, m, l, sink, v_scale)
        _store_tokens(outs[0], out, refs, row, head, head_mask, active, rows, heads)
        return
    acc_ref, m_ref, l_ref = outs  # [R, Hq, splits, Dp], [R, Hq, splits] twice, float32
    if v_scale is not None:
        acc = acc * v_scale
    used = jnp.broadcast_to((lower < upper) & head_mask, acc.shape)
    all_columns = jnp.arange(heads.head_dim_pad, dtype=jnp.int32)[None, :]
    plt.store(acc_ref.at[row, head, split, all_columns], acc, mask=used)
    used = (lower < upper) & head_mask[:, 0]
    plt.store(m_ref.at[row, head[:, 0], split], m, mask=used)
    plt.store(l_ref.at[row, head[:, 0], split], l, mask=used)


def _merge_kernel(
    *all_refs: Any, names: tuple[str, ...], heads: Heads, scores: Scores, plan: _Plan, rows: int
) -> None:
    """grid (Hq, rows): merges the splits that a row used. All refs in global memory."""
    refs, o_ref = bind(names, all_refs), all_refs[-1]
    head, row = pl.program_id(0), pl.program_id(1)
    active = _is_active(refs, row, plan)
    kv_len = jnp.where(active, refs["kv_lens"][row], 0)
    _, _, used = _span(kv_len, scores, plan)

    split = jnp.arange(plan.splits, dtype=jnp.int32)
    in_use = split < used
    m = plt.load(refs["m"].at[row, head, split], mask=in_use, other=-jnp.inf)
    l = plt.load(refs["l"].at[row, head, split], mask=in_use, other=0.0)
    top = jnp.max(m, axis=0)
    weight = jnp.exp2(m - jnp.where(top == -jnp.inf, 0.0, top))
    all_columns = jnp.arange(heads.head_dim_pad, dtype=jnp.int32)[None, :]
    wide = jnp.broadcast_to(in_use[:, None], (plan.splits, heads.head_dim_pad))
    acc = plt.load(refs["acc"].at[row, head, split[:, None], all_columns], mask=wide, other=0.0)
    acc = jnp.sum(acc * weight[:, None], axis=0)
    l = jnp.sum(l * weight, axis=0)
    sink = None if "sinks" not in refs else refs["sinks"][head][None]
    out = finish_softmax(acc[None, :], top[None], l[None], sink, None)
    one = jnp.zeros((1, 1), jnp.int32)
    _store_tokens(o_ref, out, refs, row, head + one, one == 0, active, rows, heads)


@functools.partial(jax.jit, static_argnames=("heads", "scores", "tiles", "splits", "interpret"))
def decode_attention(
    q: Num[Array, "T Hq D"],
    pages: GpuPages,
    batch: RaggedBatch,
    heads: Heads,
    scores: Scores,
    *,
    tiles: Tiles,
    splits: int,
    k_scale: Float32[Array, " H"] | None,
    v_scale: Float32[Array, " H"] | None,
    sinks: Float32[Array, " Hq"] | None,
    out: Num[Array, "T Hq D"] | None,
    interpret: bool,
) -> Num[Array, "T Hq D"]:
    """Attention of the decoding rows.

    Args:
      tiles: block_m is at least heads.group, and 16, the least a tensor core takes.
      splits: programs that share a row's context, a power of two.
      out: where the other rows' results already stand; updated in place. None: every row has at
        most one query token, and padding tokens become zero (T at most R).
    """
    rows, num_kv_heads = batch.kv_lens.shape[0], pages[0].shape[1]
    plan = _Plan(tiles, splits, decode_only=out is None)
    shared: dict[str, Array | None] = {
        "cu_q_lens": batch.cu_q_lens,
        "kv_lens": batch.kv_lens,
        "num_decodes": batch.num_decodes,
    }
    inputs: dict[str, Array | None] = dict(
        q=q,
        k_pages=pages[0],
        v_pages=pages[1] if len(pages) == 2 else None,
        page_indices=batch.page_indices,
        k_scale=k_scale,
        v_scale=v_scale,
        **shared,
    )
    call = functools.partial(
        _call, heads=heads, scores=scores, plan=plan, rows=rows, interpret=interpret
    )
    o_shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    grid = (num_kv_heads, rows, splits)
    if splits == 1:
        (result,) = call(
            _decode_kernel, Operands(**inputs, sinks=sinks, out=out), [o_shape], grid=grid
        )
        return result
    partial_shape = (rows, q.shape[1], splits)
    partials = call(
        _decode_kernel,
        Operands(**inputs),
        [
            jax.ShapeDtypeStruct((*partial_shape, heads.head_dim_pad), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ],
        grid=grid,
    )
    acc, m, l = partials
    merge = Operands(acc=acc, m=m, l=l, sinks=sinks, out=out, **shared)
    (result,) = call(_merge_kernel, merge, [o_shape], grid=(q.shape[1], rows), num_warps=4)
    return result


def _call(
    kernel: Any,
    operands: Operands,
    out_shape: list[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    heads: Heads,
    scores: Scores,
    plan: _Plan,
    rows: int,
    interpret: bool,
    num_warps: int | None = None,
) -> list[Array]:
    aliases = {operands.names.index("out"): 0} if "out" in operands.names else {}
    return pl.pallas_call(
        functools.partial(
            kernel, names=operands.names, heads=heads, scores=scores, plan=plan, rows=rows
        ),
        grid=grid,
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(
            num_warps=num_warps or plan.tiles.num_warps, num_stages=plan.tiles.num_stages
        ),
        interpret=interpret,
        name=kernel.__name__.strip("_"),
    )(*operands.arrays)


__all__ = ["decode_attention"]
