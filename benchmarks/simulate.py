"""Simulates the scheduler on a workload under several watermarks, and recommends one.

python -m benchmarks.simulate --trace FILE --watermark 0,0.02,0.05,0.1,auto [--json] [--plot F]
python -m benchmarks.simulate --workload heavy_tail
python -m benchmarks.simulate --output_len lognormal:400:1.2 --num_requests 1000000 --rate 50
python -m benchmarks.simulate --request_log FILE --last_minutes 60 --num_blocks 18724
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from typing import Any

import numpy as np
from absl import app, flags
from numpy.typing import NDArray

from benchmarks import watermark_sweep
from benchmarks.request_logs import load_request_log
from benchmarks.step_models import fit_from_metrics, save_step_model, step_model_from
from benchmarks.workloads import GENERATORS
from scheduler.config import Watermark, check_watermark
from scheduler.workload import Workload, load_trace, make_workload

FLAGS = flags.FLAGS

flags.DEFINE_string("trace", None, "Trace file (JSON, also gzipped).")
flags.DEFINE_enum("workload", None, list(GENERATORS), "A named workload.")
flags.DEFINE_string("request_log", None, "Request log of a server (a JSON object per line).")
flags.DEFINE_string(
    "output_len",
    None,
    "Distribution of output lengths: uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, "
    "exponential:MEAN or constant:N.",
)
flags.DEFINE_string("prompt_len", "uniform:100:1000", "Distribution of prompt lengths.")
flags.DEFINE_integer("num_requests", 1000, "Requests drawn from the distributions.")
flags.DEFINE_integer("concurrency", None, "Requests in the system at once (closed loop).")
flags.DEFINE_float("rate", None, "Poisson arrivals per second (open loop).")
flags.DEFINE_integer("seed", 0, "Seed of the distributions.")
flags.DEFINE_float("last_minutes", None, "Take only the end of the request log.")

flags.DEFINE_list(
    "watermark", [str(w) for w in watermark_sweep.DEFAULT_WATERMARKS], "Fractions, or auto."
)
flags.DEFINE_boolean("lengths_known", False, "Tell auto the true output lengths.")
flags.DEFINE_string("step_model", "gb200", "Preset (gb200, cpu, flat) or JSON file of step times.")
flags.DEFINE_string(
    "fit_from_metrics", None, "Take step times from /metrics: a file, or a URL on this machine."
)
flags.DEFINE_float("fit_seconds", 60.0, "How long to watch a server that does not publish them.")
flags.DEFINE_string("save_step_model", None, "Write the step model to this file.")

flags.DEFINE_integer("num_blocks", None, "KV blocks, the null block included.")
flags.DEFINE_integer("block_size", None, "Tokens per block.")
flags.DEFINE_integer("max_num_seqs", None, "Rows that may run at once.")
flags.DEFINE_integer("max_num_batched_tokens", None, "Token budget of a step.")
flags.DEFINE_integer("max_model_len", None, "Longest sequence.")
flags.DEFINE_boolean("reserve_full_sequence", True, "Admit only what fits as a whole.")
flags.DEFINE_enum("scheduling_policy", "fcfs", ["fcfs", "priority"], "Order of admission.")

flags.DEFINE_boolean("json", False, "Print a list of JSON objects instead of a table.")
flags.DEFINE_string("plot", None, "Save a figure.")
flags.DEFINE_integer("jobs", 1, "Simulations at once.")

_LIMITS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        watermark_sweep.fail("simulate", ValueError(f"unexpected argument {argv[1]!r}"))
    try:
        _run()
    except (ValueError, OSError) as error:
        watermark_sweep.fail("simulate", error)


def _run() -> None:
    watermarks: list[Watermark] = [check_watermark(text) for text in FLAGS.watermark]
    if not watermarks:
        raise ValueError("--watermark names no setting")
    workload = _workload()
    model = _step_model()
    if FLAGS.save_step_model:
        save_step_model(model, FLAGS.save_step_model)
    reports = watermark_sweep.run_sweep(
        workload,
        model,
        watermarks,
        lengths_known=FLAGS.lengths_known,
        settings={
            "reserve_full_sequence": FLAGS.reserve_full_sequence,
            "scheduling_policy": FLAGS.scheduling_policy,
        },
        jobs=FLAGS.jobs,
    )
    if FLAGS.plot:
        watermark_sweep.plot(reports, FLAGS.plot, workload.name)
    if FLAGS.json:
        print(json.dumps([report.to_json() for report in reports], indent=1))
        return
    print(f"{workload.name}: {len(workload)} requests, {workload.num_blocks} blocks, {model}")
    print(watermark_sweep.format_table(reports))
    if len(reports) > 1:
        choice, reason = watermark_sweep.recommend(reports)
        setting = "auto" if choice.watermark == "auto" else f"{choice.watermark:g}"
        print(f"Recommended: --watermark={setting}: {reason}.")


def _step_model() -> Any:
    if FLAGS.fit_from_metrics is None:
        return step_model_from(FLAGS.step_model)
    model = fit_from_metrics(FLAGS.fit_from_metrics, FLAGS.fit_seconds)
    print(f"step times from {FLAGS.fit_from_metrics}: {model}", file=sys.stderr)
    return model


def _limits() -> dict[str, int]:
    return {name: value for name in _LIMITS if (value := getattr(FLAGS, name)) is not None}


def _workload() -> Workload:
    sources = [n for n in ("trace", "workload", "request_log", "output_len") if FLAGS[n].present]
    if len(sources) != 1:
        raise ValueError("give one of --trace, --workload, --request_log and --output_len")
    limits = _limits()
    if FLAGS.trace is not None:
        return _with_limits(load_trace(FLAGS.trace), limits)
    if FLAGS.workload is not None:
        return _with_limits(GENERATORS[FLAGS.workload](), limits)
    if "num_blocks" not in limits:
        raise ValueError(f"--{sources[0]} needs --num_blocks, the size of the KV pool")
    limits.setdefault("max_model_len", 8192)
    if FLAGS.request_log is not None:
        return load_request_log(FLAGS.request_log, last_minutes=FLAGS.last_minutes, **limits)
    return _drawn(limits)


def _with_limits(workload: Workload, limits: dict[str, int]) -> Workload:
    changed = dataclasses.replace(workload, **limits)
    if "max_model_len" in limits:
        bounds = np.minimum(workload.max_tokens, limits["max_model_len"] - workload.prompt_lens)
        changed = dataclasses.replace(changed, max_tokens=bounds)
    return changed


def _drawn(limits: dict[str, int]) -> Workload:
    n = FLAGS.num_requests
    if n < 1:
        raise ValueError(f"--num_requests={n} must be at least 1")
    if (FLAGS.concurrency is None) == (FLAGS.rate is None):
        raise ValueError("give one of --concurrency (closed loop) and --rate (open loop)")
    if FLAGS.rate is not None and not (FLAGS.rate > 0 and math.isfinite(FLAGS.rate)):
        raise ValueError(f"--rate={FLAGS.rate} must be more than 0 requests per second")
    rng = np.random.default_rng(FLAGS.seed)
    longest = limits["max_model_len"]
    prompts = np.clip(_draw(rng, "prompt_len", n), 1, longest - 1)
    outputs = np.clip(_draw(rng, "output_len", n), 1, longest - prompts)
    arrivals = None if FLAGS.rate is None else np.cumsum(rng.exponential(1.0 / FLAGS.rate, n))
    return make_workload(
        FLAGS.output_len,
        prompts,
        outputs,
        arrivals=arrivals,
        max_concurrency=FLAGS.concurrency,
        **limits,
    )


def _draw(rng: np.random.Generator, flag: str, n: int) -> NDArray[np.int64]:
    spec = getattr(FLAGS, flag)
    kind, *texts = spec.split(":")
    if not all(re.fullmatch(r"\d+(\.\d+)?", text) for text in texts):
        texts = []
    numbers = [float(text) for text in texts]
    if kind == "uniform" and len(numbers) == 2 and numbers[0] <= numbers[1]:
        return rng.integers(int(numbers[0]), int(numbers[1]) + 1, n)
    if kind == "lognormal" and len(numbers) == 2 and numbers[0] > 0:
        return rng.lognormal(np.log(numbers[0]), numbers[1], n).astype(np.int64)
    if kind == "exponential" and len(numbers) == 1:
        return rng.exponential(numbers[0], n).astype(np.int64)
    if kind == "constant" and len(numbers) == 1:
        return np.full(n, int(numbers[0]), np.int64)
    raise ValueError(
        f"--{flag}={spec} is none of uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, exponential:MEAN "
        "and constant:N"
    )


if __name__ == "__main__":
    app.run(main)
