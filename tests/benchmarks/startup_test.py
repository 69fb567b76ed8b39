"""The start-up benchmark's bookkeeping, the server's process, and the live sweep's rows."""

import contextlib
import http.server
import threading
import types

import pytest

from benchmarks import server_process, startup, watermark_live
from benchmarks.server_process import parse_metrics
from benchmarks.serving_load import Outcome


def fake_start(seconds):
    """Takes seconds[kind]; leaves a file in the cache as a server does."""
    kinds = []

    def start(cache):
        kind = "warm" if any(cache.iterdir()) else "cold"
        kinds.append(kind)
        (cache / "steps.zip").write_text("")
        return {"health_s": seconds[kind] + len(kinds), "first_token_s": seconds[kind] + 30}

    return start, kinds


def test_cold_and_warm_starts_take_turns_and_medians_count(tmp_path):
    start, kinds = fake_start({"cold": 50.0, "warm": 5.0})
    report = startup.run(start, tmp_path, 3)
    assert kinds == ["cold", "warm"] * 3
    assert report["cold"]["health_s"] == {"median": 53.0, "all": [51.0, 53.0, 55.0]}
    assert report["warm"]["health_s"]["median"] == 9.0
    assert report["cold"]["first_token_s"]["median"] == 80.0
    assert startup.over_bounds(report) == []
    assert not any(tmp_path.iterdir())


def test_bounds_are_checked(tmp_path):
    report = startup.run(fake_start({"cold": 70.0, "warm": 14.0})[0], tmp_path, 1)
    slow = startup.over_bounds(report)
    assert slow == [
        "a cold start takes 71.0 s, over 60 s",
        "a warm start takes 16.0 s, over 15 s",
    ]


@pytest.mark.parametrize(("before", "late"), [(3, 0), (3, 1), (0, 0)])
def test_compilations_after_the_start_are_counted(tmp_path, monkeypatch, before, late):
    log, seen = tmp_path / "log", []

    @contextlib.contextmanager
    def serving(flags, log, environment):
        assert environment["JAX_LOG_COMPILES"] == "1"
        log.write_text("Finished XLA compilation of jit(step) in 1 s\n" * before)
        yield types.SimpleNamespace(base_url="")

    async def run_load(base_url, requests):
        seen.append(requests)
        if late and len(requests) == 17:
            with log.open("a") as file:
                file.write("Finished XLA compilation of jit(step) in 1 s\n")
        return [Outcome()] * len(requests), 1.0

    monkeypatch.setattr(startup, "serving", serving)
    monkeypatch.setattr(startup, "run_load", run_load)
    if not before:
        with pytest.raises(RuntimeError, match="tells of no compilation"):
            startup.count_compilations([], tmp_path, log)
        return
    assert startup.count_compilations([], tmp_path, log) == {"before": 3, "after": late}
    assert {len(requests) for requests in seen} >= {1, 2, 3, 5, 8, 16, 17, 31, 32}
    lengths = {len(r.prompt) for requests in seen for r in requests}
    assert {1, 2, 16, 512, 513, 4095, 4096} <= lengths <= set(range(1, 4097))


def test_a_cache_that_stays_empty_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="nothing was cached"):
        startup.run(lambda cache: {"health_s": 1.0, "first_token_s": 1.0}, tmp_path, 1)


def test_wrong_arguments(capsys):
    with pytest.raises(SystemExit):
        startup.main(["--runs=0"])
    assert "--runs=0" in capsys.readouterr().err


def test_metrics_are_summed_over_labels():
    text = (
        "# HELP a_total x\n# TYPE a_total counter\n"
        'a_total{model_name="m {x}",reason="growth"} 2.0\na_total{reason="self"} 3\nb 1e3\n'
    )
    assert parse_metrics(text) == {"a_total": 5.0, "b": 1000.0}


def test_a_server_that_ends_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="watermark=2"):
        server_process.ServerProcess(["--watermark=2"], tmp_path / "log", timeout_s=60)


def test_health_needs_status_200():
    class Handler(http.server.BaseHTTPRequestHandler):
        status = 503

        def do_GET(self):
            self.send_response(Handler.status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = object.__new__(server_process.ServerProcess)
        process.base_url = f"http://127.0.0.1:{server.server_port}"
        assert not process._healthy()
        Handler.status = 200
        assert process._healthy()
        server.shutdown()
    assert not process._healthy()


def fake_once(calls):
    def once(watermark, requests, *, concurrency, num_kv_blocks, flags, folder):
        calls.append(watermark)
        value = 100.0 * (watermark == 0.0) + len(calls)
        return dict.fromkeys(
            ("preemptions", "recomputed_tokens", "output_throughput", "ttft_p50_s", "ttft_p99_s",
             "itl_p50_ms", "itl_p99_ms", "e2e_p50_s"), value,
        )  # fmt: skip

    return once


def test_the_live_sweep_alternates_and_takes_medians(tmp_path):
    calls = []
    rows = watermark_live.run_live_sweep([0.0, 0.05, "auto"], runs=3, once=fake_once(calls))
    assert calls == [0.0, 0.05, "auto", "auto", 0.05, 0.0, 0.0, 0.05, "auto"]
    assert [row["watermark"] for row in rows] == [0.0, 0.05, "auto"]
    assert rows[0]["preemptions"] == 106.0 and rows[1]["preemptions"] == 5.0
    assert len(rows[0]["runs"]) == 3
    assert "| auto | 4 |" in watermark_live.format_table(rows)
    path = tmp_path / "sweep.png"
    watermark_live.plot(rows, path, "test")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="runs=0"):
        watermark_live.run_live_sweep(runs=0)


def test_the_pool_lies_between_mean_and_full_load():
    blocks = watermark_live.small_pool(32, 64, 320)
    assert 32 * 224 / 16 < blocks < 0.75 * 32 * 384 / 16
