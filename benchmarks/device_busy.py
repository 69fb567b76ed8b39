"""Share of wall time in which the device runs a step, in a steady decode; with a picture.

Reads the JAX profiler's own trace of a few dozen steps (no Python tracing, which would slow the
host down) and takes the union of the step executions over the time between the first one's begin
and the last one's end. The gaps are what the host failed to hide.

    python -m benchmarks.device_busy [--rows 32] [--dtype bfloat16] [--plot docs/images/...png]
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import pathlib
import sys
import tempfile
import unittest.mock
from collections.abc import Sequence
from typing import Any

import jax

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.runner import StepHandle
from engine.sampling_params import SamplingParams

# One per execution on XLA:CPU, on the thread that waits for it.
_EXECUTION = "ThunkExecutor::Execute (wait for completion)"
_STEP = "step"
_WAIT = "wait"


Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Spans of a trace in milliseconds, each (begin, end), in order of begin.

    Attributes:
      device: executions of steps.
      host: calls of `EngineCore.step`, less the waiting for tokens.
    """

    device: list[Span]
    host: list[Span]

    @property
    def busy(self) -> float:
        """Share of the time from the first execution to the last with one under way."""
        covered, reached = 0.0, self.device[0][0]
        for begin, end in self.device:
            covered += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return covered / (reached - self.device[0][0])

    @property
    def longest_gap_ms(self) -> float:
        """Longest time without an execution between two of them."""
        gap, reached = 0.0, self.device[0][1]
        for begin, end in self.device[1:]:
            gap = max(gap, begin - reached)
            reached = max(reached, end)
        return gap


def read_trace(folder: pathlib.Path) -> Timeline:
    """Reads the trace that `jax.profiler.trace` left in a folder."""
    (path,) = folder.glob("**/*.trace.json.gz")
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    spans: dict[str, list[Span]] = {_EXECUTION: [], _STEP: [], _WAIT: []}
    for event in events:
        if event.get("ph") == "X" and event["name"] in spans:
            begin = event["ts"] / 1e3
            spans[event["name"]].append((begin, begin + event["dur"] / 1e3))
    host = []
    waits = iter(sorted(spans[_WAIT]))
    wait = next(waits, None)
    for begin, end in sorted(spans[_STEP]):
        while wait is not None and wait[0] < end:
            host.append((begin, wait[0]))
            begin, wait = wait[1], next(waits, None)
        host.append((begin, end))
    return Timeline(sorted(spans[_EXECUTION]), host)


def record(
    *, rows: int, dtype: str, num_steps: int, async_scheduling: bool, **settings: Any
) -> Timeline:
    """Traces `num_steps` steady decode steps of `rows` requests.

    Args:
      rows, dtype, num_steps, async_scheduling: what is traced.
      **settings: further ones of EngineConfig.
    """
    length = 64 + num_steps
    core = EngineCore(
        EngineConfig(
            dtype=dtype,
            max_num_seqs=rows,
            max_num_batched_tokens=max(512, rows),
            max_model_len=length,
            num_kv_blocks=rows * (length // 16 + 2) + 2,
            enable_prefix_caching=False,
            async_scheduling=async_scheduling,
            max_decode_steps=1,
            warmup=False,
            **settings,
        ),
        progress=False,
    )
    params = SamplingParams(temperature=0, max_tokens=length - 16, ignore_eos=True)
    for i in range(rows):
        core.add_request(f"r{i}", [7 + i % 64] * 16, params)
    for _ in range(16 + rows * 16 // 512):
        core.step()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    annotated = jax.profiler.annotate_function(StepHandle.tokens, name=_WAIT)
    with (
        tempfile.TemporaryDirectory() as folder,
        unittest.mock.patch.object(StepHandle, "tokens", annotated),
    ):
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(num_steps):
                with jax.profiler.TraceAnnotation(_STEP):
                    core.step()
        return read_trace(pathlib.Path(folder))


def plot(timelines: dict[str, Timeline], path: pathlib.Path, *, window_ms: float) -> None:
    """Draws the device's and the host's spans of each timeline, from its middle on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(timelines), 1, figsize=(11, 1.9 * len(timelines)), sharex=True, layout="constrained"
    )
    for axis, (name, timeline) in zip(axes, timelines.items()):
        start = timeline.device[len(timeline.device) // 2][0] - 2
        colors = ("#c05621", "#2b6cb0")
        for row, (spans, color) in enumerate(zip((timeline.host, timeline.device), colors)):
            shown = [(b - start, e - b) for b, e in spans if b < start + window_ms and e > start]
            axis.broken_barh(shown, (row - 0.35, 0.7), facecolors=color, edgecolor="white", lw=0.5)
        axis.set_yticks([0, 1], ["host", "device"])
        axis.set_xlim(0, window_ms)
        axis.set_title(
            f"{name}: device busy {timeline.busy:.1%}, longest gap {timeline.longest_gap_ms:.2f} ms",
            loc="left",
            fontsize=10,
        )
    axes[-1].set_xlabel("ms")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.device_busy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=32, help="decoding rows")
    add("--dtype", default="bfloat16", help="of weights and KV")
    add("--steps", type=int, default=60, help="steps traced")
    add("--window_ms", type=float, default=250.0, help="time shown in the plot")
    add("--plot", type=pathlib.Path, help="PNG file to draw; needs matplotlib")
    add("--json", action="store_true", help="print a list of {async_scheduling, busy} instead")
    arguments = parser.parse_args(argv)
    if arguments.rows < 1 or arguments.steps < 4:
        parser.error(f"--rows={arguments.rows} --steps={arguments.steps}: at least 1 and 4")
    timelines, results = {}, []
    for on in (False, True):
        timeline = record(
            rows=arguments.rows,
            dtype=arguments.dtype,
            num_steps=arguments.steps,
            async_scheduling=on,
        )
        timelines[f"async_scheduling {'on' if on else 'off'}"] = timeline
        results.append({"async_scheduling": on, "busy": timeline.busy})
    if arguments.plot:
        plot(timelines, arguments.plot, window_ms=arguments.window_ms)
    if arguments.json:
        print(json.dumps(results))
        return 0
    for name, timeline in timelines.items():
        gap = timeline.longest_gap_ms
        print(f"{name:22} device busy {timeline.busy:6.1%}   longest gap {gap:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
