"""The watermark under pressure, in process, with random weights: throughput against preemptions."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check import engine_run
from benchmarks.gpu_check.section import Section, run
from benchmarks.gpu_check.shapes import write_model_folder

WATERMARKS: tuple[float | str, ...] = (0.0, 0.05, 0.1, 0.2, "auto", 0.01, 0.02, 0.4)


def measure(section: Section) -> None:
    rehearse = section.rehearse
    requests, prompt, longest = (6, 12, 40) if rehearse else (512, 128, 512)
    # A pool for about a quarter of the rows at their full length: admission decides.
    blocks = 20 if rehearse else 2600
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder), "qwen3", rehearse)
        llm = engine_run.make_llm(
            model, rehearse=rehearse, num_kv_blocks=blocks, max_model_len=128 if rehearse else 1024
        )
        engine = engine_run.TimedEngine(llm.core)
        config = llm.core.scheduler.config
        section.put("pool_blocks", blocks)
        section.put("requests", requests)
        _run(engine, config, 0.0, requests // 4, prompt, longest)  # compiles the steps
        for watermark in WATERMARKS[:2] if rehearse else WATERMARKS:
            figures = _run(engine, config, watermark, requests, prompt, longest)
            section.put(f"watermark_{watermark}", figures)


def _run(
    engine: engine_run.TimedEngine,
    config: Any,
    watermark: float | str,
    requests: int,
    prompt: int,
    longest: int,
) -> dict[str, Any]:
    """All requests at once; output lengths are drawn, the same ones every time."""
    from scheduler import Scheduler

    core = engine.core
    core.scheduler = Scheduler(dataclasses.replace(config, watermark=watermark))
    rng = np.random.default_rng(7)
    lengths = rng.integers(longest // 8, longest + 1, requests)
    for length in lengths:
        engine.add(rng.integers(1, core.vocab_size, prompt).tolist(), int(length))
    ended: list[Any] = []
    first: dict[str, float] = collections.defaultdict(float)
    begun = time.perf_counter()

    def note(output: Any) -> None:
        first.setdefault(output.request_id, time.perf_counter() - begun)
        if output.finish_reason is not None:
            ended.append(output.metrics)

    times = engine.drain(note)
    wall = time.perf_counter() - begun
    preemptions = sum(metrics.num_preemptions for metrics in ended)
    return {
        "output_tok_per_s": round(int(lengths.sum()) / wall, 1),
        "seconds": round(wall, 2),
        "steps": len(times.total),
        "preemptions": preemptions,
        "recomputed_tokens": sum(metrics.num_recomputed_tokens for metrics in ended),
        "ttft_p50_s": round(statistics.median(first.values()), 3),
        "finished": len(ended),
    }


if __name__ == "__main__":
    run(measure)
