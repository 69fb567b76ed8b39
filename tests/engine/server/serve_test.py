"""A server process over an engine without a device: signals, exit codes, real sockets."""

import concurrent.futures
import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time

import httpx
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys, threading
from engine.config import EngineConfig
from engine.server.config import ServerConfig
from engine.server.serve import open_socket, run
from engine.testing import FakeCore

settings = json.loads(sys.argv[1])
core = FakeCore(**settings["core"], rule=lambda tokens, n: tokens[(len(tokens) - n) % n])
fail_after = settings.get("fail_after")
if fail_after:
    def fail():
        core.fail = MemoryError("no memory left")
    threading.Timer(fail_after, fail).start()
server = ServerConfig(port=0, **settings["server"]).validate()
with open_socket(server.host, server.port) as listener:
    sys.exit(run(core, EngineConfig(), server, listener))
"""
LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "stream": True}


class Process:
    """A server process and its address."""

    def __init__(self, settings):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(settings)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = ""
        for line in self.popen.stderr:
            if " on http://" in line:
                break
        self.url = line.split()[-1]
        for _ in range(200):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/health").status_code == 200:
                    return
            time.sleep(0.02)
        raise AssertionError("the server did not start")

    def stream(self, body=LONG):
        """Lines of a stream to its end."""
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=30) as response:
            return [line for line in response.iter_lines() if line]

    def running(self):
        """Requests in the batch."""
        text = httpx.get(self.url + "/metrics").text
        return next(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("vllm:num_requests_running")
        )

    def wait_until_running(self, count):
        deadline = time.monotonic() + 20
        while self.running() != count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait(self):
        """(exit code, rest of standard error)."""
        error = self.popen.stderr.read()
        return self.popen.wait(20), error


@pytest.fixture
def start():
    processes = []

    def start(core=None, fail_after=None, **server):
        settings = {"core": {"step_seconds": 0.005, **(core or {})}, "server": server}
        process = Process({**settings, "fail_after": fail_after})
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait(10)
        process.popen.stderr.close()


def test_sigterm_when_idle(start):
    process = start()
    # An idle connection does not hold the server up.
    with httpx.Client() as client:
        client.get(process.url + "/health")
        began = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        code, _ = process.wait()
    assert code == 0
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_finish_before_the_end(start, number):
    process = start(shutdown_timeout_s=20)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        streams = [pool.submit(process.stream) for _ in range(4)]
        process.wait_until_running(4)
        process.popen.send_signal(number)
        time.sleep(0.2)
        late = httpx.post(process.url + "/v1/completions", json={"prompt": "a"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        for stream in streams:
            lines = stream.result()
            assert '"finish_reason":"length"' in lines[-2]
            assert lines[-1] == "data: [DONE]"
    code, _ = process.wait()
    assert code == 0


def test_what_takes_too_long_is_cut_off(start):
    process = start(core={"step_seconds": 0.05}, shutdown_timeout_s=0.5)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(process.stream) for _ in range(8)]
        process.wait_until_running(8)
        began = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        for stream in streams:
            lines = stream.result()
            assert '"code":"shutting_down"' in lines[-2]
            assert lines[-1] == "data: [DONE]"
    code, _ = process.wait()
    assert code == 0
    assert time.monotonic() - began < 5


def test_a_second_signal_is_meant(start):
    process = start(core={"step_seconds": 0.05}, shutdown_timeout_s=60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = pool.submit(process.stream)
        process.wait_until_running(1)
        process.popen.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.popen.send_signal(signal.SIGTERM)
        code, _ = process.wait()
        with contextlib.suppress(httpx.TransportError):
            stream.result()
    assert code == 0


def test_a_failing_engine_ends_the_process(start):
    process = start(core={"step_seconds": 0.05}, fail_after=3.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        streams = [pool.submit(process.stream) for _ in range(3)]
        for stream in streams:
            lines = stream.result()
            assert '"code":"engine_dead"' in lines[-2]
        health = httpx.get(process.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
    code, error = process.wait()
    assert code == 1
    assert "The engine failed: MemoryError: no memory left" in error


def test_clients_that_leave_or_stop_reading(start):
    process = start(core={"step_seconds": 0.001, "max_num_seqs": 64, "max_model_len": 4000,
                          "num_blocks": 8000}, shutdown_timeout_s=1)  # fmt: skip

    body = {**LONG, "max_tokens": 3900}
    for stream in (True, False):
        with httpx.Client(timeout=0.3) as client, contextlib.suppress(httpx.TimeoutException):
            if stream:
                with client.stream("POST", process.url + "/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                client.post(process.url + "/v1/completions", json={**body, "stream": False})
        process.wait_until_running(0)
    # One that does not read holds nobody up, and does not keep the server from ending.
    with httpx.Client(timeout=20) as client:
        request = client.build_request("POST", process.url + "/v1/completions", json=body)
        stuck = client.send(request, stream=True)
        quick = client.post(
            process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 4}
        ).json()
        assert quick["choices"][0]["text"] == "abab"
        process.popen.send_signal(signal.SIGTERM)
        code, _ = process.wait()
        stuck.close()
    assert code == 0


def test_memory_does_not_grow_with_waves(start):
    psutil = pytest.importorskip("psutil")
    process = start(core={"step_seconds": 0.001, "max_num_seqs": 64, "num_blocks": 300})
    resident = psutil.Process(process.popen.pid).memory_info
    sizes = []
    for _ in range(4):
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            bodies = [{**LONG, "prompt": f"p{i}", "max_tokens": 40} for i in range(32)]
            for lines in pool.map(process.stream, bodies):
                assert lines[-1] == "data: [DONE]"
        sizes.append(resident().rss)
    assert sizes[3] < 1.03 * sizes[2], sizes
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait()[0] == 0
