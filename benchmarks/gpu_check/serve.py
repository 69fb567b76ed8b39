"""Serves random weights of a real model's shape in process, at several concurrencies."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check import engine_run
from benchmarks.gpu_check.section import Section, run, share
from benchmarks.gpu_check.shapes import Load, serve_loads, write_model_folder


def measure(section: Section) -> None:
    family = "llama" if "llama" in section.name else "qwen3"
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        model = write_model_folder(Path(folder), family, section.rehearse)
        llm = engine_run.make_llm(model, rehearse=section.rehearse)
        section.put("startup_s", round(time.monotonic() - begun, 1))
        section.put("summary", llm.core.summary().splitlines())
        engine = engine_run.TimedEngine(llm.core)
        loads = serve_loads(section.rehearse)
        if section.name.startswith("command_buffers"):
            loads = loads[:2]
        for load in loads:
            section.put(f"concurrency_{load.concurrency}", _level(section, engine, load))


def _level(section: Section, engine: engine_run.TimedEngine, load: Load) -> dict[str, Any]:
    core = engine.core
    rng = np.random.default_rng(load.concurrency)

    def submit(output_len: int) -> None:
        for _ in range(load.concurrency):
            engine.add(rng.integers(1, core.vocab_size, load.prompt_len), output_len)

    begun = time.monotonic()
    submit(min(4, load.output_len))  # compiles this level's steps
    engine.drain()
    compiling = time.monotonic() - begun
    begun = time.perf_counter()
    submit(load.output_len)
    times = engine.drain()
    wall = time.perf_counter() - begun
    total, waiting = engine_run.decode_steps(times, load.concurrency)
    step = engine_run.milliseconds(total)
    context = load.prompt_len + load.output_len / 2
    reads = engine_run.weight_bytes(core)
    reads += load.concurrency * context * engine_run.kv_bytes_per_token(core)
    copy = section.ceiling("copy_gb_per_s")
    bound = None if copy is None else reads / copy / 1e6  # ms
    host = [a - b for a, b in zip(total, waiting)]
    return {
        "first_run_s": round(compiling, 1),
        "output_tok_per_s": round(load.concurrency * load.output_len / wall, 1),
        "prompt_tokens": load.prompt_len,
        "output_tokens": load.output_len,
        "decode_tok_per_s": round(1e3 * load.concurrency / step, 1) if step else None,
        "decode_step_ms": step,
        "decode_host_ms": engine_run.milliseconds(host),
        "decode_waiting_ms": engine_run.milliseconds(waiting),
        "decode_roofline_ms": None if bound is None else round(bound, 3),
        "share_of_roofline": share(bound, step),
        "steps": len(times.total),
    }


if __name__ == "__main__":
    run(measure)
