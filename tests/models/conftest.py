"""Tiny checkpoints of every family, as they are recorded and in other formats."""

import json
import pathlib
import shutil

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def _expected(name):
    """Recorded (token_ids, logits) of a fixture."""
    with np.load(FIXTURES / name / "expected.npz") as arrays:
        return arrays["token_ids"], arrays["logits"]


def _write_sharded(name, folder, shards=3):
    """Copies a fixture with its tensors dealt to several files and an index."""
    shutil.copytree(FIXTURES / name, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[index::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_GGUF_NAMES = {
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


def _write_gguf(name, path, *, quantize=None, arch=None, extra=None, drop=()):
    """Writes a fixture as llama.cpp's converter would, rotary pairs of llama files interleaved."""
    fields = json.loads((FIXTURES / name / "config.json").read_text())
    tensors = load_file(FIXTURES / name / "model.safetensors")
    arch = arch or fields["model_type"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(fields["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_list(["<unk>", "<s>", "</s>", "é", "日本"])
    writer.add_array("test.flags", [True, False])
    writer.add_array("test.nested", [[1, 2], [3]])
    for key, value in (extra or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            writer.add_key_value(key, *value)
    for key, value in tensors.items():
        theirs = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }.get(key)
        if theirs is None:
            _, _, layer, rest = key.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            theirs = f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"
        count = {"q_proj": heads, "k_proj": kv_heads}.get(key.split(".")[-2])
        if count and arch == "llama":
            halves = value.reshape(count, 2, head_dim // 2, -1)
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        if theirs in drop:
            continue
        if quantize is not None and value.ndim == 2 and value.shape[-1] % 32 == 0:
            writer.add_tensor(theirs, gguf.quantize(value, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(theirs, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def fixtures():
    """Folder of the tiny checkpoints."""
    return FIXTURES


@pytest.fixture(scope="session")
def expected():
    """expected(name) -> recorded (token_ids [T], logits [T, V])."""
    return _expected


@pytest.fixture(scope="session")
def write_sharded():
    """write_sharded(name, folder): a fixture with its tensors dealt to several files."""
    return _write_sharded


@pytest.fixture(scope="session")
def write_gguf():
    """write_gguf(name, path, ...): a fixture as llama.cpp's converter would write it."""
    return _write_gguf


@pytest.fixture
def copy_of(tmp_path):
    """Copies a fixture into a scratch folder, with fields of config.json replaced."""

    def copy(name, **fields):
        folder = tmp_path / "model"
        shutil.copytree(FIXTURES / name, folder)
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy
