"""The KV-cache watermark benchmark: a sweep of watermarks, in the simulator or on a live server.

    python -m benchmarks.kv_cache_watermark --mode=simulated [--json] [--plot_dir DIR]

Simulated: two recorded decode-heavy traces, and the first of them again with the other settings
that bear on admission (only the chunk reserved, priority order, a small chunk budget), and a load
below half the pool, where no watermark may cost anything.

    python -m benchmarks.kv_cache_watermark --mode=live [-- flags of benchmarks.watermark_live]

Live: our server with the small default model and a small pool, one start per setting and run.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import watermark_live, watermark_sweep
from benchmarks.step_models import step_model_from
from benchmarks.workloads import GENERATORS, half_load
from scheduler.config import Watermark, check_watermark
from scheduler.workload import Workload, load_trace

FLAGS = flags.FLAGS
DATA = pathlib.Path(__file__).parent / "data"
TRACES = ("decode_heavy_closed128", "decode_heavy_poisson2.6")

flags.DEFINE_enum("mode", "simulated", ["simulated", "live"], "Where to measure.")
flags.DEFINE_list("watermarks", ["0", "0.02", "0.05", "0.1", "0.15", "auto"], "Settings to sweep.")
flags.DEFINE_list("scenarios", [], "Names of scenarios to run; all if empty.")
flags.DEFINE_boolean("all_workloads", False, "Also the named workloads.")
flags.DEFINE_boolean("oracle", False, "Also auto with the true output lengths.")
flags.DEFINE_string("step_times", "gb200", "Preset or JSON file of step times.")
flags.DEFINE_boolean("as_json", False, "Print JSON instead of tables.", short_name="j")
flags.DEFINE_string("plot_dir", None, "Save a figure per scenario in this folder.")
flags.DEFINE_integer("processes", 1, "Simulations at once.")


def scenarios(all_workloads: bool) -> Iterator[tuple[str, Workload, dict[str, Any]]]:
    """Name, workload and scheduler settings of each scenario."""
    closed, poisson = (load_trace(DATA / f"{name}.json.gz") for name in TRACES)
    yield closed.name, closed, {}
    yield poisson.name, poisson, {}
    yield f"{closed.name}, chunk only reserved", closed, {"reserve_full_sequence": False}
    for budget in (512,):
        yield f"{closed.name}, chunks of {budget}", closed, {"max_num_batched_tokens": budget}
    # Every fourth request goes first; under the policy the others are also the victims.
    urgent = np.where(np.arange(len(closed)) % 4 == 0, 0, 1)
    with_priorities = dataclasses.replace(closed, priorities=urgent)
    yield f"{closed.name}, priority", with_priorities, {"scheduling_policy": "priority"}
    yield "half_load", half_load(), {}
    if all_workloads:
        for name, generator in GENERATORS.items():
            if name != "half_load":
                yield name, generator(), {}


def main(argv: list[str]) -> None:
    if FLAGS.mode == "live":
        sys.exit(watermark_live.main([f"--watermarks={','.join(FLAGS.watermarks)}", *argv[1:]]))
    try:
        _run_simulated()
    except (ValueError, OSError) as error:
        watermark_sweep.fail("kv_cache_watermark", error)


def _run_simulated() -> None:
    watermarks: list[Watermark] = [check_watermark(text) for text in FLAGS.watermarks]
    model = step_model_from(FLAGS.step_times)
    results: dict[str, Any] = {}
    found = list(scenarios(FLAGS.all_workloads))
    unknown = sorted(set(FLAGS.scenarios) - {name for name, _, _ in found})
    if unknown:
        names = "; ".join(name for name, _, _ in found)
        raise ValueError(f"--scenarios has {unknown[0]!r}, which is none of: {names}")
    for name, workload, settings in found:
        if FLAGS.scenarios and name not in FLAGS.scenarios:
            continue
        sweep = {"settings": settings, "jobs": FLAGS.processes}
        reports = watermark_sweep.run_sweep(workload, model, watermarks, **sweep)
        if FLAGS.oracle:
            reports += watermark_sweep.run_sweep(
                workload, model, ["auto"], lengths_known=True, **sweep
            )
        results[name] = [report.to_json() for report in reports]
        if FLAGS.plot_dir:
            folder = pathlib.Path(FLAGS.plot_dir)
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"watermark_{name.replace(', ', '_').replace(' ', '_')}.png"
            watermark_sweep.plot(reports, file, name)
        if not FLAGS.as_json:
            print(f"\n### {name}\n\n{watermark_sweep.format_table(reports)}", flush=True)
    if FLAGS.as_json:
        json.dump(results, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    app.run(main)
