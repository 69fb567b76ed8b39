"""Paged attention over ragged batches: one contract, an implementation per platform."""

from pallas_kernels.attention import (
    IMPLEMENTATIONS,
    AttentionConfig,
    KVCacheSpec,
    KVPages,
    attend,
    init_kv_pages,
    kv_page_bytes,
    kv_pages_from_logical,
    kv_pages_to_logical,
    kv_write,
    ragged_paged_attention,
    resolve_implementation,
)
from pallas_kernels.batch import RaggedBatch, decode_batch, ragged_batch

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionConfig",
    "KVCacheSpec",
    "KVPages",
    "RaggedBatch",
    "attend",
    "decode_batch",
    "init_kv_pages",
    "kv_page_bytes",
    "kv_pages_from_logical",
    "kv_pages_to_logical",
    "kv_write",
    "ragged_batch",
    "ragged_paged_attention",
    "resolve_implementation",
]
