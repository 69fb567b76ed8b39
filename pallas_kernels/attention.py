"""The kernel contract: paged attention over a ragged batch, and the write of new keys and values.

One operation, several implementations, one shared test suite:

  reference  numpy float64, the specification (not traceable; tests only)
  xla        plain JAX, fastest formulation on CPU; runs everywhere
  tpu        Pallas (Mosaic TPU)
  gpu        Pallas

`implementation=None` takes the best one for the platform. NotImplementedError from an
implementation means: valid, but not supported here, try the next one (logged once). ValueError
means: the caller is wrong.

The physical layout of a layer's KV pages belongs to the implementation: callers treat what
`init_kv_pages` returns as opaque. Tests convert with `kv_pages_from_logical` and
`kv_pages_to_logical`, whose logical form is [num_pages, page_size, 2, num_kv_heads, head_dim]
(index 0 of axis 2 is K, 1 is V).
"""

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

# To come, by the same module (signatures are fixed):
#
#   init_kv_pages(spec, *, implementation=None) -> KVPages
#   kv_pages_from_logical(logical, spec, *, implementation=None) -> KVPages
#   kv_pages_to_logical(pages, spec, *, implementation=None) -> Array
#   kv_page_bytes(spec, *, implementation=None) -> int       bytes of one page of one layer, with padding
#   kv_write(k, v, pages, batch, spec, *, k_scale=None, v_scale=None, implementation=None) -> KVPages
#       k, v: [T, Hkv, D]
#   ragged_paged_attention(q, pages, batch, spec, config, *, k_scale=None, v_scale=None,
#                          sinks=None, implementation=None) -> Array
#       q: [T, Hq, D] -> [T, Hq, D] in q's dtype; rows of padding tokens are unspecified but finite.
#       k_scale, v_scale: float32 [Hkv] (or None): dequantised key = stored * scale.
#       sinks: float32 [Hq] (or None): an extra logit per head in the softmax's denominator.
#   attend(q, k, v, pages, batch, spec, config, *, ...) -> (Array, KVPages)
#       what models call: writes k and v, then attends. An implementation may fuse the two.
