"""What the sections share: results on disk, timing, sizes."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Section:
    """One section's results, written whenever something was added."""

    def __init__(self, argv: list[str]):
        self.name, path = argv[0], argv[1]
        self.rehearse = "--rehearse" in argv
        self._path = Path(path)
        self.results: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        """Stores one result and writes all of them."""
        self.results[key] = value
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.results, indent=1))
        temporary.replace(self._path)
        print(f"{key}: {value}", flush=True)

    def skip(self, reason: str) -> int:
        """Says why nothing was measured; the section's exit code."""
        self.put("skipped", reason)
        return 0

    def attempt(self, key: str, measure: Callable[[], Any]) -> Any:
        """Stores what `measure` returns, or the error that it raised: peers may be missing."""
        try:
            value = measure()
        except Exception as error:
            value = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        self.put(key, value)
        return value

    def ceiling(self, key: str) -> float | None:
        """A figure of the roofline section of the same run, if it was measured."""
        path = Path(os.environ.get("GPU_CHECK_OUT", ".")) / "roofline.json"
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text()).get(key)
        return None


def run(body: Callable[[Section], int | None]) -> None:
    """Entry point of a section's module."""
    sys.exit(body(Section(sys.argv[1:])) or 0)


def time_jax(call: Callable[[], Any], *, repeats: int, rounds: int = 5) -> float:
    """Seconds per call: the median round of `repeats` calls queued without waiting between them.

    Calls that take longer than their dispatch (some tens of microseconds) are timed back to back.
    """
    import jax

    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        last = None
        for _ in range(repeats):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - begun) / repeats)
    return statistics.median(times)


def share(part: float | None, whole: float | None) -> float | None:
    """part / whole, or None where either is unknown."""
    return round(part / whole, 4) if part and whole else None
