"""Where the GPU kernels keep a layer's keys and values in memory.

One array [2 * N, H, S, D]: page p of the keys is entry p, of the values entry N + p (N pages, H KV
heads, S tokens per page, D head size). A head's share of a page is one contiguous piece of S * D
elements (4 KiB for 16 tokens of 128 bf16 numbers), which a program reads front to back; nothing is
padded: head sizes that are no power of two are masked inside the kernels instead.

The Triton lowering computes 32-bit signed offsets, in elements, for arrays of up to 2**32 bytes,
which overflows for one-byte elements from 2**31 on. Such layers are kept as two arrays of [N, H,
S, D], keys and values; beyond 2**32 bytes the lowering itself takes 64-bit offsets.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from pallas_kernels.attention_types import KVCacheSpec

# A layer's pages: (both,) or (keys, values).
GpuPages = tuple[Array, ...]


def kv_page_bytes(spec: KVCacheSpec) -> int:
    """Bytes that one page of one layer takes, keys and values together."""
    itemsize = np.dtype(spec.dtype).itemsize
    return 2 * spec.page_size * spec.num_kv_heads * spec.head_dim * itemsize


def is_split(spec: KVCacheSpec) -> bool:
    """Whether keys and values live in two arrays (see the module's head)."""
    total = spec.num_pages * kv_page_bytes(spec)
    return np.dtype(spec.dtype).itemsize == 1 and 2**31 < total <= 2**32


def value_offset(spec: KVCacheSpec) -> int:
    """What to add to a page's index to find its values in the last array."""
    return 0 if is_split(spec) else spec.num_pages


def init_kv_pages(spec: KVCacheSpec) -> GpuPages:
    """Zeroed pages of one layer."""
    tail = (spec.num_kv_heads, spec.page_size, spec.head_dim)
    if is_split(spec):
        shape = (spec.num_pages, *tail)
        return jnp.zeros(shape, spec.dtype), jnp.zeros(shape, spec.dtype)
    return (jnp.zeros((2 * spec.num_pages, *tail), spec.dtype),)


def kv_pages_from_logical(logical: Shaped[Array, "N S 2 H D"], spec: KVCacheSpec) -> GpuPages:
    """Lays out [num_pages, page_size, 2, num_kv_heads, head_dim] as the kernels want it."""
    pages = jnp.asarray(logical, spec.dtype).transpose(2, 0, 3, 1, 4)
    if is_split(spec):
        return pages[0], pages[1]
    return (pages.reshape(2 * spec.num_pages, *pages.shape[2:]),)


def kv_pages_to_logical(pages: GpuPages, spec: KVCacheSpec) -> Shaped[Array, "N S 2 H D"]:
    """The inverse of `kv_pages_from_logical`."""
    both = jnp.stack(pages) if len(pages) == 2 else pages[0]
    tail = (spec.num_kv_heads, spec.page_size, spec.head_dim)
    return both.reshape(2, spec.num_pages, *tail).transpose(1, 3, 0, 2, 4)


__all__ = [
    "GpuPages",
    "init_kv_pages",
    "is_split",
    "kv_page_bytes",
    "kv_pages_from_logical",
    "kv_pages_to_logical",
    "value_offset",
]
