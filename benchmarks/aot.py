"""Compiles the engine's steps for a TPU that is not there, and says what would fit.

    python -m benchmarks.aot --topology v6e:1x1 --model_config llama-3.1-8b
    python -m benchmarks.aot --topology v5e:2x2 --model_config path/to/config.json --max_num_seqs 64

Weights are abstract: nothing is loaded. Needs libtpu (pip install 'tidegate[tpu]'). The chip's
HBM is what XLA's compiler allows a program, not what the data sheet says.
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import app, flags

from benchmarks import aot_plan
from engine.buckets import Buckets
from engine.config import EngineConfig

_TOPOLOGY = flags.DEFINE_string("topology", "v6e:1x1", "TPU slice, as in v5e:2x2.")
_MODEL_CONFIG = flags.DEFINE_string(
    "model_config", "qwen3-0.6b", "Name of a known shape or path of a Hugging Face config.json."
)
_QUANTIZATION = flags.DEFINE_enum("quantization", None, ["int8"], "Of the weights.")
_KV_DTYPE = flags.DEFINE_enum(
    "kv_cache_dtype", "bfloat16", ["bfloat16", "float32"], "Of keys and values."
)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 64, "Rows that run at once.", lower_bound=1)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 8192, "Longest sequence.", lower_bound=2)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", 2048, "Tokens of one step.", lower_bound=1
)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 32, "Tokens per KV block.", lower_bound=1)
_UTILIZATION = flags.DEFINE_float("device_memory_utilization", 0.9, "Share of HBM to use.")
_NUM_BLOCKS = flags.DEFINE_integer(
    "num_kv_blocks", None, "Blocks of the pool to compile for; by default what seems to fit."
)
_DECODE_STEPS = flags.DEFINE_integer(
    "max_decode_steps",
    EngineConfig.max_decode_steps,
    "Decode steps that one dispatch may run.",
    lower_bound=1,
)
_ALL = flags.DEFINE_bool(
    "all_buckets", False, "Compile every bucket instead of the largest decode and mixed ones."
)
_STEP = flags.DEFINE_enum("step", "both", ["both", "decode", "mixed"], "Kind of steps to compile.")


def main(argv: Sequence[str]) -> None:
    del argv
    plan = aot_plan.Plan(
        aot_plan.model_config(_MODEL_CONFIG.value),
        _TOPOLOGY.value,
        _QUANTIZATION.value,
        _KV_DTYPE.value,
        _MAX_NUM_SEQS.value,
        _MAX_MODEL_LEN.value,
        _BLOCK_SIZE.value,
        max_decode_steps=_DECODE_STEPS.value,
    )
    buckets = Buckets(plan.max_num_seqs, _MAX_TOKENS.value)
    shapes = buckets.all if _ALL.value else (buckets.decode[-1], buckets.mixed[-1])
    if _STEP.value != "both":
        shapes = [shape for shape in shapes if shape.decode == (_STEP.value == "decode")]
    print(_MODEL_CONFIG.value)
    for line in aot_plan.describe(plan, shapes, _UTILIZATION.value, _NUM_BLOCKS.value):
        print(line, flush=True)


if __name__ == "__main__":
    app.run(main)
