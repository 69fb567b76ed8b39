"""The decoder stack that every supported family runs through."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from models.config import ModelConfig
from models.layers import DecoderLayer, Embedding, RMSNorm, rotary_tables
from models.linear import Quantization
from pallas_kernels.attention import KVCacheSpec, KVPages
from pallas_kernels.batch import RaggedBatch


class Transformer(nnx.Module):
    """A Llama-type decoder over paged keys and values.

    Layers are unrolled: each owns its parameters and its KV pages, so that pages which the caller
    donates are updated in place (docs/models.md compares this with a scan over stacked layers).

    Attributes:
      embedding: [V, D]; also the output projection where config.tie_embeddings.
      layers: DecoderLayer for each layer.
      final_norm: before the output projection.
      lm_head: [V, D], unless tied.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
        shards: int = 1,
    ):
        """Allocates zero weights; `abstract` allocates none, `models.load_model` fills them.

        Args:
          config: shape of the stack.
          dtype: of weights and activations.
          quantization: of every matrix, as in `models.linear.Linear`.
          shards: devices that the fused weights will be split over (see models.layers).
        """
        if config.num_kv_heads % shards or config.intermediate_size % shards:
            raise ValueError(
                f"{shards} shards do not divide num_kv_heads={config.num_kv_heads} and "
                f"intermediate_size={config.intermediate_size}"
            )
        self.config, self.shards = config, shards
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, quantization=quantization
        )
        self.layers = nnx.List(
            DecoderLayer(config, layer, dtype=dtype, quantization=quantization, shards=shards)
            for layer in range(config.num_layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Embedding(
                config.vocab_size, config.hidden_size, dtype=dtype, quantization=quantization
            )
        )

    @classmethod
    def abstract(cls, config: ModelConfig, **settings) -> Transformer:
        """The same module with `jax.ShapeDtypeStruct` for every parameter; allocates nothing."""
        return nnx.eval_shape(lambda: cls(config, **settings))

    def __call__(
        self,
        token_ids: Int32[Array, " T"],
        batch: RaggedBatch,
        kv_pages: Sequence[KVPages],
        *,
        spec: KVCacheSpec,
        max_query_len: int | None = None,
        implementation: str | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Float[Array, "T D"], list[KVPages]]:
        """Runs one ragged step.

        Args:
          token_ids: int32 [T], this step's tokens; padding may be any id of the vocabulary.
          batch: rows, positions and slots of the tokens.
          kv_pages: one entry per layer; donate them for an update in place.
          spec: of the pages.
          max_query_len: static bound on query tokens per row; 1 is a pure decode step.
          implementation: of attention, by name; None takes the platform's best.
          batch_invariant: attention and matrix products compute a token alike, bit by bit,
            whatever is computed with it.

        Returns:
          (hidden [T, D] before the final norm, for `logits`; the pages, one entry per layer).
        """
        if len(kv_pages) != self.config.num_layers:
            raise ValueError(f"{len(kv_pages)} KV page arrays for {self.config.num_layers} layers")
        hidden = self.embedding(token_ids)
        rotary = rotary_tables(batch.positions, self.config)
        new_pages = []
        for layer, pages in zip(self.layers, kv_pages):
            hidden, pages = layer(
                hidden,
                rotary,
                batch,
                pages,
                spec=spec,
                max_query_len=max_query_len,
                implementation=implementation,
                batch_invariant=batch_invariant,
            )
            new_pages.append(pages)
        return hidden, new_pages

    def logits(
        self, hidden: Float[Array, "R D"], *, batch_invariant: bool = False
    ) -> Float32[Array, "R V"]:
        """Final norm and output projection of chosen rows, [R, D] -> float32 [R, V]."""
        head = self.lm_head or self.embedding
        return head.logits(self.final_norm(hidden), batch_invariant=batch_invariant)


def parameter_bytes(model: nnx.Module) -> int:
    """Bytes of all parameters, abstract or not."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
