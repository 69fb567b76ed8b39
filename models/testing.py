"""Runs models on whole sequences, for tests and benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from models.transformer import Transformer
from pallas_kernels.attention import KVCacheSpec, KVPages, init_kv_pages
from pallas_kernels.batch import RaggedBatch, decode_batch, ragged_batch

PAGE_SIZE = 16


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7, 8), donate_argnums=3)
def _step(
    graphdef: Any,
    state: Any,
    tokens: Int32[Array, " T"],
    kv_pages: list[KVPages],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    decode: bool,
    implementation: str | None,
    batch_invariant: bool,
) -> tuple[Float32[Array, "T V"], list[KVPages]]:
    model = nnx.merge(graphdef, state)
    hidden, kv_pages = model(
        tokens,
        batch,
        kv_pages,
        spec=spec,
        max_query_len=1 if decode else None,
        implementation=implementation,
        batch_invariant=batch_invariant,
    )
    return model.logits(hidden, batch_invariant=batch_invariant), kv_pages


def sequence_logits(
    model: Transformer,
    token_ids: Sequence[int],
    *,
    chunk: int | None = None,
    pad_to: int | None = None,
    implementation: str | None = None,
    batch_invariant: bool = False,
) -> Float32[np.ndarray, "T V"]:
    """Logits after each token of one sequence.

    Args:
      model: with parameters.
      token_ids: T ids.
      chunk: tokens per step, None for all at once; 1 takes the decode-only variant.
      pad_to: tokens of a step with its padding.
      implementation, batch_invariant: as in `Transformer`.
    """
    config = model.config
    total = len(token_ids)
    chunk = chunk or total
    width = -(-max(total, pad_to or 0) // PAGE_SIZE)
    spec = KVCacheSpec(width + 2, PAGE_SIZE, config.num_kv_heads, config.head_dim, jnp.float32)
    kv_pages = [
        init_kv_pages(spec, implementation=implementation) for _ in range(config.num_layers)
    ]
    # Not in order, and beginning after the null page.
    table = jnp.asarray(np.random.default_rng(0).permutation(width)[None] + 1, jnp.int32)
    graphdef, state = nnx.split(model)
    size = pad_to or chunk
    rows = []
    for start in range(0, total, chunk):
        count = min(chunk, total - start)
        tokens = np.zeros(size, np.int32)
        tokens[:count] = token_ids[start : start + count]
        length = jnp.asarray([start + count], jnp.int32)
        if chunk == 1:
            batch = decode_batch(length, table, page_size=PAGE_SIZE)
        else:
            batch = ragged_batch(
                jnp.asarray([0, count], jnp.int32),
                length,
                table,
                jnp.asarray([1], jnp.int32),
                jnp.asarray([0], jnp.int32),
                num_tokens=size,
                page_size=PAGE_SIZE,
            )
        logits, kv_pages = _step(
            graphdef,
            state,
            tokens,
            kv_pages,
            batch,
            spec,
            chunk == 1,
            implementation,
            batch_invariant,
        )
        rows.append(np.asarray(logits)[:count])
    return np.concatenate(rows)


def assert_same_parameters(one: nnx.Module, other: nnx.Module) -> None:
    """Every parameter is equal, bit by bit."""
    a, b = nnx.state(one, nnx.Param), nnx.state(other, nnx.Param)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
