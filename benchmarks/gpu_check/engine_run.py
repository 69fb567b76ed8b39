"""Runs the engine in process: random weights, timed steps."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np


def make_llm(folder: Path, *, rehearse: bool, load_format: str = "dummy", **settings: Any) -> Any:
    """An LLM of a model folder; steps compile when they are first needed."""
    from engine import LLM
    from models import loading

    loading.RandomSource = _pooled_source(loading.RandomSource)
    out = Path(os.environ.get("GPU_CHECK_OUT", "."))
    defaults: dict[str, Any] = {
        "dtype": "float32" if rehearse else "bfloat16",
        "max_model_len": 128 if rehearse else 2048,
        "max_num_seqs": 4 if rehearse else 256,
        "max_num_batched_tokens": 32 if rehearse else 4096,
        "num_kv_blocks": 64 if rehearse else None,
        "warmup": False,
        "compile_cache_dir": str(out / "compile_cache"),
    }
    return LLM(model=str(folder), load_format=load_format, progress=False, **(defaults | settings))


def _pooled_source(base: Any) -> Any:
    """Random weights cut from one pool of numbers: billions of them are made in no time."""

    class PooledSource(base):
        _pool: Any = None

        def read(self, name: str) -> np.ndarray:
            if name.endswith("norm.weight"):
                return np.ones(self.shape(name), np.float32)
            cls = type(self)
            if cls._pool is None:
                rng = np.random.default_rng(0)
                cls._pool = (rng.random(1 << 25, np.float32) - 0.5) * np.float32(0.07)
            return np.resize(cls._pool, self.shape(name))

    return PooledSource


@dataclasses.dataclass
class StepTimes:
    """Seconds of every engine step, and of the part of it spent waiting for the device."""

    total: list[float] = dataclasses.field(default_factory=list)
    waiting: list[float] = dataclasses.field(default_factory=list)
    finished: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)


class TimedEngine:
    """Drives `EngineCore` step by step and notes where the time goes."""

    def __init__(self, core: Any):
        from engine import runner

        self.core = core
        self._waited = 0.0
        self._count = 0
        read = runner.StepHandle.tokens

        def timed(handle: Any) -> Any:
            begun = time.perf_counter()
            tokens = read(handle)
            self._waited += time.perf_counter() - begun
            return tokens

        cast(Any, runner.StepHandle).tokens = timed

    def add(self, prompt: Iterable[int], output_len: int) -> None:
        """Queues a greedy request that runs to its full length."""
        from engine import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self.core.add_request(f"request-{self._count}", [int(t) for t in prompt], params)
        self._count += 1

    def drain(self, on_output: Any = None) -> StepTimes:
        """Steps until nothing is left."""
        times = StepTimes()
        while self.core.has_unfinished():
            self._waited = 0.0
            begun = time.perf_counter()
            outputs = self.core.step()
            times.total.append(time.perf_counter() - begun)
            times.waiting.append(self._waited)
            times.tokens.append(sum(len(output.token_ids) for output in outputs))
            times.finished.append(sum(output.finish_reason is not None for output in outputs))
            if on_output is not None:
                for output in outputs:
                    on_output(output)
        return times


def decode_steps(times: StepTimes, rows: int) -> tuple[list[float], list[float]]:
    """(total, waiting) of the steps that gave every row a token and ended none."""
    chosen = [
        i
        for i, (tokens, finished) in enumerate(zip(times.tokens, times.finished))
        if tokens == rows and not finished
    ]
    # The first of them still overlaps the last prefill.
    chosen = chosen[2:] or chosen
    return [times.total[i] for i in chosen], [times.waiting[i] for i in chosen]


def milliseconds(values: Sequence[float]) -> float | None:
    """The median, in ms."""
    return round(1e3 * statistics.median(values), 3) if values else None


def weight_bytes(core: Any) -> int:
    """Bytes of the weights that a decode step reads: all but the rows of an untied embedding."""
    total = sum(leaf.nbytes for leaf in core.runner._leaves)
    config = core.model_config
    if not config.tie_embeddings:
        itemsize = core.runner._leaves[0].dtype.itemsize
        total -= config.vocab_size * config.hidden_size * itemsize
    return total


def kv_bytes_per_token(core: Any) -> float:
    """Bytes of keys and values of one token over all layers."""
    return core.sizes.page_bytes / core.sizes.block_size
