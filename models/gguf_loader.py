"""Llama-type models from GGUF files.

Names and layouts of llama.cpp: matrices are [out, in] as in Hugging Face checkpoints, but
llama-architecture files store the rows of q and k so that rotary pairs lie side by side
(2i, 2i + 1); here they are put back half a head apart.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.config import ModelConfig, RopeScaling
from models.errors import ModelLoadError
from models.gguf_file import GGUFFile

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ROPE_FREQS = "rope_freqs.weight"
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_FROM_LAYER = {ours: theirs for theirs, ours in _LAYER.items()}


def read_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of a GGUF file, tokenizer arrays included, as plain Python values.

    Raises ModelLoadError if the file is not sound GGUF, OSError if it cannot be read.
    """
    return GGUFFile(path).metadata


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model's shape. Raises ModelLoadError naming an architecture or key we cannot serve."""
    metadata = file.metadata
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: general.architecture={arch!r} is not supported "
            f"(supported: {', '.join(_ARCHITECTURES)})"
        )

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if value is None:
            raise ModelLoadError(f"{file.path} lacks the metadata key {arch}.{key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelLoadError(
                f"{file.path}: {arch}.{key}={value!r} is not of type {kind.__name__}"
            )
        return value

    hidden, heads = get("embedding_length", int), get("attention.head_count", int)
    head_dim = get("attention.key_length", int, hidden // max(heads, 1))
    if get("attention.value_length", int, head_dim) != head_dim:
        raise ModelLoadError(
            f"{file.path}: {arch}.attention.value_length must equal attention.key_length={head_dim}"
        )
    if get("rope.dimension_count", int, head_dim) != head_dim:
        raise ModelLoadError(
            f"{file.path}: {arch}.rope.dimension_count must equal the head size {head_dim}"
        )
    if get("expert_count", int, 0):
        raise ModelLoadError(
            f"{file.path}: mixtures of experts ({arch}.expert_count) are not supported"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path} lacks the tensor token_embd.weight")
    window = get("attention.sliding_window", int, 0)
    return ModelConfig(
        family=_ARCHITECTURES[arch],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length", int),
        num_layers=get("block_count", int),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rope_theta=get("rope.freq_base", float, 10000.0),
        rope_scaling=_rope_scaling(file, arch, head_dim),
        norm_eps=get("attention.layer_norm_rms_epsilon", float),
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        tie_embeddings="output.weight" not in file.tensors,
        sliding_window=window or None,
        max_position_embeddings=get("context_length", int),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(
            dict.fromkeys(
                metadata[key]
                for name in ("eos", "eot", "eom")
                if (key := f"tokenizer.ggml.{name}_token_id") in metadata
            )
        ),
    )


def _rope_scaling(file: GGUFFile, arch: str, head_dim: int) -> RopeScaling | None:
    if _ROPE_FREQS in file.tensors:
        divisors = file.read(_ROPE_FREQS)
        if divisors.shape != (head_dim // 2,):
            raise ModelLoadError(
                f"{file.path}: tensor {_ROPE_FREQS} has shape {divisors.shape} where the config "
                f"says ({head_dim // 2},)"
            )
        return RopeScaling("divisors", divisors=tuple(divisors.tolist()))
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelLoadError(f"{file.path}: {arch}.rope.scaling.type={kind!r} is not supported")
    return RopeScaling("linear", float(file.metadata.get(f"{arch}.rope.scaling.factor", 1.0)))


class GGUFSource:
    """Tensors of a GGUF file under their Hugging Face names, dequantised to float32."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        """`file` is opened already, `config` comes from it."""
        self._file, self._config = file, config
        self.label = str(file.path)
        self._names = {
            _hugging_face_name(name): name for name in file.tensors if name != _ROPE_FREQS
        }

    def names(self) -> Collection[str]:
        """Hugging Face names; tensors that have none keep their own."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._file.tensors[self._names[name]].shape

    def own_name(self, name: str) -> str:
        """The name in the file."""
        return self._names.get(name) or _gguf_name(name)

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor in float32, rows in Hugging Face's order."""
        tensor = self._file.read(self._names[name])
        if self._config.family != "llama":
            return tensor
        for part, heads in (
            ("q_proj.weight", self._config.num_heads),
            ("k_proj.weight", self._config.num_kv_heads),
        ):
            if name.endswith(part):
                pairs = tensor.reshape(heads, self._config.head_dim // 2, 2, -1)
                return pairs.swapaxes(1, 2).reshape(tensor.shape)
        return tensor


def _hugging_face_name(name: str) -> str:
    for theirs, ours in _TOP.items():
        if name == ours:
            return theirs
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _FROM_LAYER:
        return f"model.layers.{parts[1]}.{_FROM_LAYER[parts[2]]}.{parts[3]}"
    return name


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER[module]}.{kind}"
