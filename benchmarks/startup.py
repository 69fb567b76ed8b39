"""Time from the start of the server's process to /health and to its first token.

    python -m benchmarks.startup [--runs 3] [--check] [--output FILE.json] [-- --model=...]

Cold starts begin with an empty folder of compiled programs, warm ones with what a cold start left.
What follows `--` is handed to run_server.py. `--check` ends with 1 where a median is over its bound.
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

BOUNDS_S = {"cold": 60.0, "warm": 15.0}


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
        except RuntimeError as error:
            print(f"benchmarks.startup: {error}", file=sys.stderr)
            return 1
    print("| start | /health s | first token s |\n|---|---|---|")
    for kind, values in report.items():
        cells = [f"{values[n]['median']:.1f}" for n in ("health_s", "first_token_s")]
        print(f"| {kind} | {' | '.join(cells)} |")
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    missed = over_bounds(report)
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
