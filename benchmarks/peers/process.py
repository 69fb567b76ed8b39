"""A worker process from the parent's side: started, asked with a deadline, ended, its memory read."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import subprocess
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
_END_S = 10.0


class WorkerError(RuntimeError):
    """A worker failed or took too long; one sentence."""


class Worker:
    """One engine in its own process group."""

    def __init__(
        self, python: str, settings: dict[str, Any], log: pathlib.Path, *, timeout_s: float
    ):
        """Starts the process and waits until its engine is loaded.

        Args:
          python: interpreter of the engine's environment.
          settings: see the adapters; `adapter`, `threads`, `dtype`, ...
          log: file for what the engine prints.
          timeout_s: for loading.

        Raises WorkerError.
        """
        threads = settings["threads"]
        cores = sorted(os.sched_getaffinity(0))[:threads]
        self._log = log
        # OMP_WAIT_POLICY stays unset: threads spin between the operations of a step and sleep soon
        # after it. Passive ones cost the peers up to half their speed, active ones disturb the next.
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            **settings.get("environment", {}),
        }
        command = [python, "-m", "benchmarks.peers.worker", json.dumps(settings)]
        with open(log, "wb") as errors:
            try:
                self._process = subprocess.Popen(
                    command, cwd=ROOT, env=environment, start_new_session=True, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
            except OSError as error:
                raise WorkerError(f"{python} does not start: {error.strerror}") from error
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(self._process.pid, cores)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.ready: dict[str, Any] = self._answer(timeout_s)["ready"]
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(timeout_s, 0.1))
        except queue.Empty:
            raise WorkerError(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            code = self._process.wait(_END_S)
            tail = self._log.read_text(errors="replace").strip().splitlines()
            raise WorkerError(f"ended with code {code}: {tail[-1][:200] if tail else ''}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a request and waits for its answer. Raises WorkerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # ValueError: closed by us
            raise WorkerError(f"it has ended: {error}") from error
        return self._answer(timeout_s)

    def memory(self) -> dict[str, int]:
        """Bytes: `peak_rss` since the start and `rss` now, of the process and its descendants."""
        total = {"peak_rss": 0, "rss": 0}
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(OSError):
                for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        total["peak_rss"] += int(line.split()[1]) << 10
                    elif line.startswith("VmRSS:"):
                        total["rss"] += int(line.split()[1]) << 10
        return total

    def close(self) -> None:
        """Ends the process and what it started: by the end of its input, else by signal."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        deadline = time.monotonic() + _END_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if not self._answers.empty() or not hasattr(self, "ready"):
                break  # it is busy or stuck: no use waiting
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for tasks in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in tasks.read_text().split()]
    return found
