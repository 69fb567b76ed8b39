"""The comparison of servers: its loads, its turns, and how a foreign server is started and ended."""

import os
import sys
import time

import pytest

from benchmarks import serve_peers, server_process

# Answers GET /health, and has a child that outlives it.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
port = int(next(a for a in sys.argv if a.startswith("--port=")).partition("=")[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print(child.pid, sys.argv[1:], flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def parse(*arguments):
    return serve_peers.parse(["--venvs=somewhere", *arguments])


def test_loads_follow_the_flags():
    arguments = parse("--max_concurrency=1,8", "--request_rate=0.5", "--requests_per_row=2")
    shapes = [(kind, figure, len(requests)) for kind, figure, requests in arguments.loads]
    assert shapes == [("closed", 1.0, 2), ("closed", 8.0, 16), ("open", 0.5, 15)]
    assert all(len(r.prompt) == r.output_len == 128 for r in arguments.loads[1][2])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--max_concurrency=0"], "--max_concurrency=0"),
        (["--max_concurrency=1.5"], "--max_concurrency=1.5"),
        (["--request_rate=inf"], "--request_rate=inf"),
        (["--max_concurrency="], "neither"),
        (["--only=tidegate,x"], "--only=tidegate,x"),
        (["--rounds=0"], "--rounds=0"),
    ],
)
def test_wrong_arguments(arguments, word, capsys):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert word in capsys.readouterr().err


def test_servers_take_turns_and_medians_count():
    calls = []

    def once(name, loads):
        calls.append(name)
        keys = [key for _, key, _ in serve_peers._COLUMNS]
        return [dict.fromkeys(keys, 100.0 * i + len(calls)) for i, _ in enumerate(loads)]

    loads = [("closed", 1.0, []), ("open", 2.0, [])]
    rows = serve_peers.run(["tidegate", "vllm"], loads, 3, once)
    assert calls == ["tidegate", "vllm", "vllm", "tidegate", "tidegate", "vllm"]
    assert [(r["loop"], r["server"], r["output_throughput"]) for r in rows] == [
        ("closed", "tidegate", 4.0), ("closed", "vllm", 3.0),
        ("open", "tidegate", 104.0), ("open", "vllm", 103.0),
    ]  # fmt: skip
    table = serve_peers.format_table(rows)
    assert "| closed, 1 at once | tidegate | 4.0 |" in table
    assert "| open, 2 requests/s | vllm | 103.0 |" in table


def test_a_missing_environment_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serve_peers.checkpoints, "prepare", lambda *_: {"hf": "x", "gguf": "y"})
    assert serve_peers.main([f"--venvs={tmp_path}", "--only=vllm"]) == 1
    assert "--setup" in capsys.readouterr().err


def test_another_server_is_started_and_ended_with_its_children(tmp_path):
    program = (sys.executable, "-c", SERVER)
    server = server_process.ServerProcess(["--a=b"], tmp_path / "log", program=program)
    try:
        child, _, shown = (tmp_path / "log").read_text().splitlines()[0].partition(" ")
        assert shown.startswith("['--a=b', '--host=127.0.0.1', '--port=")
    finally:
        server.stop()
    assert server._process.poll() is not None
    deadline = time.monotonic() + 10
    while _runs(int(child)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(child))


def _runs(pid):
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # ended, if nobody reaps it
    except (ProcessLookupError, FileNotFoundError):
        return False
