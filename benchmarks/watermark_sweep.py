"""Runs a workload under several watermarks; tables, plots and a recommendation from the reports."""

from __future__ import annotations

import concurrent.futures
import logging
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from scheduler.config import Watermark
from scheduler.simulator import SimulationReport, simulate
from scheduler.step_time import StepTimeModel
from scheduler.workload import Workload

DEFAULT_WATERMARKS: tuple[Watermark, ...] = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, "auto")

_COLUMNS = (
    ("watermark", "watermark", "{}"),
    ("preempt", "preemptions", "{}"),
    ("recomp tok", "recomputed_tokens", "{}"),
    ("out tok/s", "output_tok_s", "{:.0f}"),
    ("TTFT p50 s", "ttft_p50_s", "{:.2f}"),
    ("TTFT p99 s", "ttft_p99_s", "{:.2f}"),
    ("ITL p50 ms", "itl_p50_ms", "{:.2f}"),
    ("ITL p99 ms", "itl_p99_ms", "{:.2f}"),
    ("E2E p50 s", "e2e_p50_s", "{:.1f}"),
    ("KV use", "kv_use_mean", "{:.1%}"),
)


def run_sweep(
    workload: Workload,
    step_model: StepTimeModel,
    watermarks: Sequence[Watermark],
    *,
    lengths_known: bool = False,
    settings: Mapping[str, Any] | None = None,
    jobs: int = 1,
) -> list[SimulationReport]:
    """One report per watermark, in order; a progress bar on stderr counts requests."""
    # A line per preemption is for servers.
    logging.getLogger("scheduler").setLevel(logging.WARNING)
    runs = [(workload, step_model, w, lengths_known, dict(settings or {})) for w in watermarks]
    if jobs > 1 and len(runs) > 1:
        with concurrent.futures.ProcessPoolExecutor(min(jobs, len(runs))) as pool:
            futures = [pool.submit(_run_quietly, run) for run in runs]
            return [future.result() for future in futures]
    reports = []
    for run in runs:
        label = f"{workload.name} watermark {run[2]}"
        with tqdm(total=len(workload), desc=label, unit="req", disable=None, leave=False) as bar:
            reports.append(_run(run, bar.update))
    return reports


def _run(run: tuple[Any, ...], on_progress: Any) -> SimulationReport:
    workload, step_model, watermark, lengths_known, settings = run
    return simulate(
        workload,
        step_model,
        watermark=watermark,
        lengths_known=lengths_known,
        on_progress=on_progress,
        **settings,
    )


def _run_quietly(run: tuple[Any, ...]) -> SimulationReport:
    return _run(run, None)


def label_of(report: SimulationReport) -> str:
    """What tables and plots call a setting."""
    if report.watermark == "auto":
        return "auto, lengths known" if report.lengths_known else "auto"
    return f"{report.watermark:g}"


def format_table(reports: Sequence[SimulationReport]) -> str:
    """A Markdown table, a line per report."""
    header = [title for title, _, _ in _COLUMNS]
    rows = [
        [
            label_of(report) if field == "watermark" else form.format(getattr(report, field))
            for _, field, form in _COLUMNS
        ]
        for report in reports
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths)] for row in [header, *rows]]
    rule = ["-" * (width - 1) + ":" for width in widths]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def recommend(reports: Sequence[SimulationReport]) -> tuple[SimulationReport, str]:
    """The setting to run with, and why.

    Among settings within 0.5% of the highest throughput the one that preempts least is taken, then
    the one with the lowest TTFT p99.
    """
    best = max(report.output_tok_s for report in reports)
    good = [report for report in reports if report.output_tok_s >= 0.995 * best]
    choice = min(good, key=lambda report: (report.preemptions, report.ttft_p99_s))
    off = next((report for report in reports if report.watermark == 0.0), None)
    reason = (
        f"{choice.output_tok_s:.0f} tok/s, within 0.5% of the best ({best:.0f}), with the fewest "
        f"preemptions of those ({choice.preemptions})"
    )
    if all(report.preemptions == 0 for report in reports):
        return choice, "the pool never fills, so no watermark changes anything"
    if off is not None and off is not choice:
        gain = choice.output_tok_s / off.output_tok_s - 1.0
        reason += f"; without a watermark {off.preemptions} and {gain:+.1%} throughput"
    return choice, reason


def plot(reports: Sequence[SimulationReport], path: str | pathlib.Path, title: str) -> None:
    """Saves preemptions, throughput, ITL, TTFT/E2E by setting, and the pool's use over time.

    Raises ValueError if matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ValueError("--plot needs matplotlib; install tidegate[plot]") from error
    labels = [label_of(report) for report in reports]
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), layout="constrained")
    figure.suptitle(title)
    panels = (
        (axes[0, 0], "preemptions", (("preemptions", "preemptions"),)),
        (axes[0, 1], "output tok/s", (("output_tok_s", "tok/s"),)),
        (axes[0, 2], "inter-token latency, ms", (("itl_p50_ms", "p50"), ("itl_p99_ms", "p99"))),
        (
            axes[1, 0],
            "TTFT and E2E, s",
            (("ttft_p50_s", "TTFT p50"), ("ttft_p99_s", "TTFT p99"), ("e2e_p50_s", "E2E p50")),
        ),
    )
    for axis, name, series in panels:
        axis.set_title(name)
        for field, label in series:
            values = [getattr(report, field) for report in reports]
            if len(series) == 1:
                axis.bar(labels, values, color="tab:blue")
                low, high = min(values), max(values)
                if low > 0.5 * high:
                    axis.set_ylim(low - 2.0 * (high - low) - 0.01 * high, high * 1.005)
            else:
                axis.plot(labels, values, marker="o", label=label)
        if len(series) > 1:
            axis.set_ylim(bottom=0)
            axis.legend()
        axis.tick_params(axis="x", rotation=30)
    for axis, column, name in ((axes[1, 1], 1, "share of KV blocks held"), (axes[1, 2], 2, "rows")):
        axis.set_title(name + " over time, s")
        for report, label in zip(reports, labels):
            axis.plot(report.timeline[:, 0], report.timeline[:, column], label=label, linewidth=0.8)
        axis.set_ylim(bottom=0)
    axes[1, 2].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def fail(program: str, error: Exception) -> None:
    """Ends the program with one sentence."""
    print(f"{program}: {error}", file=sys.stderr)
    raise SystemExit(1)


__all__ = [
    "DEFAULT_WATERMARKS",
    "fail",
    "format_table",
    "label_of",
    "plot",
    "recommend",
    "run_sweep",
]
