"""Waves of concurrent streams against a real server on a small pool, then SIGTERM under load.

Passes if every stream of every wave completes, requests were preempted on the way, no block is
leaked, the resident memory after the last wave is within 3% of that after the one before, and the
server, told to stop under load, ends every stream and exits 0 in time with balanced books.

    python -m benchmarks.soak [--streams 200] [--waves 3] [--json]
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from absl import app, flags

_STREAMS = flags.DEFINE_integer("streams", 200, "Concurrent streams per wave.", lower_bound=1)
_WAVES = flags.DEFINE_integer("waves", 3, "Waves.", lower_bound=2)
_OUTPUT = flags.DEFINE_integer("output_len", 48, "Tokens per stream.", lower_bound=1)
_BLOCKS = flags.DEFINE_integer("num_kv_blocks", 90, "KV blocks of the server.", lower_bound=10)
_TIMEOUT = flags.DEFINE_integer("timeout_s", 600, "Longest time per wave.", lower_bound=1)
_JSON = flags.DEFINE_boolean("json", False, "Print the result as JSON.")

_ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Stream:
    """How one stream went: text pieces, and how it ended ("done", "error event", or a fault)."""

    pieces: int = 0
    finish_reason: str | None = None
    ended: str = "open"


def free_port() -> int:
    """A port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A run_server.py process on loopback."""

    def __init__(self, *arguments: str):
        self.port = free_port()
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 (lives as long)
        command = [sys.executable, str(_ROOT / "run_server.py"), f"--port={self.port}", *arguments]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=_ROOT)

    def wait_until_healthy(self, timeout_s: float = 300) -> None:
        """Raises RuntimeError with the log's end if the server does not come up."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.get("/health").status == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the server did not start:\n{self.tail()}")

    def get(self, path: str) -> Any:
        """GET on loopback."""
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = self.get("/metrics").read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)

    def resident_mib(self) -> float:
        """Resident memory of the process."""
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def tail(self, lines: int = 15) -> str:
        """End of the log."""
        text = pathlib.Path(self.log.name).read_text()
        return "\n".join(text.splitlines()[-lines:])


async def stream(port: int, number: int, output_len: int, result: Stream) -> None:
    """One streaming completion over a plain socket."""
    body = json.dumps(
        {
            "prompt": f"Stream {number} tells of the tide: " + "water " * (number % 13),
            "max_tokens": output_len,
            "temperature": 0.8,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            result.ended = f"refused: {status.decode().strip()}"
            return
        result.ended = "cut off"
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                if result.ended != "error event":
                    result.ended = "done"
                return
            event = json.loads(data)
            if "error" in event:
                result.ended = "error event"
                continue
            choice = event["choices"][0]
            result.pieces += bool(choice["text"])
            result.finish_reason = choice["finish_reason"] or result.finish_reason
    except OSError as error:
        result.ended = f"fault: {error}"
    finally:
        writer.close()


async def wave(port: int, count: int, output_len: int, timeout_s: float) -> list[Stream]:
    """`count` streams at once; those still open after `timeout_s` stay "cut off"."""
    results = [Stream() for _ in range(count)]
    jobs = [
        asyncio.create_task(stream(port, i, output_len, result)) for i, result in enumerate(results)
    ]
    await asyncio.wait(jobs, timeout=timeout_s)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    return results


async def stop_under_load(server: Server, count: int, timeout_s: int) -> dict[str, Any]:
    """SIGTERM while `count` long streams run."""
    load = asyncio.create_task(wave(server.port, count, 1000, timeout_s + 60))
    await asyncio.sleep(4)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    results = await load
    code = await asyncio.to_thread(server.process.wait, 60)
    ends = {r.ended for r in results}
    return {"exit_code": code, "seconds": time.monotonic() - begun, "ends": sorted(ends)}


def run() -> dict[str, Any]:
    """The whole soak; see the module's text. Returns its figures, and "passed"."""
    drain_s = 5
    server = Server(
        f"--num_kv_blocks={_BLOCKS.value}",
        "--max_model_len=1200",
        "--max_num_seqs=32",
        f"--shutdown_timeout_s={drain_s}",
    )
    try:
        server.wait_until_healthy()
        waves = []
        for _ in range(_WAVES.value):
            begun = time.monotonic()
            results = asyncio.run(wave(server.port, _STREAMS.value, _OUTPUT.value, _TIMEOUT.value))
            complete = sum(r.ended == "done" and r.finish_reason == "length" for r in results)
            waves.append(
                {
                    "complete": complete,
                    "seconds": time.monotonic() - begun,
                    "preemptions": server.metric("vllm:num_preemptions_total"),
                    "kv_cache_usage": server.metric("vllm:kv_cache_usage_perc"),
                    "resident_mib": server.resident_mib(),
                }
            )
            if not _JSON.value:
                print(waves[-1], flush=True)
        stop = asyncio.run(stop_under_load(server, 40, drain_s))
        balanced = re.search(r"KV pool: (\d+) of (\d+) blocks free", server.tail())
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
    growth = waves[-1]["resident_mib"] / waves[-2]["resident_mib"] - 1
    passed = (
        all(w["complete"] == _STREAMS.value and w["kv_cache_usage"] == 0 for w in waves)
        and waves[-1]["preemptions"] > 0
        and abs(growth) <= 0.03
        and stop["exit_code"] == 0
        and stop["seconds"] < drain_s + 15
        and set(stop["ends"]) <= {"done", "error event"}
        and balanced is not None
        and balanced[1] == balanced[2]
    )
    return {"waves": waves, "memory_growth": growth, "stop": stop, "passed": bool(passed)}


def main(argv: list[str]) -> None:
    del argv
    result = run()
    print(json.dumps(result, indent=None if _JSON.value else 1))
    sys.exit(not result["passed"])


if __name__ == "__main__":
    app.run(main)
