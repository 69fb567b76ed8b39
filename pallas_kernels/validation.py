"""Checks of the contract's arguments, shared by all implementations: static shapes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Num

from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch

ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


def check_spec(spec: KVCacheSpec) -> None:
    """Raises ValueError where the pages' description makes no sense."""
    for name in ("num_pages", "page_size", "num_kv_heads", "head_dim"):
        value = getattr(spec, name)
        if value < 1:
            raise ValueError(f"KVCacheSpec.{name}={value} must be at least 1")
    if np.dtype(spec.dtype).name not in KV_DTYPES:
        raise ValueError(
            f"KVCacheSpec.dtype={np.dtype(spec.dtype).name} is not one of: {', '.join(KV_DTYPES)}"
        )


def check_config(config: AttentionConfig) -> None:
    """Raises ValueError where the attention's description makes no sense."""
    if config.sliding_window is not None and config.sliding_window < 1:
        raise ValueError(
            f"AttentionConfig.sliding_window={config.sliding_window} must be at least 1, or None"
        )
    if config.soft_cap is not None and not config.soft_cap > 0:
        raise ValueError(f"AttentionConfig.soft_cap={config.soft_cap} must be positive, or None")
    if config.max_query_len is not None and config.max_query_len < 1:
        raise ValueError(
            f"AttentionConfig.max_query_len={config.max_query_len} must be at least 1, or None"
        )


def check_logical(shape: Sequence[int], spec: KVCacheSpec) -> None:
    """Raises ValueError unless `shape` is the logical form of the pages of `spec`."""
    want = (spec.num_pages, spec.page_size, 2, spec.num_kv_heads, spec.head_dim)
    if tuple(shape) != want:
        raise ValueError(f"logical pages of shape {tuple(shape)} do not fit the spec's {want}")


def check_write(
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    k_scale: Float32[Array, " H"] | None,
    v_scale: Float32[Array, " H"] | None,
) -> None:
    """Raises ValueError unless keys, values, batch and scales fit the pages."""
    check_spec(spec)
    _check_batch(batch)
    tokens = batch.positions.shape[0]
    want = (tokens, spec.num_kv_heads, spec.head_dim)
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != want:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} must be {want}: tokens of the batch, heads and "
                "head size of the spec"
            )
        _check_activation(name, x)
    _check_scales(spec, k_scale, v_scale)


def check_attention(
    q: Num[Array, "T Hq D"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    k_scale: Float32[Array, " H"] | None,
    v_scale: Float32[Array, " H"] | None,
    sinks: Float32[Array, " Hq"] | None,
) -> None:
    """Raises ValueError unless queries, batch, scales and sinks fit the pages."""
    check_spec(spec)
    check_config(config)
    _check_batch(batch)
    tokens = batch.positions.shape[0]
    if q.ndim != 3 or q.shape[0] != tokens or q.shape[2] != spec.head_dim:
        raise ValueError(
            f"q of shape {tuple(q.shape)} must be [{tokens}, query heads, {spec.head_dim}]: tokens "
            "of the batch and head size of the spec"
        )
    if q.shape[1] % spec.num_kv_heads:
        raise ValueError(
            f"{q.shape[1]} query heads cannot share {spec.num_kv_heads} key/value heads evenly"
        )
    _check_activation("q", q)
    _check_scales(spec, k_scale, v_scale)
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} must be [{q.shape[1]}]")


def _check_activation(name: str, x: Num[Array, ...]) -> None:
    if x.dtype.name not in ACTIVATION_DTYPES:
        raise ValueError(
            f"{name} has dtype {x.dtype.name}, not one of: {', '.join(ACTIVATION_DTYPES)}"
        )


def _check_scales(spec: KVCacheSpec, *scales: Float32[Array, " H"] | None) -> None:
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None and tuple(scale.shape) != (spec.num_kv_heads,):
            raise ValueError(
                f"{name} of shape {tuple(scale.shape)} must be [{spec.num_kv_heads}], one factor "
                "per key/value head"
            )


def _check_batch(batch: RaggedBatch) -> None:
    rows = batch.kv_lens.shape[0]
    for name, want in (
        ("cu_q_lens", (rows + 1,)),
        ("page_indices", (rows, batch.page_indices.shape[-1])),
        ("num_seqs", (1,)),
        ("num_decodes", (1,)),
        ("slots", batch.positions.shape),
    ):
        shape = tuple(getattr(batch, name).shape)
        if shape != want:
            raise ValueError(f"RaggedBatch.{name} of shape {shape} must be {want}")
    for name, x in batch._asdict().items():
        if x.dtype != jnp.int32:
            raise ValueError(f"RaggedBatch.{name} has dtype {x.dtype.name} instead of int32")
