"""The simulator's command line: output, sources of workloads, and bad input."""

import http.server
import json
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks import watermark_sweep
from benchmarks.request_logs import load_request_log
from benchmarks.step_models import fit_from_metrics, save_step_model, step_model_from
from benchmarks.workloads import GENERATORS
from scheduler.simulator import simulate
from scheduler.step_time import PRESETS, StepTimeModel
from scheduler.workload import trace_json

ROOT = pathlib.Path(__file__).parents[2]
FIELDS = {
    "watermark", "preemptions", "recomputed_tokens", "output_tok_s", "ttft_p50_s", "ttft_p99_s",
    "itl_p50_ms", "itl_p99_ms", "e2e_p50_s", "kv_use_mean",
}  # fmt: skip


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.simulate", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


@pytest.fixture(name="trace")
def trace_file(tmp_path):
    """A small closed-loop trace that preempts without a watermark."""
    workload = GENERATORS["tiny_pool"](n=40)
    return write(tmp_path / "trace.json", trace_json(workload))


def test_prints_json(trace):
    done = run("--trace", trace, "--watermark", "0,0.1,auto", "--json")
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert [report["watermark"] for report in reports] == [0.0, 0.1, "auto"]
    assert all(set(report) >= FIELDS for report in reports)
    assert reports[0]["preemptions"] > reports[1]["preemptions"]


def test_prints_a_table_a_recommendation_and_a_plot(trace, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "out.png"
    done = run("--trace", trace, "--watermark=0,auto", "--lengths_known", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert "auto, lengths known" in done.stdout and "Recommended: --watermark=" in done.stdout
    assert plot.read_bytes()[:4] == b"\x89PNG"


BAD = {"mode": "closed_loop", "max_concurrency": 1, "num_blocks": 8, "max_model_len": 512}


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([{"prompt_len": 200, "output_len": 1}], "needs 13 blocks of 16 tokens but the pool has 7"),
        ([{"prompt_len": 0, "output_len": 1}], "request 0: prompt_len=0 must be at least 1"),
    ],
)
def test_bad_traces_end_with_one_sentence(requests, sentence, tmp_path):
    done = run("--trace", write(tmp_path / "bad.json", {**BAD, "requests": requests}))
    assert done.returncode == 1
    assert sentence in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--trace", "/nonexistent.json"), "No such file"),
        ((), "give one of --trace"),
        (("--workload=tiny_pool", "--watermark=1.5"), "watermark=1.5 is not a fraction"),
        (("--workload=tiny_pool", "--watermark=nan"), "watermark=nan is not a fraction"),
        (("--workload=tiny_pool", "--step_model=h900"), "step model 'h900' is neither a file"),
        (("--output_len=normal:3", "--num_blocks=9", "--rate=1"), "--output_len=normal:3 is none"),
        (("--output_len=constant:5", "--rate=1"), "needs --num_blocks"),
        (("--output_len=constant:5", "--num_blocks=99"), "give one of --concurrency"),
    ],
)
def test_bad_flags_end_with_one_sentence(arguments, sentence):
    done = run(*arguments)
    assert done.returncode == 1
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_draws_from_distributions():
    done = run(
        "--output_len=lognormal:50:1", "--prompt_len=uniform:10:90", "--num_requests=200",
        "--rate=40", "--num_blocks=600", "--watermark=0", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert report["requests"] == 200 and 40 * 200 < report["output_tokens"] < 160 * 200


def log_line(arrival, prompt_len=20, output_len=30, max_tokens=100):
    entry = {"arrival": arrival, "prompt_len": prompt_len, "output_len": output_len}
    return json.dumps({**entry, "max_tokens": max_tokens, "finish_reason": "stop"}) + "\n"


def test_replays_a_request_log(tmp_path):
    lines = [log_line(70.0), log_line(5.0), log_line(65.0, output_len=0), log_line(68.0)]
    path = write(tmp_path / "log.jsonl", "".join(lines) + log_line(69.0, max_tokens=None))
    whole = load_request_log(path, num_blocks=100, max_model_len=512)
    np.testing.assert_allclose(whole.arrivals, [0, 63, 64, 65])
    np.testing.assert_array_equal(whole.max_tokens, [100, 100, 492, 100])
    end = load_request_log(path, num_blocks=100, max_model_len=512, last_minutes=0.05)
    np.testing.assert_allclose(end.arrivals, [0, 1, 2])
    done = run("--request_log", path, "--num_blocks=100", "--max_model_len=512", "--watermark=0,.1")
    assert done.returncode == 0, done.stderr
    assert "the pool never fills" in done.stdout


@pytest.mark.parametrize("line", ["{}", "[1]", "5", "not json", '{"arrival": "x"}'])
def test_a_wrong_line_of_a_log_is_named(line, tmp_path):
    path = write(tmp_path / "log.jsonl", log_line(1.0) + line + "\n")
    with pytest.raises(ValueError, match=r"log\.jsonl:2 is not a JSON object"):
        load_request_log(path, num_blocks=100, max_model_len=512)


def test_an_empty_log_is_refused(tmp_path):
    path = write(tmp_path / "log.jsonl", log_line(1.0, output_len=0))
    with pytest.raises(ValueError, match="no request with output"):
        load_request_log(path, num_blocks=100, max_model_len=512)


TERMS = StepTimeModel(0.01, 2e-5, 3e-4, 1e-8)
METRICS = "".join(
    f'tidegate:step_time_seconds{{term="{term}"}} {value}\n'
    for term, value in zip(
        ("base", "prefill_token", "decode_seq", "context_token"), (0.01, 2e-5, 3e-4, 1e-8)
    )
)


def test_step_models_from_files(tmp_path):
    assert step_model_from("gb200") == PRESETS["gb200"]
    path = tmp_path / "model.json"
    save_step_model(TERMS, path)
    assert step_model_from(str(path)) == TERMS
    metrics = write(tmp_path / "metrics.txt", "vllm:num_preemptions_total 3.0\n" + METRICS)
    assert fit_from_metrics(metrics) == TERMS


@pytest.mark.parametrize("text", ["{", "[1]", '{"base": 1}', '{"base": "x"}'])
def test_wrong_step_model_files(text, tmp_path):
    with pytest.raises(ValueError, match="is not a JSON object with the numbers base"):
        step_model_from(write(tmp_path / "model.json", text))


def test_metrics_that_do_not_tell(tmp_path):
    path = write(tmp_path / "metrics.txt", "vllm:num_preemptions_total 3.0\n")
    with pytest.raises(ValueError, match="no tidegate:step_time_seconds"):
        fit_from_metrics(path)
    with pytest.raises(ValueError, match="not the text of a /metrics page"):
        fit_from_metrics(write(tmp_path / "other.txt", "<html> { what"))
    with pytest.raises(ValueError, match="cannot be read"):
        fit_from_metrics(str(tmp_path / "missing.txt"))
    with pytest.raises(ValueError, match="only a server on this machine"):
        fit_from_metrics("http://example.com/metrics")


class FakeServer(http.server.ThreadingHTTPServer):
    """Serves counters of an engine that is always busy and whose steps follow TERMS."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FakeMetrics)
        self.rng = np.random.default_rng(0)
        self.at = time.monotonic()
        self.counters = np.zeros(3)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/metrics"

    def text(self) -> str:
        now = time.monotonic()
        elapsed, self.at = now - self.at, now
        prefill, decodes = self.rng.choice([0.0, 0.0, 300.0]), self.rng.uniform(1, 60)
        steps = elapsed / TERMS.seconds(prefill, decodes, 0.25 * 1000 * 32)
        self.counters += steps * np.array([1.0, prefill + decodes, decodes])
        values = zip(
            ("tidegate:steps_total", "tidegate:scheduled_tokens_total",
             "vllm:generation_tokens_total", "vllm:num_requests_running",
             "vllm:kv_cache_usage_perc", "tidegate:kv_blocks",
             'vllm:cache_config_info{block_size="32"}'),
            (*self.counters, 5, 0.25, 1000, 1),
        )  # fmt: skip
        return "".join(f"{name} {float(value)}\n" for name, value in values)


class FakeMetrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.server.text().encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_watches_a_server_that_does_not_publish_the_terms():
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            model = fit_from_metrics(server.url, seconds=2.0, interval=0.05)
        finally:
            server.shutdown()
    # The context is always the same here, so its cost is part of the base.
    assert model.seconds(0, 0, 8000) == pytest.approx(TERMS.seconds(0, 0, 8000), rel=0.2)
    assert model.per_prefill_token == pytest.approx(TERMS.per_prefill_token, rel=0.2)
    assert model.per_decode_seq == pytest.approx(TERMS.per_decode_seq, rel=0.2)


def test_recommends_the_fewest_preemptions_at_full_throughput():
    workload = GENERATORS["tiny_pool"](n=60)
    reports = [simulate(workload, PRESETS["gb200"], watermark=w) for w in (0.0, 0.05, 0.9)]
    choice, reason = watermark_sweep.recommend(reports)
    best = max(report.output_tok_s for report in reports)
    assert choice.output_tok_s >= 0.995 * best
    assert choice.preemptions == min(
        report.preemptions for report in reports if report.output_tok_s >= 0.995 * best
    )
    assert f"{choice.output_tok_s:.0f} tok/s" in reason


@pytest.mark.parametrize("name", list(GENERATORS))
def test_named_workloads_are_valid_and_fixed(name):
    workload = GENERATORS[name]()
    again = GENERATORS[name]()
    np.testing.assert_array_equal(workload.output_lens, again.output_lens)
    assert workload.name == name and len(workload) >= 500
