"""Loading keeps little beside the parameters in memory."""

import json
import subprocess
import sys

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from models import convert
from models.hf_config import config_from_fields
from models.weights import expected_tensors

MIB = 1024 * 1024
FIELDS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
# Prints parameter bytes and the growth of the peak resident set while loading.
MEASURE = """
import json, re, sys
import jax, orbax.checkpoint, gguf
from models import load_model
from models.transformer import parameter_bytes

def status(name):  # bytes; ru_maxrss will not do, it begins with the parent's
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\\s*(\\d+) kB", file.read())[1]) * 1024

path, settings = sys.argv[1], json.loads(sys.argv[2])
jax.block_until_ready(jax.numpy.zeros(8) + 1)
before = status("VmRSS")
model = load_model(path, progress=False, **settings).model
print(parameter_bytes(model), status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A bfloat16 checkpoint of 440 MiB, written without holding it in memory."""
    folder = tmp_path_factory.mktemp("big") / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FIELDS))
    shapes = expected_tensors(config_from_fields(FIELDS, "test"))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    block = np.random.default_rng(0).standard_normal(MIB).astype(jnp.bfloat16).tobytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(block)):
            file.write(block[: end - start])
    return folder


@pytest.fixture(scope="module")
def gguf_checkpoint(tmp_path_factory):
    """The same shape in 8 bits, 240 MiB."""
    path = tmp_path_factory.mktemp("big") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_block_count(FIELDS["num_hidden_layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(FIELDS["hidden_size"])
    writer.add_feed_forward_length(FIELDS["intermediate_size"])
    writer.add_head_count(FIELDS["num_attention_heads"])
    writer.add_head_count_kv(FIELDS["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn": {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"},
        "mlp": {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
    }  # fmt: skip
    top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    rng = np.random.default_rng(0)
    for name, shape in expected_tensors(config_from_fields(FIELDS, "test")).items():
        parts = name.removeprefix("model.").split(".")
        if parts[0] == "layers":
            theirs = names[parts[2]] if len(parts) == 4 else names[parts[2]][parts[3]]
            name = f"blk.{parts[1]}.{theirs}.weight"
        else:
            name = f"{top[parts[0]]}.weight"
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        blocks = rng.integers(0, 40, (shape[0], shape[1] // 32 * 34), np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _measure(path, slack=200 * MIB, **settings):
    command = [sys.executable, "-c", MEASURE, str(path), json.dumps(settings)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    num_bytes, growth = map(int, result.stdout.split())
    print(f"{settings}: parameters {num_bytes / MIB:.0f} MiB, peak {growth / MIB:.0f} MiB")
    # The promise is 1.3 times the parameters' bytes and 300 MiB; a second copy must not pass.
    assert growth <= 1.3 * num_bytes + slack
    return num_bytes, growth


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}])
def test_safetensors(checkpoint, settings):
    num_bytes, _ = _measure(checkpoint, **settings)
    assert num_bytes > 400 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"load_format": "dummy"}])
def test_other_forms(checkpoint, settings):
    _measure(checkpoint, slack=300 * MIB, **settings)


def test_orbax(checkpoint, tmp_path):
    folder = convert.convert(checkpoint, tmp_path / "orbax", progress=False)
    _measure(folder)


def test_gguf(gguf_checkpoint):
    _measure(gguf_checkpoint, dtype="bfloat16")
