"""The ragged batch: one step's rows and tokens as the kernels see them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class RaggedBatch(NamedTuple):
    """Rows of one step, padded to a bucket of R rows and T tokens; all int32, all on the device.

    Row r owns query tokens cu_q_lens[r]:cu_q_lens[r+1], the last of its kv_lens[r] context
    tokens. Rows from num_seqs on are padding: kv_lens is 0, cu_q_lens repeats its last value,
    page_indices name the null page 0. Decoding rows (one query token) come first.

    Attributes:
      cu_q_lens: [R+1], cumulative query lengths.
      kv_lens: [R], context length of each row, this step's tokens included.
      page_indices: [R, P], pages of each row in order; unused entries are 0 (the null page).
      num_seqs: [1], rows in use.
      num_decodes: [1], rows 0..num_decodes-1 have exactly one query token.
      positions: [T], position of each token in its sequence; 0 for padding.
      slots: [T], where the token's key and value are written: page * page_size + offset; padding
        points into the null page.
    """

    cu_q_lens: Int32[Array, " R_plus_1"]
    kv_lens: Int32[Array, " R"]
    page_indices: Int32[Array, "R P"]
    num_seqs: Int32[Array, " 1"]
    num_decodes: Int32[Array, " 1"]
    positions: Int32[Array, " T"]
    slots: Int32[Array, " T"]


def ragged_batch(
    cu_q_lens: Int32[Array, " R_plus_1"],
    kv_lens: Int32[Array, " R"],
    page_indices: Int32[Array, "R P"],
    num_seqs: Int32[Array, " 1"],
    num_decodes: Int32[Array, " 1"],
    *,
    num_tokens: int,
    page_size: int,
) -> RaggedBatch:
    """Derives positions and slots of `num_tokens` padded tokens from the rows (traceable)."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right").astype(jnp.int32)
    row = jnp.minimum(row, kv_lens.shape[0] - 1)
    valid = token < cu_q_lens[-1]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    position = kv_lens[row] - q_lens[row] + token - cu_q_lens[row]
    position = jnp.where(valid, position, 0)
    page = jnp.where(valid, page_indices[row, position // page_size], 0)
    slots = page * page_size + position % page_size
    return RaggedBatch(
        cu_q_lens, kv_lens, page_indices, num_seqs, num_decodes, position, slots.astype(jnp.int32)
    )


def decode_batch(
    kv_lens: Int32[Array, " R"], page_indices: Int32[Array, "R P"], *, page_size: int
) -> RaggedBatch:
    """The batch of a pure decode step: token r is row r; rows with kv_lens 0 are padding."""
    rows = kv_lens.shape[0]
    position = jnp.maximum(kv_lens - 1, 0)
    page = jnp.where(kv_lens > 0, page_indices[jnp.arange(rows), position // page_size], 0)
    num_seqs = jnp.full((1,), rows, jnp.int32)
    return RaggedBatch(
        jnp.arange(rows + 1, dtype=jnp.int32),
        kv_lens,
        page_indices,
        num_seqs,
        num_seqs,
        position,
        page * page_size + position % page_size,
    )


__all__ = ["RaggedBatch", "decode_batch", "ragged_batch"]
