"""Random ragged batches for tests and benchmarks, with NaN wherever no kernel may look."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Num, Shaped

from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the contract.

    Attributes:
      q, k, v: queries [T, Hq, D] and this step's keys and values [T, H, D]; padding tokens of k
        and v are NaN.
      logical: the pages before the step, [N, S, 2, H, D] in `spec.dtype`. Whatever no query may
        read is poisoned: NaN, or the largest integer. So are the slots this step writes.
      batch, spec, config, k_scale, v_scale, sinks: as in the contract.
      num_tokens: tokens in use; later ones are padding.
    """

    q: Num[Array, "T Hq D"]
    k: Num[Array, "T H D"]
    v: Num[Array, "T H D"]
    logical: Shaped[np.ndarray, "N S 2 H D"]
    batch: RaggedBatch
    spec: KVCacheSpec
    config: AttentionConfig
    k_scale: Float32[Array, " H"] | None
    v_scale: Float32[Array, " H"] | None
    sinks: Float32[Array, " Hq"] | None
    num_tokens: int


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    q_dtype: DTypeLike = jnp.float32,
    kv_dtype: DTypeLike = jnp.float32,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    max_query_len: int | None = None,
    batch_invariant: bool = False,
    sinks: bool = False,
    shared_pages: int = 0,
    padding_rows: int = 1,
    padding_tokens: int | None = None,
    num_pages: int | None = None,
    table_width: int | None = None,
    seed: int = 0,
) -> Case:
    """Builds a case of rows (query length, context length), decoding rows first.

    Pages are dealt in shuffled order; the first `shared_pages` pages of the first row are also
    the first pages of every other row that has them wholly before its new tokens (a shared
    prefix). Pages wholly outside the sliding window are the null page, which is poisoned. A one
    byte `kv_dtype` gets a random scale per head. `num_pages` and `table_width` fix shapes that
    would else follow from the rows.
    `padding_tokens` is 3 by default, and one per padding row in a decode-only case.
    """
    if padding_tokens is None:
        padding_tokens = padding_rows if max_query_len == 1 else 3
    rng = np.random.default_rng(seed)
    q_lens = [q_len for q_len, _ in rows]
    kv_lens = [kv_len for _, kv_len in rows]
    num_tokens, num_rows = sum(q_lens), len(rows) + padding_rows
    total = num_tokens + padding_tokens
    num_decodes = 0
    while num_decodes < len(rows) and q_lens[num_decodes] == 1:
        num_decodes += 1

    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    num_pages = 1 + sum(counts) + 2 if num_pages is None else num_pages
    table_width = max([1, *counts]) + 1 if table_width is None else table_width
    order = list(rng.permutation(np.arange(1, num_pages)))
    table = np.zeros((num_rows, table_width), np.int32)
    for row, count in enumerate(counts):
        table[row, :count] = [order.pop() for _ in range(count)]
        old_pages = (kv_lens[row] - q_lens[row]) // page_size
        shared = min(shared_pages, old_pages, (kv_lens[0] - q_lens[0]) // page_size)
        table[row, :shared] = table[0, :shared]

    itemsize, scales = np.dtype(kv_dtype).itemsize, (None, None)
    if itemsize == 1:
        step = 2.0 / 127 if np.dtype(kv_dtype).kind == "i" else 2.0 / 64
        # Powers of two times a 4-bit factor: quantisation is exact to reproduce in float32.
        scales = tuple(
            jnp.asarray(step * rng.integers(8, 17, num_kv_heads) / 8, jnp.float32) for _ in "kv"
        )
    shape = (num_pages, page_size, 2, num_kv_heads, head_dim)
    poison = np.iinfo(kv_dtype).max if np.dtype(kv_dtype).kind == "i" else np.nan
    logical = np.full(shape, poison, kv_dtype)
    for row, (q_len, kv_len) in enumerate(rows):
        first = 0
        if sliding_window is not None:
            first = max(0, kv_len - max(q_len, 1) - sliding_window + 1) // page_size
        for index in range(first * page_size, kv_len - q_len):
            page, offset = table[row, index // page_size], index % page_size
            token = rng.standard_normal((2, num_kv_heads, head_dim))
            if itemsize == 1:
                limit = 127 if np.dtype(kv_dtype).kind == "i" else 448
                token = np.clip(token * limit / 4, -limit, limit)
            logical[page, offset] = token.astype(kv_dtype)
        table[row, :first] = 0

    def random_tokens(heads: int, padding: float) -> Array:
        value = rng.standard_normal((total, heads, head_dim))
        value[num_tokens:] = padding
        return jnp.asarray(value, q_dtype)

    q = random_tokens(num_q_heads, 0.0)
    k, v = random_tokens(num_kv_heads, np.nan), random_tokens(num_kv_heads, np.nan)
    positions, slots = np.zeros(total, np.int32), np.zeros(total, np.int32)
    ends = np.cumsum([0, *q_lens, *[0] * padding_rows])
    for row, (q_len, kv_len) in enumerate(rows):
        position = np.arange(kv_len - q_len, kv_len)
        tokens = slice(ends[row], ends[row + 1])
        positions[tokens] = position
        slots[tokens] = table[row, position // page_size] * page_size + position % page_size
    batch = RaggedBatch(
        *(
            jnp.asarray(x, jnp.int32)
            for x in (
                ends,
                [*kv_lens, *[0] * padding_rows],
                table,
                [len(rows)],
                [num_decodes],
                positions,
                slots,
            )
        )
    )
    return Case(
        q=q,
        k=k,
        v=v,
        logical=logical,
        batch=batch,
        spec=KVCacheSpec(num_pages, page_size, num_kv_heads, head_dim, kv_dtype),
        config=AttentionConfig(
            sm_scale=head_dim**-0.5,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            max_query_len=max_query_len,
            batch_invariant=batch_invariant,
        ),
        k_scale=scales[0],
        v_scale=scales[1],
        sinks=jnp.asarray(rng.standard_normal(num_q_heads), jnp.float32) if sinks else None,
        num_tokens=num_tokens,
    )


def lower_for_cuda(function: Any, *args: Any, **kwargs: Any) -> str:
    """The StableHLO of a jitted function for an abstract Hopper GPU; no device, no plugin."""
    device = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return function.trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()
