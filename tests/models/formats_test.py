"""The same weights through every format give the same model."""

import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import convert, load_model
from models.config import RopeScaling
from models.gguf_file import GGUFFile
from models.gguf_loader import read_metadata
from models.layers import rope_frequencies
from models.testing import assert_same_parameters, sequence_logits

FORMATS = ["llama3_rope", "qwen2", "qwen3"]


def _load(path, **settings):
    return load_model(path, progress=False, **settings)


def test_sharded_safetensors_and_orbax_give_identical_logits(
    fixtures, expected, write_sharded, tmp_path
):
    token_ids, _ = expected("llama3_rope")
    sharded = write_sharded("llama3_rope", tmp_path / "sharded")
    converted = convert.convert(sharded, tmp_path / "orbax", progress=False)
    models = [_load(path).model for path in (fixtures / "llama3_rope", sharded, converted)]
    one, two, three = (sequence_logits(model, token_ids, pad_to=48) for model in models)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize("name", FORMATS)
def test_orbax_restores_every_parameter(name, fixtures, tmp_path):
    source = _load(fixtures / name)
    folder = convert.convert(fixtures / name, tmp_path / "orbax", progress=False)
    restored = _load(folder)
    assert restored.config == source.config
    assert restored.source_path == restored.tokenizer_source == folder
    assert_same_parameters(restored.model, source.model)


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"shards": 2}]
)
def test_orbax_restores_into_another_form(settings, fixtures, tmp_path):
    folder = convert.convert(fixtures / "qwen2", tmp_path / "orbax", progress=False)
    assert_same_parameters(
        _load(folder, **settings).model, _load(fixtures / "qwen2", **settings).model
    )


@pytest.mark.parametrize("name", ["llama", "llama_linear_rope", "qwen2", "qwen3"])
def test_gguf_gives_the_same_parameters(name, fixtures, write_gguf, tmp_path):
    extra = {}
    if name == "llama_linear_rope":
        extra["llama.rope.scaling.type"] = ("linear", gguf.GGUFValueType.STRING)
        extra["llama.rope.scaling.factor"] = (4.0, gguf.GGUFValueType.FLOAT32)
    path = write_gguf(name, tmp_path / "model.gguf", extra=extra)
    ours, theirs = _load(path), _load(fixtures / name)
    assert ours.tokenizer_source == path
    assert_same_parameters(ours.model, theirs.model)
    for field in ("vocab_size", "head_dim", "rope_theta", "rope_scaling", "tie_embeddings"):
        assert getattr(ours.config, field) == getattr(theirs.config, field), field
    assert ours.config.qkv_bias == theirs.config.qkv_bias
    assert ours.config.qk_norm == theirs.config.qk_norm
    assert ours.config.norm_eps == pytest.approx(theirs.config.norm_eps)
    assert (ours.config.bos_token_id, ours.config.eos_token_ids) == (1, (2,))


def test_gguf_of_llama3_carries_rope_divisors(fixtures, expected, write_gguf, tmp_path):
    config = _load(fixtures / "llama3_rope", load_format="dummy").config
    unscaled = 1 / config.rope_theta ** (np.arange(0, 16, 2) / 16)
    divisors = (unscaled / rope_frequencies(config)).astype(np.float32)
    assert divisors.max() == pytest.approx(8.0)
    path = write_gguf("llama3_rope", tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    loaded = _load(path)
    assert loaded.config.rope_scaling == RopeScaling("divisors", divisors=tuple(divisors.tolist()))
    token_ids, logits = expected("llama3_rope")
    assert np.abs(sequence_logits(loaded.model, token_ids, pad_to=48) - logits).max() < 1e-4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_gguf_dequantises(kind, fixtures, write_gguf, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    path = write_gguf("mistral", tmp_path / "m.gguf", arch="qwen2", quantize=kind)
    file = GGUFFile(path)
    reader = gguf.GGUFReader(path)
    assert [t.name for t in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors:
        np.testing.assert_array_equal(
            file.read(tensor.name),
            gguf.dequantize(tensor.data, tensor.tensor_type).reshape(
                file.tensors[tensor.name].shape
            ),
        )


def test_gguf_metadata_agrees_with_the_gguf_package(write_gguf, tmp_path):
    path = write_gguf("qwen3", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(path)
    ours = read_metadata(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    nested = ours.pop("test.nested"), theirs.pop("test.nested")
    assert nested[0] == [[1, 2], [3]]
    assert ours == theirs
    assert ours["tokenizer.ggml.tokens"][3:] == ["é", "日本"]
    assert ours["test.flags"] == [True, False]


def test_converting_gguf_keeps_the_tokenizer(write_gguf, tmp_path):
    source = write_gguf("llama", tmp_path / "m.gguf")
    assert convert.main([str(source), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    loaded = _load(tmp_path / "out")
    assert loaded.model.embedding.dtype == jnp.bfloat16
    assert loaded.tokenizer_source == tmp_path / "out" / "tokenizer.gguf"
    assert read_metadata(loaded.tokenizer_source) == read_metadata(source)


def test_converting_a_folder_keeps_the_tokenizer(copy_of, tmp_path):
    source = copy_of("qwen3")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("hello")
    folder = convert.convert(source, tmp_path / "out", progress=False)
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert (folder / "chat_template.jinja").read_text() == "hello"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert not (folder / "config.json").exists()


def test_conversion_is_whole_or_nothing(copy_of, tmp_path, capsys):
    source = copy_of("llama")
    (source / "model.safetensors").write_bytes(b"short")
    assert convert.main([str(source), str(tmp_path / "out")]) == 1
    assert "model.safetensors is truncated" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    assert convert.main([str(source), str(tmp_path / "there")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "there"]


def test_dummy_weights_follow_the_seed(fixtures):
    one, same, other = (
        _load(fixtures / "qwen2", load_format="dummy", seed=seed).model for seed in (1, 1, 2)
    )
    assert_same_parameters(one, same)
    a, b = (np.asarray(m.layers[0].mlp.down.logical()) for m in (one, other))
    assert not np.array_equal(a, b)
    assert a.std() == pytest.approx(0.02, rel=0.05)
    np.testing.assert_array_equal(one.final_norm.logical(), 1)
    assert np.asarray(one.layers[1].attention.qkv.bias[...]).std() > 0.01


def test_every_parameter_is_an_array(fixtures):
    model = _load(fixtures / "qwen3").model
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert param.get_value().size > 0, path
