"""Static descriptions that the kernel contract is written in."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
    """Shape of one layer's KV pages, before an implementation lays them out.

    Attributes:
      num_pages: pages in the pool, the null page 0 included.
      page_size: tokens per page.
      num_kv_heads, head_dim: as in the model.
      dtype: element type of the stored keys and values (float32, bfloat16, int8, float8_e4m3fn).
    """

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Static description of the attention of one layer.

    Attributes:
      sm_scale: factor on the scores, usually head_dim ** -0.5.
      sliding_window: a query sees only the last `sliding_window` positions, itself included.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap).
      max_query_len: static bound on query tokens per row; 1 selects a decode-only variant.
      batch_invariant: results are bit-identical whatever the batch, chunking or paging.
    """

    sm_scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    max_query_len: int | None = None
    batch_invariant: bool = False


# A layer's KV pages: an array or a tuple of arrays, laid out by the implementation.
KVPages = Any
