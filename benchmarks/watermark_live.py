"""The watermark on a real server: a decode-heavy load on a small pool, a server per setting.

    python -m benchmarks.watermark_live [--watermarks 0,0.05,0.1,0.15,auto] [--runs 3] \\
        [--plot FILE.png] [--output FILE.json] [-- --dtype=bfloat16]

A closed loop of random prompts with answers of known length (ignore_eos). Every run starts
run_server.py with the default model and a pool that cannot hold all rows at their full length; the
settings take turns, and each figure is the median over the runs. What follows `--` is handed to
run_server.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.server_process import serving
from benchmarks.serving_load import LoadRequest, random_requests, run_load, summarize
from scheduler.config import Watermark, check_watermark

DEFAULT_WATERMARKS: tuple[Watermark, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, "auto")
BLOCK_SIZE = 16

# (heading, figure, format); the order of the table's columns.
_COLUMNS = (
    ("watermark", "watermark", "{}"),
    ("preempt", "preemptions", "{:.0f}"),
    ("recomp tok", "recomputed_tokens", "{:.0f}"),
    ("out tok/s", "output_throughput", "{:.1f}"),
    ("TTFT p50 s", "ttft_p50_s", "{:.2f}"),
    ("TTFT p99 s", "ttft_p99_s", "{:.2f}"),
    ("ITL p50 ms", "itl_p50_ms", "{:.1f}"),
    ("ITL p99 ms", "itl_p99_ms", "{:.1f}"),
    ("E2E p50 s", "e2e_p50_s", "{:.1f}"),
)


def run_once(
    watermark: Watermark,
    requests: Sequence[LoadRequest],
    *,
    concurrency: int,
    num_kv_blocks: int,
    flags: Sequence[str],
    folder: pathlib.Path,
) -> dict[str, float]:
    """Starts a server with this watermark, serves the requests, returns the figures.

    Raises RuntimeError if a request fails or the server does not come up.
    """
    arguments = [
        f"--watermark={watermark}",
        f"--num_kv_blocks={num_kv_blocks}",
        f"--block_size={BLOCK_SIZE}",
        f"--max_num_seqs={concurrency}",
        "--log_level=warning",
        *flags,
    ]
    with serving(arguments, folder / f"server-{watermark}.log") as server:
        asyncio.run(run_load(server.base_url, requests[:1]))
        before = server.metrics()
        outcomes, duration = asyncio.run(
            run_load(server.base_url, requests, max_concurrency=concurrency)
        )
        after = server.metrics()
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed at watermark {watermark}: {errors[0]}")
    report = summarize(outcomes, duration)

    def grown(name: str) -> float:
        return after[name] - before[name]

    return {
        "preemptions": grown("vllm:num_preemptions_total"),
        "recomputed_tokens": grown("tidegate:recomputed_tokens_total"),
        "output_throughput": report["output_throughput"],
        "ttft_p50_s": report["median_ttft_ms"] / 1e3,
        "ttft_p99_s": report["p99_ttft_ms"] / 1e3,
        "itl_p50_ms": report["median_itl_ms"],
        "itl_p99_ms": report["p99_itl_ms"],
        "e2e_p50_s": report["median_e2el_ms"] / 1e3,
    }


def run_live_sweep(
    watermarks: Sequence[Watermark] = DEFAULT_WATERMARKS,
    *,
    runs: int = 3,
    num_prompts: int = 96,
    concurrency: int = 32,
    input_len: int = 64,
    output_len: int = 320,
    range_ratio: float = 0.2,
    num_kv_blocks: int | None = None,
    flags: Sequence[str] = (),
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
    once: Callable[..., dict[str, float]] = run_once,
) -> list[dict[str, Any]]:
    """A row per watermark with the median of each figure, and all its values under "runs".

    Args:
      watermarks: settings; all runs of one round come before the next round's.
      runs: rounds; the direction changes with each.
      num_prompts, input_len, output_len, range_ratio, seed: see `random_requests`.
      concurrency: requests kept under way, and rows of the server.
      num_kv_blocks: pool; None is `small_pool`.
      flags: more flags for run_server.py.
      say: told of each run.
      once: measures a setting; see `run_once`.

    Raises ValueError for wrong numbers, RuntimeError where a server or request fails.
    """
    if runs < 1 or not watermarks:
        raise ValueError(f"runs={runs} and {len(watermarks)} watermarks: both must be at least 1")
    blocks = num_kv_blocks or small_pool(concurrency, input_len, output_len)
    requests = random_requests(
        num_prompts, input_len, output_len, range_ratio=range_ratio, seed=seed
    )
    found: dict[Watermark, list[dict[str, float]]] = {w: [] for w in watermarks}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            order = list(found) if number % 2 == 0 else list(found)[::-1]
            for watermark in order:
                figures = once(
                    watermark, requests, concurrency=concurrency, num_kv_blocks=blocks,
                    flags=flags, folder=pathlib.Path(folder),
                )  # fmt: skip
                found[watermark].append(figures)
                say(
                    f"run {number + 1} watermark {watermark}: {figures['preemptions']:.0f} "
                    f"preemptions, {figures['output_throughput']:.1f} tok/s"
                )
    return [
        {
            "watermark": watermark,
            "num_kv_blocks": blocks,
            **{name: statistics.median(each[name] for each in values) for name in values[0]},
            "runs": values,
        }
        for watermark, values in found.items()
    ]


def small_pool(concurrency: int, input_len: int, output_len: int) -> int:
    """Blocks for all rows at their mean length in a steady state and 3% more.

    Rows are on average half way through their answers: the pool suffices on the whole, and
    fluctuations overflow it.
    """
    mean = input_len + output_len / 2
    return round(1.03 * concurrency * (mean / BLOCK_SIZE + 0.5)) + 1


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| " + " | ".join(heading for heading, _, _ in _COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
    ]
    lines += [
        "| " + " | ".join(layout.format(row[name]) for _, name, layout in _COLUMNS) + " |"
        for row in rows
    ]
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Saves four panels: preemptions, throughput, ITL p99, TTFT and E2E; dots are single runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("Preemptions", (("preemptions", ""),)),
        ("Output tok/s", (("output_throughput", ""),)),
        ("ITL p99, ms", (("itl_p99_ms", ""),)),
        ("Seconds", (("ttft_p50_s", "TTFT p50"), ("e2e_p50_s", "E2E p50"))),
    )
    names = [str(row["watermark"]) for row in rows]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    for axis, (label, series) in zip(axes.flat, panels):
        for name, legend in series:
            (line,) = axis.plot(names, [row[name] for row in rows], "-", label=legend)
            for position, row in enumerate(rows):
                values = [run[name] for run in row["runs"]]
                axis.plot([position] * len(values), values, "o", color=line.get_color(), ms=3)
        axis.set(xlabel="watermark", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if len(series) > 1:
            axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.watermark_live",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--watermarks", default=",".join(map(str, DEFAULT_WATERMARKS)))
    add("--runs", type=int, default=3)
    add("--num_prompts", type=int, default=96)
    add("--concurrency", type=int, default=32)
    add("--input_len", type=int, default=64)
    add("--output_len", type=int, default=320)
    add("--range_ratio", type=float, default=0.2)
    add("--num_kv_blocks", type=int, help="a pool for the mean load if absent")
    add("--seed", type=int, default=0)
    add("--plot", type=pathlib.Path, help="PNG file")
    add("--output", type=pathlib.Path, help="JSON file")
    add("flags", nargs="*", help="flags of run_server.py, after --")
    arguments = parser.parse_args(argv)
    settings = {
        name: getattr(arguments, name)
        for name in ("runs", "num_prompts", "concurrency", "input_len", "output_len",
                     "range_ratio", "num_kv_blocks", "seed", "flags")
    }  # fmt: skip
    try:
        watermarks: list[Watermark] = [
            check_watermark(text) for text in arguments.watermarks.split(",")
        ]
        rows = run_live_sweep(
            watermarks, say=lambda text: print(text, file=sys.stderr, flush=True), **settings
        )
    except (ValueError, RuntimeError) as error:
        print(f"benchmarks.watermark_live: {error}", file=sys.stderr)
        return 1
    print(format_table(rows))
    if arguments.output:
        arguments.output.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1))
    if arguments.plot:
        title = f"{arguments.concurrency} rows on {rows[0]['num_kv_blocks']} blocks"
        plot(rows, arguments.plot, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
