"""Dispatch between implementations of the kernel contract."""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels import attention
from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec

SPEC = KVCacheSpec(4, 16, 2, 64, jnp.bfloat16)
CONFIG = AttentionConfig(0.125)


@pytest.fixture(autouse=True)
def fresh_choices():
    attention._resolve.cache_clear()
    yield
    attention._resolve.cache_clear()


def test_a_tpu_takes_its_own_kernels(caplog) -> None:
    assert attention.resolve_implementation(SPEC, CONFIG, "tpu") == "tpu"
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 24}, "page_size=24"),
        ({"head_dim": 512}, "head_dim=512"),
        ({"dtype": jnp.float16}, "dtype=float16"),
    ],
)
def test_what_the_tpu_kernels_decline_goes_to_xla_with_one_warning(changes, words, caplog) -> None:
    spec = dataclasses.replace(SPEC, **changes)
    for _ in range(2):
        assert attention.resolve_implementation(spec, CONFIG, "tpu") == "xla"
    (record,) = caplog.records
    assert "Attention implementation tpu is passed over" in record.message
    assert words in record.message


@pytest.mark.parametrize(
    ("spec", "config", "words"),
    [
        (dataclasses.replace(SPEC, page_size=0), CONFIG, "page_size=0 must be at least 1"),
        (SPEC, dataclasses.replace(CONFIG, sliding_window=0), "sliding_window=0 must be"),
        (SPEC, dataclasses.replace(CONFIG, soft_cap=-1.0), "soft_cap=-1.0 must be positive"),
        (SPEC, dataclasses.replace(CONFIG, max_query_len=0), "max_query_len=0 must be"),
    ],
)
def test_nonsense_is_the_callers_error(spec, config, words) -> None:
    with pytest.raises(ValueError, match=words):
        attention.resolve_implementation(spec, config, "tpu")


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="implementation='cuda' is not one of: reference, xla"):
        attention.implementation_module("cuda")
    with pytest.raises(ValueError, match="platform='rocm' is not one of: cpu, gpu, tpu"):
        attention.resolve_implementation(SPEC, platform="rocm")


def test_without_a_name_the_platforms_best_is_taken(monkeypatch) -> None:
    spec = dataclasses.replace(SPEC, page_size=24)
    monkeypatch.setattr(attention.jax, "default_backend", lambda: "tpu")
    assert attention.init_kv_pages(spec).shape == (4, 24, 2, 2, 64)  # xla's layout
    assert attention.init_kv_pages(SPEC).shape == (4, 2, 1, 16, 128)
