"""`ModelConfig` from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfig, RopeScaling
from models.errors import ModelLoadError

# model_type -> what config.json may leave out, as the family's config class has it.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Fields that change the computation in ways that this stack does not have, with harmless values.
_MUST_BE = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelLoadError if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return value


def config_from_folder(folder: Path) -> tuple[ModelConfig, str | None]:
    """Config of a Hugging Face folder and the dtype that it names, if any.

    generation_config.json, where there is one, has the last word on the EOS ids.
    """
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        chosen = read_json(generation)
        fields |= {
            name: chosen[name]
            for name in ("eos_token_id", "bos_token_id")
            if chosen.get(name) is not None
        }
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    return config_from_fields(fields, str(folder / "config.json")), dtype


def config_from_fields(fields: Mapping[str, Any], label: str) -> ModelConfig:
    """Parses the fields of a config.json.

    Args:
      fields: of the JSON object.
      label: what to call it in messages.

    Raises:
      ModelLoadError: an architecture, or the value of a field, is not supported; a field is
        missing or of the wrong type.
    """
    family = fields.get("model_type")
    architectures = fields.get("architectures") or [_ARCHITECTURES.get(str(family))]
    if family not in _DEFAULTS or architectures[0] != _ARCHITECTURES[family]:
        raise ModelLoadError(
            f"{label}: model_type={family!r} with architecture {architectures[0]!r} is not "
            f"supported (supported: {', '.join(_ARCHITECTURES.values())})"
        )
    fields = {**_DEFAULTS[family], **fields}
    for name, allowed in _MUST_BE.items():
        if fields.get(name) not in allowed:
            raise ModelLoadError(f"{label}: {name}={fields[name]!r} is not supported")
    if fields.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(
            f"{label}: hidden_act={fields['hidden_act']!r} is not supported (supported: silu)"
        )

    def get(name: str, default: int | None = None) -> int:
        value = fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problem = "is missing" if value is None else f"={value!r} is not a positive integer"
            raise ModelLoadError(f"{label}: {name} {problem}".replace(" =", "="))
        return value

    heads, hidden = get("num_attention_heads"), get("hidden_size")
    kv_heads = get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelLoadError(
            f"{label}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = get("head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelLoadError(f"{label}: head_dim={head_dim} must be even for rotary embeddings")
    layers = get("num_hidden_layers")
    window, full_layers = _window(family, fields, layers, label)
    theta, scaling = _rope(fields, label)
    return ModelConfig(
        family=family,
        vocab_size=get("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(fields["rms_norm_eps"], "rms_norm_eps", label),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        sliding_window=window,
        num_full_attention_layers=full_layers,
        max_position_embeddings=get("max_position_embeddings"),
        bos_token_id=fields.get("bos_token_id"),
        eos_token_ids=_ids(fields.get("eos_token_id"), label),
    )


def _ids(value: Any, label: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelLoadError(f"{label}: eos_token_id={value!r} is neither an id nor a list of ids")
    return tuple(ids)


def _number(value: Any, name: str, label: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelLoadError(f"{label}: {name}={value!r} is not a number")
    return float(value)


def _window(
    family: str, fields: Mapping[str, Any], layers: int, label: str
) -> tuple[int | None, int]:
    """Sliding window, and how many of the first layers ignore it."""
    window = fields.get("sliding_window")
    if family == "llama" or (family != "mistral" and not fields.get("use_sliding_window", False)):
        window = None
    full = int(fields.get("max_window_layers") or 0) if family.startswith("qwen") else 0
    kinds = fields.get("layer_types")
    if window is None or kinds is None:
        return (None, 0) if window is None or full >= layers else (window, full)
    full = sum(kind == "full_attention" for kind in kinds)
    expected = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if list(kinds) != expected:
        raise ModelLoadError(
            f"{label}: layer_types must be full_attention for the first layers and "
            "sliding_attention for the rest"
        )
    return (None, 0) if full == layers else (window, full)


def _rope(fields: Mapping[str, Any], label: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling; newer files hold both in `rope_parameters`."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", fields.get("rope_theta"))
    theta = _number(10000.0 if theta is None else theta, "rope_theta", label)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelLoadError(
            f"{label}: rope scaling {kind!r} is not supported (supported: default, linear, llama3)"
        )

    def get(name: str) -> float:
        if name not in scaling:
            raise ModelLoadError(f"{label}: rope scaling {kind!r} lacks {name}")
        return _number(scaling[name], name, label)

    if kind == "linear":
        return theta, RopeScaling("linear", get("factor"))
    return theta, RopeScaling(
        "llama3",
        get("factor"),
        get("low_freq_factor"),
        get("high_freq_factor"),
        int(get("original_max_position_embeddings")),
    )
