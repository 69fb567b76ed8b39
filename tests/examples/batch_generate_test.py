"""Files of requests: no line is lost, bad ones are named, and a second start goes on."""

import errno
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from engine.testing import FakeCore

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "batch_generate.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("batch_generate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["batch_generate"] = module
    spec.loader.exec_module(module)
    return module


def _line(name, body=None, url="/v1/completions", method="POST"):
    body = {"prompt": "ab", "max_tokens": 3} if body is None else body
    return {"custom_id": name, "method": method, "url": url, "body": body}


class Files:
    """An input and an output."""

    def __init__(self, folder):
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.cores = []

    def write(self, *lines):
        raw = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
        self.input.write_bytes(b"\n".join(raw) + b"\n")

    def run(self, script, *more, core=None):
        def make(config):
            self.cores.append(core or FakeCore())
            return self.cores[-1]

        flags = [f"--input={self.input}", f"--output={self.output}", *more]
        return script.main(flags, make)

    def results(self):
        lines = [json.loads(x) for x in self.output.read_text().splitlines()]
        assert len({x["line"] for x in lines}) == len(lines)
        return {x["line"]: x for x in lines}


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def test_answers(script, files):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    files.write(
        _line("a"),
        _line("b", chat, "/v1/chat/completions"),
        b"",
        _line("c", {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "model": "fake"}),
    )
    assert files.run(script) == 0
    results = files.results()
    assert sorted(results) == [1, 2, 4]
    assert [results[i]["custom_id"] for i in (1, 2, 4)] == ["a", "b", "c"]
    assert all(r["error"] is None for r in results.values())
    assert all(r["response"]["status_code"] == 200 for r in results.values())
    body = results[1]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "aba"
    assert body["usage"]["completion_tokens"] == 3
    body = results[2]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "user:"
    texts = [c["text"] for c in results[4]["response"]["body"]["choices"]]
    assert texts == ["ab", "ab", "cd", "cd"]


def test_bad_lines_are_named_and_the_others_answered(script, files, capsys):
    files.write(
        _line("good"),
        b"{not json",
        b'"text"',
        {**_line("x"), "custom_id": 7},
        _line("get", method="GET"),
        _line("url", url="/v1/embeddings"),
        {"custom_id": "nobody", "method": "POST", "url": "/v1/completions"},
        _line("good"),
        b"\xff\xfe",
        _line("zero", {"prompt": "a", "max_tokens": 0}),
        _line("model", {"prompt": "a", "model": "gpt"}),
        _line("stream", {"prompt": "a", "stream": True}),
        _line("long", {"prompt": "a" * 600}),
        _line("several", {"prompt": ["a", "b", ""]}),
        _line("last"),
    )
    assert files.run(script) == 2
    results = files.results()
    assert sorted(results) == list(range(1, 16))
    codes = {i: r["error"]["code"] for i, r in results.items() if r["error"]}
    assert codes == {
        2: "invalid_json", 3: "invalid_line", 4: "invalid_line", 5: "invalid_method",
        6: "invalid_url", 7: "invalid_line", 8: "duplicate_custom_id", 9: "invalid_json",
    }  # fmt: skip
    status = {i: r["response"]["status_code"] for i, r in results.items() if r["response"]}
    assert status == {1: 200, 10: 400, 11: 404, 12: 400, 13: 400, 14: 400, 15: 200}
    error = capsys.readouterr().err
    for number in range(2, 15):
        assert f"line {number}" in error
    assert "was used in line 1" in error
    files.cores[0].check_integrity()
    assert not files.cores[0].has_unfinished()


def test_a_second_start_goes_on(script, files):
    files.write(*(_line(f"r{i}", {"prompt": f"p{i}", "max_tokens": 3}) for i in range(30)))

    class Interrupted(FakeCore):
        def step(self):
            if self.num_steps == 5:
                raise KeyboardInterrupt
            return super().step()

    assert files.run(script, core=Interrupted()) == 130
    done = files.results()
    assert 0 < len(done) < 30
    with files.output.open("ab") as file:  # killed in the middle of a line
        file.write(b'{"id": "batch_req_1", "line": 3')
    assert files.run(script) == 0
    results = files.results()
    assert sorted(results) == list(range(1, 31))
    assert {i: results[i] for i in done} == done
    # Nothing is left to do: no model is loaded.
    cores = len(files.cores)
    assert files.run(script) == 0
    assert len(files.cores) == cores
    assert files.results() == results


def test_a_full_disk_loses_nothing_that_is_written(script, files, monkeypatch, capsys):
    files.write(*(_line(f"r{i}") for i in range(10)))
    real = script.Results.write

    def write(self, number, *args, **more):
        if len(self.done) == 4:
            self._file.write(b'{"id": "half')
            self._file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, number, *args, **more)

    monkeypatch.setattr(script.Results, "write", write)
    assert files.run(script) == 1
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(script.Results, "write", real)
    assert files.run(script) == 0
    assert sorted(files.results()) == list(range(1, 11))


def test_memory_is_bounded_by_the_window(script, files):
    waiting = []

    class Watched(FakeCore):
        def step(self):
            waiting.append(self.scheduler.num_waiting + self.scheduler.num_running)
            return super().step()

    files.write(*(_line(f"r{i}") for i in range(200)))
    assert files.run(script, core=Watched(max_num_seqs=4)) == 0
    assert max(waiting) <= 8
    assert len(files.results()) == 200


def test_preemptions_change_nothing(script, files):
    body = {"max_tokens": 60, "ignore_eos": True}
    files.write(*(_line(f"r{i}", {"prompt": chr(97 + i) * 20, **body}) for i in range(12)))
    core = FakeCore(num_blocks=50, rule=lambda tokens, n: tokens[0])
    assert files.run(script, core=core) == 0
    assert core.scheduler.stats.num_preemptions > 0
    for i, result in files.results().items():
        assert result["response"]["body"]["choices"][0]["text"] == chr(96 + i) * 60


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--input"),
        (["--input=/no/such"], "--output"),
        (["--input=/no/such", "--output=x"], "/no/such does not exist"),
        ([f"--input={SCRIPT}", f"--output={SCRIPT}"], "same file"),
        ([f"--input={SCRIPT}", "--output=/no/such/folder/x"], "No such file or directory"),
        ([f"--input={SCRIPT}", "--output=x", "--watermark=7"], "--watermark"),
        ([f"--input={SCRIPT}", "--output=x", "--model=/no/model"], "/no/model does not exist"),
        (["--bogus"], "bogus"),
    ],
)
def test_bad_settings(script, flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert script.main(flags) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_foreign_outputs_are_left_alone(script, files, capsys):
    files.write(_line("a"), _line("b"))
    files.output.write_bytes(b"precious\n")
    assert files.run(script) == 1
    assert "line 1 of" in capsys.readouterr().err
    assert files.output.read_bytes() == b"precious\n"
    files.output.unlink()
    assert files.run(script) == 0
    before = files.output.read_bytes()
    files.write(_line("b"), _line("a"))
    assert files.run(script) == 1
    assert "'a' for line 1, which is 'b'" in capsys.readouterr().err
    assert files.output.read_bytes() == before


def test_the_script_runs_by_itself():
    result = subprocess.run(
        [sys.executable, SCRIPT, "--help"],
        capture_output=True,
        timeout=60,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0
    assert "--watermark" in result.stdout
