"""Share of wall time in which the device runs a step, in a steady decode; with a picture.

Reads the JAX profiler's own trace of a few dozen steps (no Python tracing, which would slow the
host down) and takes the union of the step executions over the time between the first one's begin
and the last one's end. The gaps are what the host failed to hide.

    python -m benchmarks.device_busy [--rows 32] [--dtype bfloat16] [--plot docs/images/...png]
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import tempfile
import unittest.mock
from typing import Any

import jax
from absl import app, flags

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


_ROWS = flags.DEFINE_integer("rows", 32, "Decoding rows.", lower_bound=1)
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of weights and KV.")
_STEPS = flags.DEFINE_integer("steps", 60, "Steps traced.", lower_bound=4)
_WINDOW = flags.DEFINE_float("window_ms", 250.0, "Time shown in the plot.")
_PLOT = flags.DEFINE_string("plot", None, "PNG file to draw, needs matplotlib.")
_JSON = flags.DEFINE_boolean("json", False, "Print a list of {async_scheduling, busy} instead.")


def main(argv: list[str]) -> None:
    del argv
    timelines, rows = {}, []
    for on in (False, True):
        timeline = record(
            rows=_ROWS.value, dtype=_DTYPE.value, num_steps=_STEPS.value, async_scheduling=on
        )
        timelines[f"async_scheduling {'on' if on else 'off'}"] = timeline
        rows.append({"async_scheduling": on, "busy": timeline.busy})
    if _PLOT.value:
        plot(timelines, pathlib.Path(_PLOT.value), window_ms=_WINDOW.value)
    if _JSON.value:
        print(json.dumps(rows))
        return
    for name, timeline in timelines.items():
        print(f"{name:22} device busy {timeline.busy:6.1%}   longest gap "
              f"{timeline.longest_gap_ms:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    app.run(main)
