"""One decoder stack's shape, whatever family the checkpoint is of."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling.

    `linear` divides positions by `factor`; `llama3` is Llama 3.1's recipe; `divisors` divides the
    angle of each pair of elements by its own number (how GGUF files carry any recipe).
    """

    kind: Literal["linear", "llama3", "divisors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-type decoder. Hashable: it is a static argument of jitted functions.

    Attributes:
      family: "llama", "mistral", "qwen2" or "qwen3" (which checkpoint names and defaults apply).
      vocab_size, hidden_size, intermediate_size, num_layers: as in Hugging Face's config.json.
      num_heads, num_kv_heads, head_dim: query heads, key/value heads, size of each.
      rope_theta, rope_scaling: rotary embedding.
      norm_eps: of RMSNorm.
      qkv_bias: Qwen2's bias on q, k and v.
      qk_norm: Qwen3's RMSNorm over each head of q and k.
      tie_embeddings: the output projection is the embedding.
      sliding_window: tokens a query sees, None for all.
      num_full_attention_layers: the first layers, which ignore `sliding_window`.
      max_position_embeddings: longest sequence the checkpoint was made for.
      bos_token_id, eos_token_ids: as the checkpoint's generation config says.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    num_full_attention_layers: int = 0
    max_position_embeddings: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Columns of the query, key and value projections."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    def layer_window(self, layer: int) -> int | None:
        """Sliding window of a layer, None for full attention."""
        return None if layer < self.num_full_attention_layers else self.sliding_window
