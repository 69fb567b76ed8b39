"""Every family against logits recorded from transformers, and the ways to run it against each other."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import ModelConfig, Transformer, load_model
from models.testing import sequence_logits
from pallas_kernels.attention import KVCacheSpec
from pallas_kernels.batch import decode_batch

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FAMILIES = sorted(path.name for path in FIXTURES.iterdir())
TOLERANCE = 1e-4


def test_fixtures_are_small_and_complete():
    assert {"llama", "llama3_rope", "llama_linear_rope", "mistral", "qwen2", "qwen3"} <= {*FAMILIES}
    for name in FAMILIES:
        assert sum(p.stat().st_size for p in (FIXTURES / name).iterdir()) <= 2 * 1024 * 1024


@pytest.mark.parametrize("name", FAMILIES)
def test_family_matches_transformers(name, expected):
    model = load_model(FIXTURES / name, progress=False).model
    token_ids, logits = expected(name)
    got = sequence_logits(model, token_ids, pad_to=48)
    assert np.abs(got - logits).max() < TOLERANCE


@pytest.mark.parametrize(("name", "chunk"), [("mistral", 1), ("qwen3", 7)])
def test_steps_match_one_pass(name, chunk, expected):
    model = load_model(FIXTURES / name, progress=False).model
    token_ids, logits = expected(name)
    assert np.abs(sequence_logits(model, token_ids, chunk=chunk) - logits).max() < TOLERANCE


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}])
def test_weights_without_native_kernels(settings, expected, monkeypatch):
    monkeypatch.setattr("pallas_kernels.cpu_build.available", lambda: False)
    model = load_model(FIXTURES / "llama3_rope", progress=False, **settings).model
    assert model.lm_head.table.weight.shape == (96, 32)
    assert model.lm_head.table.weight.axes == ("vocab", "embed")
    token_ids, logits = expected("llama3_rope")
    got = sequence_logits(model, token_ids, pad_to=48, implementation="xla")
    assert np.abs(got - logits).max() < (0.2 if settings else TOLERANCE)


@pytest.mark.parametrize("name", ["llama3_rope", "qwen2"])
def test_shards_reorder_fused_weights_only(name, expected):
    loaded = load_model(FIXTURES / name, shards=2, progress=False)
    plain = load_model(FIXTURES / name, progress=False)
    layer, other = loaded.model.layers[0], plain.model.layers[0]
    one, two = layer.attention.qkv.logical(), other.attention.qkv.logical()
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(np.sort(one, axis=1), np.sort(two, axis=1))
    np.testing.assert_array_equal(layer.mlp.down.logical(), other.mlp.down.logical())
    token_ids, logits = expected(name)
    assert np.abs(sequence_logits(loaded.model, token_ids, pad_to=48) - logits).max() < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "tolerance"), [({"dtype": "bfloat16"}, 0.15), ({"quantization": "int8"}, 0.15)]
)
def test_narrow_weights_stay_close(settings, tolerance, expected):
    model = load_model(FIXTURES / "llama", progress=False, **settings).model
    token_ids, logits = expected("llama")
    error = np.abs(sequence_logits(model, token_ids) - logits)
    assert 1e-5 < error.max() < tolerance


def test_shards_must_divide():
    with pytest.raises(ValueError, match="3 shards do not divide num_kv_heads=2"):
        load_model(FIXTURES / "qwen3", shards=3, progress=False)


def test_parameters_are_few_and_named():
    model = Transformer.abstract(
        load_model(FIXTURES / "qwen2", load_format="dummy", progress=False).config,
        dtype=jnp.bfloat16,
    )
    params = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    # Per layer: two norms, qkv and its bias, o, gate_up, down; then the table and the last norm.
    assert len(params) == 3 * 7 + 2
    for path, param in params.items():
        assert isinstance(param.get_value(), jax.ShapeDtypeStruct), path
        named = {name for name in param.axes if name is not None}
        assert named <= {"embed", "heads", "mlp", "vocab", "norm"}, path
        assert named, path


def test_wrong_number_of_pages():
    model = load_model(FIXTURES / "llama", progress=False).model
    spec = KVCacheSpec(2, 8, 2, 8, jnp.float32)
    batch = decode_batch(jnp.ones(1, jnp.int32), jnp.ones((1, 1), jnp.int32), page_size=8)
    with pytest.raises(ValueError, match="0 KV page arrays for 3 layers"):
        model(jnp.zeros(1, jnp.int32), batch, [], spec=spec)


def test_config_is_hashable_and_layers_have_windows():
    config = load_model(FIXTURES / "qwen2_window", load_format="dummy", progress=False).config
    assert isinstance(config, ModelConfig)
    assert hash(config) == hash(config)
    assert [config.layer_window(i) for i in range(3)] == [None, 9, 9]


REFERENCE = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "smollm2_135m_q4_1_greedy.json").read_text()
)


def test_default_model_matches_its_reference():
    """Teacher-forced: the best token and the top-5 log-probabilities at every recorded step."""
    model = load_model(dtype="float32", progress=False).model
    cases = [c for c in REFERENCE["cases"] if len(c["prompt_ids"]) <= 64][:3]
    for case in cases:
        prompt, output = case["prompt_ids"], case["output_ids"]
        logits = sequence_logits(model, [*prompt, *output[:-1]], pad_to=128)[len(prompt) - 1 :]
        assert logits.argmax(axis=1).tolist() == output, case["id"]
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        for step, top in enumerate(case["top5_first16"]):
            for token, logprob in top:
                assert logprobs[step, token] == pytest.approx(logprob, abs=1e-3), case["id"]
