"""The command line: every setting has a flag, and what is wrong ends with one sentence and code 1."""

import dataclasses
import pathlib
import socket
import subprocess
import sys

import pytest

import run_server
from engine.config import EngineConfig
from engine.server.config import ServerConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def served(monkeypatch):
    """Calls of `serve` instead of a server."""
    calls = []

    def serve(config, server_config):
        calls.append((config.validate(), server_config.validate()))
        return 0

    monkeypatch.setattr(run_server, "serve", serve)
    return calls


def test_defaults_are_those_of_the_settings(served):
    assert run_server.main([]) == 0
    assert served == [(EngineConfig().validate(), ServerConfig())]


def test_every_setting_has_a_flag_with_a_text():
    values = run_server.define_flags(EngineConfig, ServerConfig)
    for settings in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(settings):
            assert len(values[field.name].help) > 10, field.name


def test_flags_reach_the_settings(served):
    line = (
        "--model=org/name --max-num-seqs=4 --max_num_batched_tokens 64 --block_size=32 "
        "--num-gpu-blocks-override=99 --watermark=0.05 --no-scheduler-reserve-full-isl "
        "--dtype=bfloat16 --seed=-3 --api-key one two --served-model-name a "
        "--gpu-memory-utilization 0.5 --no-enable-prefix-caching --shutdown_timeout_s=1.5 --port 0"
    )
    assert run_server.main(line.split()) == 0
    ((config, server),) = served
    assert config == EngineConfig(
        model="org/name", max_num_seqs=4, max_num_batched_tokens=64, block_size=32,
        num_kv_blocks=99, watermark=0.05, reserve_full_sequence=False, dtype="bfloat16", seed=-3,
        device_memory_utilization=0.5, enable_prefix_caching=False,
    )  # fmt: skip
    assert server == ServerConfig(
        api_key=("one", "two"), served_model_name=("a",), shutdown_timeout_s=1.5, port=0
    )


@pytest.mark.parametrize("watermark", ["auto", "0", "0.0", "0.999"])
def test_good_watermarks(served, watermark):
    assert run_server.main([f"--watermark={watermark}"]) == 0
    assert str(served[0][0].watermark).startswith(watermark[:3])


BAD = [
    ("--watermark=1", "--watermark"),
    ("--watermark=-0.1", "--watermark"),
    ("--watermark=nan", "--watermark"),
    ("--watermark=abc", "abc"),
    ("--watermark=inf", "inf"),
    ("--bogus=1", "bogus"),
    ("--max-num-seqs=many", "max_num_seqs"),
    ("--max-num-seqs=0", "max_num_seqs=0"),
    ("--max-num-seqs", "max_num_seqs"),
    ("--max_num_seqs=64 --max_num_batched_tokens=32", "--max_num_batched_tokens"),
    ("--dtype=float8", "float8"),
    ("--port=70000", "--port"),
    ("--shutdown_timeout_s=-1", "--shutdown_timeout_s"),
    ("--log_level=loud", "loud"),
    ("--chat_template=/no/such/file", "/no/such/file"),
    ("--api_key=", "--api_key"),
    ("--model=/no/such/model", "/no/such/model does not exist"),
    ("--model=./no.gguf", "./no.gguf does not exist"),
    ("one two", "'two'"),
]


@pytest.mark.parametrize(("line", "words"), BAD)
def test_bad_flags(line, words, capsys):
    assert run_server.main(line.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("run_server.py: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_noticed_before_the_model_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run_server.main([f"--port={port}"]) == 1
    error = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1" in error
    assert "change --port" in error


def test_help(capsys):
    assert run_server.main(["--help"]) == 0
    assert "--watermark" in capsys.readouterr().out


def test_bad_flags_do_not_wait_for_jax():
    code = (
        "import sys, run_server; code = run_server.main(['--watermark=2']);"
        "sys.exit(code if 'jax' not in sys.modules else 77)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert result.returncode == 1, result.stderr
