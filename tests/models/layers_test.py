"""The parts of the decoder against plain numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models import ModelConfig, RopeScaling
from models.layers import (
    RMSNorm,
    fuse_columns,
    rope_frequencies,
    rotary_tables,
    rotate,
    split_columns,
)

CONFIG = ModelConfig(
    family="llama",
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rope_theta=500000.0,
)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_split_undoes_fuse(shards):
    rng = np.random.default_rng(0)
    sizes = (16, 8, 4)
    parts = [rng.standard_normal((3, size)).astype(np.float32) for size in sizes]
    fused = fuse_columns(parts, shards)
    for part, back in zip(parts, split_columns(jnp.asarray(fused), sizes, shards), strict=True):
        np.testing.assert_array_equal(part, back)
    # The first shard's slice holds the first columns of every part.
    first = fused[:, : sum(sizes) // shards]
    expected = np.concatenate([part[:, : part.shape[1] // shards] for part in parts], axis=1)
    np.testing.assert_array_equal(first, expected)


def test_rotation_turns_pairs_half_a_head_apart():
    x = np.random.default_rng(1).standard_normal((5, 3, 64)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 8191], np.int32)
    got = np.asarray(rotate(jnp.asarray(x), *rotary_tables(jnp.asarray(positions), CONFIG)))
    frequency = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    turn = np.exp(1j * positions[:, None, None] * frequency)
    turned = (x[..., :32] + 1j * x[..., 32:]) * turn
    np.testing.assert_allclose(
        got, np.concatenate([turned.real, turned.imag], axis=-1), atol=5e-3, rtol=0
    )
    np.testing.assert_array_equal(got[0], x[0])


def test_linear_and_divisors_scale_every_pair():
    plain = rope_frequencies(CONFIG)
    linear = dataclasses.replace(CONFIG, rope_scaling=RopeScaling("linear", 4.0))
    np.testing.assert_allclose(rope_frequencies(linear), plain / 4, rtol=1e-6)
    divisors = tuple(float(n) for n in range(1, 33))
    scaled = dataclasses.replace(CONFIG, rope_scaling=RopeScaling("divisors", divisors=divisors))
    np.testing.assert_allclose(rope_frequencies(scaled), plain / np.array(divisors), rtol=1e-6)


def test_llama3_keeps_short_waves_and_slows_long_ones():
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    plain = rope_frequencies(CONFIG)
    ratio = rope_frequencies(dataclasses.replace(CONFIG, rope_scaling=scaling)) / plain
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[wavelength > 8192], 1 / 8, rtol=1e-6)
    between = ratio[(wavelength >= 8192 / 4) & (wavelength <= 8192)]
    assert len(between) > 1
    assert (np.diff(between) < 0).all()
    assert ((between > 1 / 8) & (between < 1)).all()


def test_norm_is_computed_in_float32():
    norm = RMSNorm(256, eps=1e-6, dtype=jnp.bfloat16)
    weight = np.random.default_rng(2).uniform(0.5, 2, 256).astype(np.float32)
    norm.load(weight)
    x = jnp.asarray(100 * np.random.default_rng(3).standard_normal((4, 256)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    stored = np.asarray(norm.logical(), np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * stored
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    # Half a unit in the last place of bfloat16 is 2 ** -9.
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2**-8)
