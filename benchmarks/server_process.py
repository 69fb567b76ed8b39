"""Starts run_server.py or another server for a benchmark, waits for it, reads its metrics, ends it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
_STOP_S = 40.0


class ServerProcess:
    """A server on a free loopback port.

    Attributes:
      base_url: where it listens.
      ready_s: seconds from the start of the process to the first 200 of /health.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: pathlib.Path,
        *,
        program: Sequence[str] = (sys.executable, str(ROOT / "run_server.py")),
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 180.0,
    ):
        """Starts the server and waits for /health.

        Args:
          arguments: flags of the server, without host and port.
          log: file for what it prints.
          program: the server; its flags include --host and --port.
          environment: variables to add.
          timeout_s: for the start.

        Raises RuntimeError with the end of the log if it does not come up.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [*program, *arguments, "--host=127.0.0.1", f"--port={port}"]
        self.started = time.perf_counter()
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}), start_new_session=True,
            )  # fmt: skip
        try:
            self._wait(timeout_s)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - self.started

    def _wait(self, timeout_s: float) -> None:
        while True:
            if self._healthy():
                return
            elapsed = time.perf_counter() - self.started
            if self._process.poll() is not None or elapsed > timeout_s:
                tail = self._log.read_text(errors="replace").strip()[-600:]
                raise RuntimeError(f"the server is not up after {elapsed:.0f} s: {tail}")
            time.sleep(0.02)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:  # also urllib's own errors: refused, or a status of 503
            return False

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, summed over their labels."""
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=10) as answer:
            return parse_metrics(answer.read().decode())

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what that does not end: the server, and what it started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def serving(arguments: Sequence[str], log: pathlib.Path, **options) -> Iterator[ServerProcess]:
    """A `ServerProcess` that ends with the block."""
    server = ServerProcess(arguments, log, **options)
    try:
        yield server
    finally:
        server.stop()


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format, as {name: sum over labels}."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found
