"""Workloads from a server's request log (`--request_log`): a JSON object per line."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from scheduler.workload import Workload, make_workload


def load_request_log(
    path: str | pathlib.Path,
    *,
    num_blocks: int,
    max_model_len: int,
    last_minutes: float | None = None,
    **settings: int,
) -> Workload:
    """Reads arrivals and lengths; requests that produced nothing are left out.

    Args:
      path: lines with arrival (seconds), prompt_len, output_len and, possibly null, max_tokens, in
        any order.
      num_blocks, max_model_len, settings: the engine to simulate.
      last_minutes: only requests that arrived within this time of the last one.

    Raises:
      ValueError: a line is wrong, or nothing is left. OSError: the file cannot be read.
    """
    rows: list[tuple[float, int, int, int]] = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = _parse(line, f"{path}:{number}", max_model_len)
                if row[2] > 0:
                    rows.append(row)
    rows.sort()
    if rows and last_minutes is not None:
        start = rows[-1][0] - 60.0 * last_minutes
        rows = [row for row in rows if row[0] >= start]
    if not rows:
        raise ValueError(f"{path} has no request with output to replay")
    first = rows[0][0]
    arrivals, prompts, outputs, bounds = (np.array(column) for column in zip(*rows))
    return make_workload(
        pathlib.Path(path).stem,
        prompts,
        outputs,
        max_tokens=np.maximum(bounds, outputs),
        arrivals=arrivals - first,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        **settings,
    )


def _parse(line: str, where: str, max_model_len: int) -> tuple[float, int, int, int]:
    try:
        entry = json.loads(line)
        arrival = float(entry["arrival"])
        prompt, output = int(entry["prompt_len"]), int(entry["output_len"])
        bound = entry.get("max_tokens")
        bound = max_model_len - prompt if bound is None else int(bound)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{where} is not a JSON object with numbers arrival, prompt_len and output_len"
        ) from error
    return arrival, prompt, output, bound


__all__ = ["load_request_log"]
