"""Measures a running OpenAI-compatible server on this machine.

    python -m benchmarks.serve --base_url http://127.0.0.1:8000 --num_prompts 100 \\
        --max_concurrency 32 [--request_rate 4] [--dataset file --dataset_path prompts.jsonl]

Closed loop with --max_concurrency alone, open loop with --request_rate; both may be given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.http_stream import loopback_address
from benchmarks.serving_load import (
    MAX_REQUESTS,
    LoadRequest,
    file_requests,
    random_requests,
    run_load,
    summarize,
)

_LABELS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests/s",
    "output_throughput": "Output tokens/s",
    "total_token_throughput": "Total tokens/s",
}
_SERIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def format_report(report: dict[str, Any]) -> str:
    """A table for people."""
    lines = [
        f"{label:<24} {report[name]:>12.2f}"
        if isinstance(report[name], float)
        else f"{label:<24} {report[name]:>12}"
        for name, label in _LABELS.items()
    ]
    lines.append(f"{'ms':<40}{'mean':>10}{'median':>10}{'p90':>10}{'p99':>10}")
    for name, label in _SERIES.items():
        values = [report[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p90", "p99")]
        cells = "".join(f"{'-' if value is None else f'{value:.2f}':>10}" for value in values)
        lines.append(f"{label:<40}{cells}")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--base_url", default="http://127.0.0.1:8000", help="server; loopback only")
    add("--model", help="name to ask for")
    add("--api_key")
    add("--dataset", choices=("random", "file"), default="random")
    add("--dataset_path", type=pathlib.Path, help='JSON lines with "prompt" or "messages"')
    add("--num_prompts", type=int, default=100)
    add("--input_len", type=int, default=128, help="tokens of random prompts")
    add("--output_len", type=int, default=128, help="max_tokens of each answer")
    add("--range_ratio", type=float, default=0.0, help="random lengths vary by this share")
    add("--vocab_size", type=int, default=32000, help="random ids lie below it")
    add("--max_concurrency", type=int)
    add("--request_rate", type=float, default=math.inf, help="requests/s; inf sends at once")
    add("--temperature", type=float, default=0.0)
    add("--ignore_eos", action=argparse.BooleanOptionalAction, default=True)
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    add("--timeout_s", type=float, default=600.0, help="of each request")
    add("--warmup", type=int, default=1, help="requests sent before, not counted")
    add("--output", type=pathlib.Path, help="JSON file; holds every request's times too")
    return parser.parse_args(argv)


def _requests(arguments: argparse.Namespace) -> list[LoadRequest]:
    if not 1 <= arguments.num_prompts <= MAX_REQUESTS:
        raise ValueError(
            f"--num_prompts={arguments.num_prompts} is not between 1 and {MAX_REQUESTS}"
        )
    if arguments.dataset == "file":
        if arguments.dataset_path is None:
            raise ValueError("--dataset=file needs --dataset_path")
        return file_requests(arguments.dataset_path, arguments.num_prompts, arguments.output_len)
    return random_requests(
        arguments.num_prompts,
        arguments.input_len,
        arguments.output_len,
        range_ratio=arguments.range_ratio,
        vocab_size=arguments.vocab_size,
        seed=arguments.seed,
    )


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    loopback_address(arguments.base_url)
    requests = _requests(arguments)
    settings: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("model", "api_key", "ignore_eos", "temperature", "timeout_s")
    }
    if arguments.warmup > 0:
        warm, _ = await run_load(
            arguments.base_url, requests[: arguments.warmup], max_concurrency=1, **settings
        )
        if all(outcome.error for outcome in warm):
            raise ConnectionError(f"the first request failed: {warm[0].error}")
    with tqdm(total=len(requests), unit="req", disable=not sys.stderr.isatty()) as bar:
        outcomes, duration = await run_load(
            arguments.base_url,
            requests,
            max_concurrency=arguments.max_concurrency,
            request_rate=arguments.request_rate,
            seed=arguments.seed,
            on_done=lambda _: bar.update(),
            **settings,
        )
    report = summarize(outcomes, duration)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for error in sorted(set(errors))[:5]:
        print(f"{errors.count(error)} failed: {error}", file=sys.stderr)
    print(format_report(report))
    if arguments.output:
        shown = {k: v for k, v in vars(arguments).items() if k not in ("api_key", "output")}
        shown = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in shown.items()}
        if math.isinf(arguments.request_rate):
            shown["request_rate"] = "inf"
        value = {
            **report,
            "settings": shown,
            "ttfts": [None if math.isnan(o.ttft) else o.ttft for o in outcomes],
            "itls": [o.itl for o in outcomes],
            "output_lens": [o.output_tokens for o in outcomes],
            "errors": [o.error for o in outcomes],
        }
        arguments.output.write_text(json.dumps(value) + "\n")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a request failed or the settings are wrong."""
    arguments = parse(argv)
    try:
        return int(asyncio.run(_run(arguments))["failed"] > 0)
    except (ValueError, OSError) as error:
        print(f"benchmarks.serve: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
