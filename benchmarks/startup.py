"""Time from the start of the server's process to /health and to its first token.

    python -m benchmarks.startup [--runs 3] [--shapes] [--check] [--output FILE.json] [-- --model=...]

Cold starts begin with an empty folder of compiled programs, warm ones with what a cold start left.
`--shapes` goes on, after one more cold start, with prompts of 1 to 4096 tokens and 1 to 32 rows at
once, and counts what XLA compiles then: nothing. What follows `--` is handed to run_server.py.
`--check` ends with 1 where a median is over its bound or something was compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.http_stream import post_events
from benchmarks.server_process import serving
from benchmarks.serving_load import LoadRequest, run_load

BOUNDS_S = {"cold": 60.0, "warm": 15.0}
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 24, 25, 31, 32)
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 100, 127, 129, 200, 255, 257, 400, 511, 512, 513,
           700, 1000, 1024, 1500, 2047, 2049, 3000, 4095, 4096)  # fmt: skip
# What JAX says per program under JAX_LOG_COMPILES.
_COMPILED = "Finished XLA compilation of"


async def _first_token(base_url: str) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "stream": True}
    async for event in post_events(base_url, "/v1/completions", body):
        if event.get("choices") and event["choices"][0].get("text"):
            return
    raise RuntimeError("the server sent no token")


def measure(flags: Sequence[str], cache: pathlib.Path, log: pathlib.Path) -> dict[str, float]:
    """One start with this cache folder: seconds to `health` and `first_token`."""
    # The user's default folder, moved: the server runs with default flags.
    environment = {"XDG_CACHE_HOME": str(cache)}
    with serving(flags, log, environment=environment) as server:
        asyncio.run(_first_token(server.base_url))
        return {"health_s": server.ready_s, "first_token_s": time.perf_counter() - server.started}


def count_compilations(flags: Sequence[str], cache: pathlib.Path, log: pathlib.Path) -> dict:
    """Compilations of one start, `before` /health and `after` it, while shapes vary.

    Raises RuntimeError if a request fails or the log does not tell of compilations.
    """
    environment = {"XDG_CACHE_HOME": str(cache), "JAX_LOG_COMPILES": "1"}
    with serving(flags, log, environment=environment) as server:
        before = log.read_text(errors="replace").count(_COMPILED)
        if not before:
            raise RuntimeError("the server's log tells of no compilation: they cannot be counted")
        loads = [[LoadRequest([200 + i] * (1 + i), 3) for i in range(rows)] for rows in ROWS]
        loads += [[LoadRequest([300] * length, 2)] for length in LENGTHS]
        # All lengths together: chunks of some prompts beside the decode steps of others.
        loads.append(
            [LoadRequest([400 + n] * n, 4) for n in (*LENGTHS, *range(1, 33 - len(LENGTHS)))]
        )
        for requests in loads:
            outcomes, _ = asyncio.run(run_load(server.base_url, requests))
            errors = [outcome.error for outcome in outcomes if outcome.error]
            if errors:
                raise RuntimeError(f"a request failed: {errors[0]}")
        after = log.read_text(errors="replace").count(_COMPILED) - before
    return {"before": before, "after": after}


def run(
    start: Callable[[pathlib.Path], dict[str, float]], folder: pathlib.Path, runs: int
) -> dict[str, Any]:
    """`runs` pairs of a cold and a warm start; all figures and their medians by kind."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for number in range(runs):
        cache = folder / f"cache{number}"
        cache.mkdir()
        for kind in found:
            found[kind].append(start(cache))
        if not any(path.is_file() for path in cache.rglob("*")):
            raise RuntimeError(f"nothing was cached in {cache}: the second start was cold too")
        shutil.rmtree(cache)
    return {
        kind: {
            name: {
                "median": statistics.median(each[name] for each in values),
                "all": [each[name] for each in values],
            }
            for name in values[0]
        }
        for kind, values in found.items()
    }


def over_bounds(report: dict[str, Any]) -> list[str]:
    """A sentence per median of /health over its bound."""
    return [
        f"a {kind} start takes {report[kind]['health_s']['median']:.1f} s, over {bound:.0f} s"
        for kind, bound in BOUNDS_S.items()
        if report[kind]["health_s"]["median"] > bound
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=3, help="cold and warm starts each")
    parser.add_argument("--shapes", action="store_true", help="count what compiles afterwards")
    parser.add_argument("--check", action="store_true", help="fail where a bound is missed")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file")
    parser.add_argument("flags", nargs="*", help="flags of run_server.py, after --")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.runs <= 20:
        parser.error(f"--runs={arguments.runs} is not between 1 and 20")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        try:
            report = run(
                lambda cache: measure(arguments.flags, cache, folder / "log"),
                folder,
                arguments.runs,
            )
            compiled = None
            if arguments.shapes:
                compiled = count_compilations(arguments.flags, folder / "shapes", folder / "log")
        except RuntimeError as error:
            print(f"benchmarks.startup: {error}", file=sys.stderr)
            return 1
    print("| start | /health s | first token s |\n|---|---|---|")
    for kind, values in report.items():
        cells = [f"{values[n]['median']:.1f}" for n in ("health_s", "first_token_s")]
        print(f"| {kind} | {' | '.join(cells)} |")
    missed = over_bounds(report)
    if compiled:
        print(f"\ncompiled before /health: {compiled['before']}, after: {compiled['after']}")
        if compiled["after"]:
            missed.append(f"{compiled['after']} programs were compiled after the start")
    if arguments.output:
        value = {**report, "compilations": compiled}
        arguments.output.write_text(json.dumps(value, indent=1) + "\n")
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
