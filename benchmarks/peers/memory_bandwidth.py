"""Not an engine: how fast the threads read memory, measured in the place of one."""

from __future__ import annotations

import concurrent.futures
import os
import time
from typing import Any

_BYTES_PER_THREAD = 256 << 20
_PASSES = 8


def read_bandwidth(threads: int, bytes_per_thread: int = _BYTES_PER_THREAD) -> float:
    """Bytes per second of the best of several passes of `threads` dot products over fresh memory."""
    import numpy as np

    arrays = [np.ones(bytes_per_thread // 4, np.float32) for _ in range(threads)]

    def read(array: Any) -> None:
        np.dot(array, array)  # lets go of the interpreter's lock; a vector add per load

    best = float("inf")
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(_PASSES):
            begun = time.perf_counter()
            list(pool.map(read, arrays))
            best = min(best, time.perf_counter() - begun)
    return threads * bytes_per_thread / best


class Probe:
    """Answers `info` with the bandwidth; generates nothing."""

    def __init__(self, settings: dict[str, Any]):
        # One thread per array; numpy is first imported below.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        self._bandwidth = read_bandwidth(settings["threads"])

    def info(self) -> dict[str, Any]:
        return {"bytes_per_s": self._bandwidth}


load = Probe
