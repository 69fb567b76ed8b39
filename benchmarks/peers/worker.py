"""Child process of `benchmarks.throughput`: loads one engine, then measures what it is told to.

    python -m benchmarks.peers.worker '{"adapter": "tidegate", ...}'

Protocol: one JSON object per line. First comes {"ready": ...} or {"error": ...}; then each line on
standard input, {"prompts": [[id]], "output_len": n}, is answered by one line. What engines print
goes to standard error. The end of standard input ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TextIO

ADAPTERS = ("tidegate", "transformers_static", "transformers_continuous", "llama_cpp", "vllm_cpu",
            "memory_bandwidth")  # fmt: skip
# A prefill is repeated until it has taken so many seconds or runs.
_PREFILL_S, _PREFILL_RUNS = 2.0, 3


class Engine(Protocol):
    """What an adapter module offers as `load(settings)`."""

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        """Greedy ids of exactly `output_len` tokens per prompt; all prompts at once."""
        ...

    def info(self) -> dict[str, Any]:
        """Versions, and bytes of the KV pool where it is known."""
        ...


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Times a batch of prompts: first tokens alone, then the whole output.

    Returns seconds (`prefill_s`, `total_s`), rates in tokens per second, and the output ids. The
    decode rate counts the tokens after the first and the time beyond a prefill on its own.
    Raises RuntimeError where the engine's output has another length than asked for.
    """
    engine.generate(prompts, 2)
    prefill: list[float] = []
    while len(prefill) < _PREFILL_RUNS and sum(prefill) < _PREFILL_S:
        begun = clock()
        engine.generate(prompts, 1)
        prefill.append(clock() - begun)
    begun = clock()
    tokens = engine.generate(prompts, output_len)
    total = clock() - begun
    wrong = {len(row) for row in tokens} - {output_len}
    if wrong or len(tokens) != len(prompts):
        raise RuntimeError(f"asked for {output_len} tokens, got {sorted(wrong)}")
    prefill_s = statistics.median(prefill)
    rows, prompt_tokens = len(prompts), sum(map(len, prompts))
    return {
        "prefill_s": prefill_s,
        "total_s": total,
        "prefill_tok_s": prompt_tokens / prefill_s,
        "output_tok_s": rows * output_len / total,
        "decode_tok_s": rows * (output_len - 1) / max(total - prefill_s, 1e-9),
        "tokens": tokens,
    }


def serve(settings: dict[str, Any], requests: TextIO, answers: TextIO) -> None:
    """Loads the engine that `settings` names and answers requests until they end."""

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        begun = time.perf_counter()
        module = importlib.import_module(f"benchmarks.peers.{settings['adapter']}")
        engine = module.load(settings)
        answer({"ready": {"load_s": time.perf_counter() - begun, **engine.info()}})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"[:500]})
        return
    for line in requests:
        try:
            request = json.loads(line)
            answer(measure(engine, request["prompts"], request["output_len"]))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"[:500]})


def main() -> None:
    """Keeps standard output for the protocol and gives its number to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
