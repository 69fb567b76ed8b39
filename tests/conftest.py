"""A tiny random model with a tokenizer, so that engine tests take seconds."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A Hugging Face folder without weights: load it with load_format="dummy"."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    characters = ["<eos>", "<bos>", *(chr(c) for c in range(32, 126))]
    vocab = {c: i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}|{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": template})
    )
    return folder


@pytest.fixture(scope="session")
def tiny_settings(tiny_model_dir):
    """Settings of an engine that starts in a few seconds."""
    return {
        "model": str(tiny_model_dir),
        "load_format": "dummy",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "block_size": 16,
        "num_kv_blocks": 200,
    }
