"""Host work per decode step, with a device that does nothing.

The engine, its scheduler and its runner are the real ones, and so is the tree of arrays that each
step is dispatched with; only the compiled step is replaced by one that returns its donated
arguments and fixed tokens. What remains is the host's share: planning, packing, dispatch, reading
tokens, accounting.

It is measured with one step per dispatch, and as served by default: where nothing waits, a device
this fast is given several decode steps in one dispatch.

    python -m benchmarks.host_overhead [--rows 32,256] [--steps 1000] [--json]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.sampler import SampledLogprobs
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.step import StepOutput


def _fake_step(rows: int, most: int) -> Any:
    """A step that returns what it was given; `most` steps are run in a row."""

    tokens = jnp.full((most, rows) if most > 1 else rows, 5, jnp.int32)
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


def make_core(rows: int, num_steps: int, max_decode_steps: int) -> EngineCore:
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
        max_decode_steps=max_decode_steps,
        warmup=False,
    )
    core = EngineCore(config, progress=False)
    runner = core.runner
    for shape in runner.buckets.all:
        most = max_decode_steps if shape.decode else 1
        runner._compiled[shape] = runner.compile_step(_fake_step(shape.num_rows, most), shape)
    return core


def measure(rows: int, num_steps: int, max_decode_steps: int) -> float:
    """Median thread CPU time per decode step in microseconds, over `num_steps` dispatches."""
    length = (num_steps + 30) * max_decode_steps
    core = make_core(rows, length, max_decode_steps)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    for i in range(rows):
        core.add_request(f"r{i}", [7] * 16, params)
    while _steps_in_flight(core) < max_decode_steps:
        core.step()
    for _ in range(10):
        core.step()
    times = []
    for _ in range(num_steps):
        begun = time.thread_time_ns()
        core.step()
        times.append((time.thread_time_ns() - begun) / 1e3 / _steps_in_flight(core))
    return statistics.median(times)


def _steps_in_flight(core: EngineCore) -> int:
    """Decode steps of the last dispatch; 0 while it was no decode."""
    plan = core._in_flight[-1].plan if core._in_flight else None
    return plan.num_steps if plan and plan.num_decodes == plan.total_num_tokens else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.host_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", default="1,32,256", help="decoding rows, comma-separated")
    add("--steps", type=int, default=1000, help="steps per measurement")
    add("--json", action="store_true", help="print a list of {rows, single_us, us} instead")
    add("--profile", action="store_true", help="print where the time of single steps goes")
    arguments = parser.parse_args(argv)
    rows = [int(n) for n in arguments.rows.split(",")]
    if arguments.profile:
        with cProfile.Profile() as profile:
            measure(rows[-1], arguments.steps, 1)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return 0
    most = EngineConfig().max_decode_steps
    results = [
        {
            "rows": n,
            "single_us": measure(n, arguments.steps, 1),
            "us": measure(n, max(10, arguments.steps // most), most),
        }
        for n in rows
    ]
    if arguments.json:
        print(json.dumps(results))
        return 0
    print("host us (thread CPU) per decode step")
    print(f"rows   one step per dispatch   up to {most} (default)")
    for result in results:
        print(f"{result['rows']:4d}   {result['single_us']:21.0f}   {result['us']:17.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
