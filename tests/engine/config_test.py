"""Wrong settings are refused before any device is touched."""

import math

import pytest

from engine.config import EngineConfig


@pytest.mark.parametrize("watermark", [1, 1.0, -0.1, math.nan, math.inf, "abc", "nan", None])
def test_refuses_watermark(watermark):
    with pytest.raises(ValueError, match=r"watermark=.*--watermark"):
        EngineConfig(watermark=watermark).validate()


@pytest.mark.parametrize(("given", "parsed"), [("0.05", 0.05), (0, 0.0), ("auto", "auto")])
def test_parses_watermark(given, parsed):
    assert EngineConfig(watermark=given).validate().watermark == parsed


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "int4"}, "dtype=int4"),
        ({"quantization": "fp4"}, "quantization=fp4"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy=lifo"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"num_kv_blocks": 1}, "num_kv_blocks=1"),
        ({"block_size": 24}, "block_size=24"),
        ({"device_memory_utilization": 0.0}, "device_memory_utilization=0.0"),
        ({"device_memory_utilization": math.nan}, "device_memory_utilization=nan"),
        ({"kv_cache_memory_gib": -1.0}, "kv_cache_memory_gib=-1.0"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "--max_num_batched_tokens"),
        (
            {
                "enable_chunked_prefill": False,
                "max_model_len": 128,
                "max_num_batched_tokens": 64,
            },
            "without chunked prefill",
        ),
    ],
)
def test_refuses(settings, named):
    with pytest.raises(ValueError) as error:
        EngineConfig(**settings).validate()
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_defaults_are_valid():
    EngineConfig().validate()
