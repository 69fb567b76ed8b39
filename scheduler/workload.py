"""Traces of requests: what the simulator replays. Numpy only.

A trace is a JSON object::

    {"name": ..., "mode": "closed_loop" | "open_loop", "max_concurrency": 128,
     "num_blocks": 18724, "block_size": 16, "max_num_seqs": 256, "max_model_len": 8192,
     "max_num_batched_tokens": 8192,
     "requests": [{"prompt_len": 1141, "output_len": 5346, "arrival": null}, ...]}

Closed loop: the first `max_concurrency` requests arrive at time 0 in order and each completion
releases the next at that instant. Open loop: `arrival` is in seconds from the start. A request
may carry `max_tokens` (all that a policy may know of its length), `class` and `priority`.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.config import SchedulerConfig

_SETTINGS = ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests and the engine they are meant for. Lengths in tokens, times in seconds.

    Attributes:
      name: what tables call it.
      prompt_lens, output_lens: int64 [requests]; an output includes its last token.
      max_tokens: int64 [requests], the bound on the output that is known at submission.
      arrivals: float64 [requests], ascending; None in closed loop.
      max_concurrency: requests in the system at once; None in open loop.
      num_blocks: blocks of the KV pool, the null block included.
      block_size, max_num_seqs, max_model_len, max_num_batched_tokens: as in `SchedulerConfig`.
      priorities: int64 [requests], lower runs first; None where all are equal.
      classes: label of each request for the length model; None where there is none.
    """

    name: str
    prompt_lens: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    arrivals: NDArray[np.float64] | None
    max_concurrency: int | None
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    priorities: NDArray[np.int64] | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def scheduler_config(self, **changes: Any) -> SchedulerConfig:
        """The scheduler this workload is meant for, with `changes` to single settings."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return SchedulerConfig(**{**settings, **changes})


def make_workload(
    name: str,
    prompt_lens: Sequence[int] | NDArray[np.integer],
    output_lens: Sequence[int] | NDArray[np.integer],
    *,
    num_blocks: int,
    max_model_len: int = 8192,
    max_tokens: Sequence[int] | NDArray[np.integer] | int | None = None,
    arrivals: Sequence[float] | NDArray[np.floating] | None = None,
    max_concurrency: int | None = None,
    **settings: Any,
) -> Workload:
    """Builds a workload from lengths; without `max_tokens` only the context bounds an output."""
    prompts = np.asarray(prompt_lens, np.int64)
    bound = max_model_len - prompts
    if max_tokens is not None:
        bound = np.minimum(bound, np.asarray(max_tokens, np.int64))
    return Workload(
        name=name,
        prompt_lens=prompts,
        output_lens=np.asarray(output_lens, np.int64),
        max_tokens=bound,
        arrivals=None if arrivals is None else np.asarray(arrivals, np.float64),
        max_concurrency=max_concurrency,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        **settings,
    )


def load_trace(path: str | pathlib.Path) -> Workload:
    """Reads a trace file (JSON, also gzipped). Raises ValueError with the reason, OSError."""
    path = pathlib.Path(path)
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        trace = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a JSON trace: {error}") from error
    try:
        return parse_trace(trace)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_trace(trace: Any) -> Workload:
    """Checks a decoded trace and turns it into a workload. Raises ValueError."""
    if not isinstance(trace, Mapping):
        raise ValueError(f"a trace is a JSON object, not {type(trace).__name__}")
    requests = trace.get("requests")
    if not isinstance(requests, list) or not requests:
        raise ValueError("a trace needs a non-empty list 'requests'")
    if not all(isinstance(request, Mapping) for request in requests):
        raise ValueError("every entry of 'requests' must be an object with prompt_len, output_len")
    if "num_blocks" not in trace:
        raise ValueError("a trace needs 'num_blocks', the size of the KV pool")
    settings = {name: _integer(trace, name, "the trace") for name in _SETTINGS if name in trace}
    max_model_len = settings.get("max_model_len", 8192)
    mode = trace.get("mode", "open_loop" if "arrival" in requests[0] else "closed_loop")
    if mode not in ("closed_loop", "open_loop"):
        raise ValueError(f"mode={mode!r} is neither 'closed_loop' nor 'open_loop'")
    prompts = np.array([_integer(r, "prompt_len", f"request {i}") for i, r in enumerate(requests)])
    outputs = np.array([_integer(r, "output_len", f"request {i}") for i, r in enumerate(requests)])
    bounds = np.array(
        [
            _integer(r, "max_tokens", f"request {i}")
            if r.get("max_tokens") is not None
            else max_model_len - prompts[i]
            for i, r in enumerate(requests)
        ]
    )
    arrivals = concurrency = None
    if mode == "open_loop":
        arrivals = np.array([_seconds(r, i) for i, r in enumerate(requests)])
    else:
        concurrency = _integer(trace, "max_concurrency", "a closed-loop trace")
    has_priority = any("priority" in r for r in requests)
    has_class = any("class" in r for r in requests)
    return Workload(
        name=str(trace.get("name", "trace")),
        prompt_lens=prompts,
        output_lens=outputs,
        max_tokens=np.minimum(bounds, max_model_len - prompts),
        arrivals=arrivals,
        max_concurrency=concurrency,
        priorities=np.array([r.get("priority", 0) for r in requests]) if has_priority else None,
        classes=tuple(str(r.get("class", "")) for r in requests) if has_class else None,
        **settings,
    )


def trace_json(workload: Workload) -> dict[str, Any]:
    """The trace of a workload, the inverse of `parse_trace`."""
    requests: list[dict[str, Any]] = []
    for i in range(len(workload)):
        request: dict[str, Any] = {
            "id": i,
            "prompt_len": int(workload.prompt_lens[i]),
            "output_len": int(workload.output_lens[i]),
            "max_tokens": int(workload.max_tokens[i]),
            "arrival": None if workload.arrivals is None else float(workload.arrivals[i]),
        }
        if workload.priorities is not None:
            request["priority"] = int(workload.priorities[i])
        if workload.classes is not None:
            request["class"] = workload.classes[i]
        requests.append(request)
    closed = workload.arrivals is None
    return {
        "name": workload.name,
        "mode": "closed_loop" if closed else "open_loop",
        **({"max_concurrency": workload.max_concurrency} if closed else {}),
        **{name: getattr(workload, name) for name in _SETTINGS},
        "requests": requests,
    }


def _integer(values: Mapping[str, Any], name: str, where: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{where}: {name}={value!r} is not an integer")
    return value


def _seconds(request: Mapping[str, Any], index: int) -> float:
    value = request.get("arrival")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(
            f"request {index}: arrival={value!r} is not a number of seconds (mode is open_loop)"
        )
    return float(value)


def _check(workload: Workload) -> None:
    """Raises ValueError with one sentence on the first thing that is wrong."""
    n = len(workload.prompt_lens)
    if n == 0:
        raise ValueError("a workload needs at least one request")
    if len(workload.output_lens) != n or len(workload.max_tokens) != n:
        raise ValueError("prompt_lens, output_lens and max_tokens must be equally long")
    for name in _SETTINGS:
        if getattr(workload, name) < 1:
            raise ValueError(f"{name}={getattr(workload, name)} must be at least 1")
    _refuse(workload.prompt_lens < 1, workload.prompt_lens, "prompt_len={} must be at least 1")
    _refuse(workload.output_lens < 1, workload.output_lens, "output_len={} must be at least 1")
    _refuse(workload.max_tokens < 1, workload.max_tokens, "max_tokens={} must be at least 1")
    totals = workload.prompt_lens + workload.output_lens
    _refuse(
        totals > workload.max_model_len,
        totals,
        "prompt_len + output_len = {} is more than " + f"max_model_len={workload.max_model_len}",
    )
    _refuse(
        workload.output_lens > workload.max_tokens,
        workload.output_lens,
        "output_len={} is more than its max_tokens",
    )
    # The last token of an output is never written to the pool, but one output token must fit.
    written = np.maximum(totals - 1, workload.prompt_lens + 1)
    blocks = -(-written // workload.block_size)
    usable = workload.num_blocks - 1
    _refuse(
        blocks > usable,
        blocks,
        f"needs {{}} blocks of {workload.block_size} tokens but the pool has {usable} usable ones",
    )
    if (workload.arrivals is None) == (workload.max_concurrency is None):
        raise ValueError("a workload has either arrivals (open loop) or max_concurrency (closed)")
    if workload.max_concurrency is not None and workload.max_concurrency < 1:
        raise ValueError(f"max_concurrency={workload.max_concurrency} must be at least 1")
    if workload.arrivals is not None:
        if len(workload.arrivals) != n:
            raise ValueError("arrivals must be as long as prompt_lens")
        _refuse(
            ~(workload.arrivals >= 0), workload.arrivals, "arrival={} is negative or not a number"
        )
        back = np.flatnonzero(np.diff(workload.arrivals) < 0)
        if len(back):
            i = int(back[0]) + 1
            raise ValueError(
                f"request {i}: arrival={workload.arrivals[i]} is earlier than that of the request "
                f"before it ({workload.arrivals[i - 1]}); sort the requests by arrival"
            )


def _refuse(wrong: NDArray[np.bool_], values: NDArray[Any], sentence: str) -> None:
    found = np.flatnonzero(wrong)
    if len(found):
        i = int(found[0])
        raise ValueError(f"request {i}: {sentence.format(values[i])}")
