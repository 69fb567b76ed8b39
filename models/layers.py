"""The parts of a Llama-type decoder, as Flax NNX modules.

Weights that read the same input are fused: `qkv` holds query, key and value projections side by
side, `gate_up` the two input projections of the MLP. Each part's columns are cut into `shards`
equal pieces and the pieces of one shard lie together, so that an even split of the fused axis
over a mesh axis of that size gives every device whole heads of all parts.

Every parameter names its logical axes in its `axes` metadata (see docs/models.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from models.config import ModelConfig, RopeScaling
from models.linear import Linear, Quantization
from pallas_kernels.attention import AttentionConfig, KVCacheSpec, KVPages, attend
from pallas_kernels.batch import RaggedBatch

# Logical axes of (in, out) of each projection, by its name in the module tree.
PROJECTION_AXES = {
    "qkv": ("embed", "heads"),
    "o": ("heads", "embed"),
    "gate_up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}


def rope_frequencies(config: ModelConfig) -> Float32[np.ndarray, " half"]:
    """Rotary angle per position of each pair of elements, [head_dim / 2], scaling included.

    `llama3` is the recipe of Llama 3.1: wavelengths longer than the original context over
    `low_freq_factor` are slowed down by `factor`, those shorter than it over `high_freq_factor`
    are kept, and those between are blended.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return (frequencies / scaling.factor).astype(np.float32)
    if scaling.kind == "divisors":
        return (frequencies / np.asarray(scaling.divisors, np.float32)).astype(np.float32)
    return _llama3(frequencies, scaling)


def _llama3(
    frequencies: Float32[np.ndarray, " half"], scaling: RopeScaling
) -> Float32[np.ndarray, " half"]:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return ((1 - keep) * frequencies / scaling.factor + keep * frequencies).astype(np.float32)


def rotary_tables(
    positions: Int32[Array, " T"], config: ModelConfig
) -> tuple[Float32[Array, "T 1 half"], Float32[Array, "T 1 half"]]:
    """Cosines and sines of the tokens' rotary angles, each [T, 1, head_dim / 2]."""
    angle = positions.astype(jnp.float32)[:, None] * rope_frequencies(config)
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def rotate(
    x: Float[Array, "T H D"], cos: Float32[Array, "T 1 half"], sin: Float32[Array, "T 1 half"]
) -> Float[Array, "T H D"]:
    """Rotary embedding in float32; element i is paired with i + D / 2 (Hugging Face's order)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def fuse_columns(parts: Sequence[np.ndarray], shards: int) -> np.ndarray:
    """Joins arrays along their last axis, shard by shard (see the module's docstring)."""
    pieces = [np.split(part, shards, axis=-1) for part in parts] if shards > 1 else None
    if pieces is None:
        return np.concatenate(parts, axis=-1)
    return np.concatenate([piece for shard in zip(*pieces) for piece in shard], axis=-1)


def split_columns(
    x: Float[Array, "T N"], sizes: Sequence[int], shards: int
) -> list[Float[Array, "T M"]]:
    """The inverse of `fuse_columns` for activations: one [T, size] array for each size."""
    tokens = x.shape[0]
    ends = np.cumsum(sizes)[:-1] // shards
    parts = jnp.split(x.reshape(tokens, shards, -1), ends, axis=-1)
    return [part.reshape(tokens, size) for part, size in zip(parts, sizes)]


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis, computed in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike, axis: str | None = "norm"):
        """Weights of one."""
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(size, dtype), axes=(axis,))

    def load(self, weight: Float[Array | np.ndarray, " D"]) -> None:
        """Takes the weight (any float dtype, numpy or JAX)."""
        self.weight.set_value(jnp.asarray(weight, self.weight.dtype))

    def logical(self) -> Float[Array, " D"]:
        """The weight."""
        return self.weight[...]

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """[..., D] -> [..., D] in x's dtype."""
        value = x.astype(jnp.float32)
        variance = jnp.mean(value * value, axis=-1, keepdims=True)
        scale = self.weight[...].astype(jnp.float32)
        return (value * jax.lax.rsqrt(variance + self.eps) * scale).astype(x.dtype)


class Embedding(nnx.Module):
    """A [vocab_size, hidden_size] table: rows for tokens, or logits for hidden states.

    Attributes:
      table: the output projection, a Linear [D, V]; tokens read its columns.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
    ):
        """Zero weights; `load` fills them."""
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.dtype, self.quantization = jnp.dtype(dtype), quantization
        self.table = Linear(
            hidden_size,
            vocab_size,
            dtype=dtype,
            axes=("embed", "vocab"),
            quantization=quantization,
            transposed=True,
        )

    def load(self, table: Float[Array | np.ndarray, "V D"]) -> None:
        """Takes the logical table (any float dtype, numpy or JAX)."""
        self.table.load(table.T)

    def logical(self) -> Float[Array, "V D"]:
        """The table in `dtype`."""
        return self.table.logical().T

    def __call__(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Rows of the tokens, [T] -> [T, D] in `dtype`."""
        return self.table.columns(token_ids)

    def logits(
        self, x: Float[Array, "R D"], *, batch_invariant: bool = False
    ) -> Float32[Array, "R V"]:
        """Products with every row, [R, D] -> float32 [R, V]."""
        return self.table(x, out_dtype=jnp.float32, batch_invariant=batch_invariant)


class Attention(nnx.Module):
    """Grouped-query attention over paged keys and values.

    Attributes:
      qkv: [D, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values.
      o: [num_heads * head_dim, D].
      q_norm, k_norm: over head_dim, where config.qk_norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: DTypeLike,
        quantization: Quantization | None,
        shards: int,
    ):
        """Zero weights; the loader fills them."""
        self.config, self.shards = config, shards
        self.window = config.layer_window(layer)
        self.sizes = config.qkv_sizes
        self.qkv = Linear(
            config.hidden_size,
            sum(self.sizes),
            dtype=dtype,
            axes=PROJECTION_AXES["qkv"],
            bias=config.qkv_bias,
            quantization=quantization,
        )
        self.o = Linear(
            self.sizes[0],
            config.hidden_size,
            dtype=dtype,
            axes=PROJECTION_AXES["o"],
            quantization=quantization,
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype, axis=None)
            self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype, axis=None)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rotary: tuple[Float32[Array, "T 1 half"], Float32[Array, "T 1 half"]],
        batch: RaggedBatch,
        pages: KVPages,
        *,
        spec: KVCacheSpec,
        max_query_len: int | None,
        implementation: str | None,
        batch_invariant: bool,
    ) -> tuple[Float[Array, "T D"], KVPages]:
        """Writes this step's keys and values, attends; returns ([T, D], pages)."""
        config = self.config
        projected = self.qkv(x, batch_invariant=batch_invariant)
        q, k, v = (
            part.reshape(x.shape[0], -1, config.head_dim)
            for part in split_columns(projected, self.sizes, self.shards)
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        attention = AttentionConfig(
            sm_scale=config.head_dim**-0.5,
            sliding_window=self.window,
            max_query_len=max_query_len,
            batch_invariant=batch_invariant,
        )
        out, pages = attend(
            rotate(q, *rotary),
            rotate(k, *rotary),
            v,
            pages,
            batch,
            spec,
            attention,
            implementation=implementation,
        )
        out = self.o(out.reshape(x.shape[0], -1), batch_invariant=batch_invariant)
        return out, pages


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), SwiGLU (Shazeer 2020).

    Attributes:
      gate_up: [D, 2 * intermediate_size]: gate, up.
      down: [intermediate_size, D].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        quantization: Quantization | None,
        shards: int,
    ):
        """Zero weights; the loader fills them."""
        self.shards = shards
        self.sizes = (config.intermediate_size, config.intermediate_size)
        self.gate_up = Linear(
            config.hidden_size,
            sum(self.sizes),
            dtype=dtype,
            axes=PROJECTION_AXES["gate_up"],
            quantization=quantization,
        )
        self.down = Linear(
            config.intermediate_size,
            config.hidden_size,
            dtype=dtype,
            axes=PROJECTION_AXES["down"],
            quantization=quantization,
        )

    def __call__(
        self, x: Float[Array, "T D"], *, batch_invariant: bool = False
    ) -> Float[Array, "T D"]:
        """[T, D] -> [T, D]."""
        projected = self.gate_up(x, batch_invariant=batch_invariant)
        gate, up = split_columns(projected, self.sizes, self.shards)
        return self.down(jax.nn.silu(gate) * up, batch_invariant=batch_invariant)


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: DTypeLike,
        quantization: Quantization | None,
        shards: int,
    ):
        """Zero weights; the loader fills them."""
        self.input_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.attention = Attention(
            config, layer, dtype=dtype, quantization=quantization, shards=shards
        )
        self.post_attention_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, quantization=quantization, shards=shards)

    def __call__(
        self,
        x: Float[Array, "T D"],
        rotary: tuple[Float32[Array, "T 1 half"], Float32[Array, "T 1 half"]],
        batch: RaggedBatch,
        pages: KVPages,
        *,
        spec: KVCacheSpec,
        max_query_len: int | None,
        implementation: str | None,
        batch_invariant: bool,
    ) -> tuple[Float[Array, "T D"], KVPages]:
        """([T, D], pages) -> ([T, D], pages); settings as in `Attention`."""
        out, pages = self.attention(
            self.input_norm(x),
            rotary,
            batch,
            pages,
            spec=spec,
            max_query_len=max_query_len,
            implementation=implementation,
            batch_invariant=batch_invariant,
        )
        x = x + out
        out = self.mlp(self.post_attention_norm(x), batch_invariant=batch_invariant)
        return x + out, pages
