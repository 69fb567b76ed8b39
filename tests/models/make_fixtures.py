"""Writes the tiny checkpoints of the family tests, with logits recorded from transformers.

Needs torch and transformers (5.x), which the tests themselves do not:

    python tests/models/make_fixtures.py

Each folder gets config.json, model.safetensors (random float32 weights, norms and biases too) and
expected.npz: token_ids int32 [T] and the float32 logits [T, V] of transformers' eager attention.
"""

import pathlib
import shutil

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures"
TOKENS = 40
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "llama3_rope": (
        "Llama",
        {
            "tie_word_embeddings": False,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama_linear_rope": (
        "Llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def make(name, family, settings):
    """Writes one fixture."""
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = config_class(**{**COMMON, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(sum(map(ord, name)))
    model = model_class(config).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            centre = 1.0 if "norm" in key else 0.0
            value.copy_(centre + 0.15 * torch.randn_like(value))
    token_ids = torch.randint(0, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(token_ids).logits[0]
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    np.savez_compressed(
        folder / "expected.npz",
        token_ids=token_ids[0].numpy().astype(np.int32),
        logits=logits.numpy().astype(np.float32),
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, logits within {logits.abs().max():.2f}")


if __name__ == "__main__":
    for fixture, (family_name, family_settings) in FAMILIES.items():
        make(fixture, family_name, family_settings)
