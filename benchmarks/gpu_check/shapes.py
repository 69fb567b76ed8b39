"""Sizes of what is measured: real ones, and tiny ones for the rehearsal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Heads of Llama 3 8B, 128 rows of 4096 tokens; a prompt of 8192."""

    rows: int = 128
    context: int = 4096
    prompt: int = 8192
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    repeats: int = 10


def attention_shape(rehearse: bool) -> AttentionShape:
    """The shape to measure."""
    if rehearse:
        return AttentionShape(
            rows=3, context=48, prompt=40, num_q_heads=4, num_kv_heads=2, head_dim=64, repeats=1
        )
    return AttentionShape()


@dataclasses.dataclass(frozen=True)
class Load:
    """One level of a serving measurement, all requests at once."""

    concurrency: int
    prompt_len: int
    output_len: int


def serve_loads(rehearse: bool) -> list[Load]:
    """The levels, the one with a goal first."""
    if rehearse:
        return [Load(2, 10, 6), Load(1, 10, 4)]
    return [Load(128, 512, 128), Load(1, 512, 64), Load(32, 512, 128), Load(256, 512, 64)]


_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 0,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def model_fields(family: str, rehearse: bool) -> dict[str, Any]:
    """config.json of Qwen3-0.6B ("qwen3") or Llama-3.1-8B ("llama"), or a tiny one alike."""
    fields = dict(_QWEN3 if family == "qwen3" else _LLAMA3)
    return fields | _TINY if rehearse else fields


def write_model_folder(folder: Path, family: str, rehearse: bool) -> Path:
    """A model folder without weights: config and a tokenizer with one token per byte."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    fields = model_fields(family, rehearse)
    (folder / "config.json").write_text(json.dumps(fields))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0, **{char: 1 + i for i, char in enumerate(alphabet)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return folder
