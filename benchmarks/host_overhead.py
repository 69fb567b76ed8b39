"""Host work per decode step, with a device that does nothing.

The engine, its scheduler and its runner are the real ones, and so is the tree of arrays that each
step is dispatched with; only the compiled step is replaced by one that returns its donated
arguments and fixed tokens. What remains is the host's share: planning, packing, dispatch, reading
tokens, accounting.

    python -m benchmarks.host_overhead [--rows 32,256] [--steps 1000] [--json]
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device_state import StepShape
from engine.sampler import SampledLogprobs
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.step import StepOutput

_ROWS = flags.DEFINE_list("rows", ["1", "32", "256"], "Decoding rows, comma-separated.")
_STEPS = flags.DEFINE_integer("steps", 1000, "Steps per measurement.", lower_bound=10)
_JSON = flags.DEFINE_boolean("json", False, "Print a list of {rows, us, wall_us} instead.")
_PROFILE = flags.DEFINE_boolean("profile", False, "Print where the host's time goes.")


def _fake_step(rows: int) -> Any:
    """A step that returns what it was given."""

    tokens = jnp.full(rows, 5, jnp.int32)
    none = SampledLogprobs(
        jnp.zeros(rows),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS)),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
    )

    def step(leaves: Any, kv_pages: Any, state: Any, packed: jax.Array) -> Any:
        del leaves
        return kv_pages, state, StepOutput(tokens + packed[0] * 0, none)

    return step


def make_core(rows: int, num_steps: int) -> EngineCore:
    """An engine on the default model's shape whose steps do nothing."""
    length = 64 + num_steps
    config = EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(512, rows),
        max_model_len=length,
        num_kv_blocks=rows * (length // 16 + 2) + 2,
        load_format="auto",
        kv_cache_dtype="bfloat16",
        enable_prefix_caching=False,
        warmup=False,
    )
    core = EngineCore(config, progress=False)
    runner = core.runner
    for shape in runner.buckets.all:
        runner._compiled[shape] = runner.compile_step(_fake_step(shape.num_rows), shape)
    return core


def measure(rows: int, num_steps: int) -> dict[str, float]:
    """Medians over `num_steps` steady decode steps: {rows, us (thread CPU), wall_us}."""
    core = make_core(rows, num_steps + 30)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 30, ignore_eos=True)
    for i in range(rows):
        core.add_request(f"r{i}", [7] * 16, params)
    while not any(isinstance(s, StepShape) and s.decode for s in [_last_shape(core)]):
        core.step()
    for _ in range(10):
        core.step()
    cpu, wall = [], []
    for _ in range(num_steps):
        begun, begun_wall = time.thread_time_ns(), time.perf_counter_ns()
        core.step()
        cpu.append((time.thread_time_ns() - begun) / 1e3)
        wall.append((time.perf_counter_ns() - begun_wall) / 1e3)
    return {"rows": rows, "us": statistics.median(cpu), "wall_us": statistics.median(wall)}


def _last_shape(core: EngineCore) -> StepShape | None:
    in_flight = core._in_flight
    if not in_flight:
        return None
    plan = in_flight[-1].plan
    return core.runner.buckets.select(
        num_rows=len(plan.slots),
        num_tokens=plan.total_num_tokens,
        num_decodes=plan.num_decodes,
    )


def main(argv: list[str]) -> None:
    del argv
    if _PROFILE.value:
        import cProfile
        import pstats

        with cProfile.Profile() as profile:
            measure(int(_ROWS.value[-1]), _STEPS.value)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    results = [measure(int(rows), _STEPS.value) for rows in _ROWS.value]
    if _JSON.value:
        print(json.dumps(results))
        return
    print("rows   host us per decode step (thread CPU)   wall us")
    for result in results:
        print(f"{result['rows']:4d}   {result['us']:38.0f}   {result['wall_us']:7.0f}")


if __name__ == "__main__":
    app.run(main)
