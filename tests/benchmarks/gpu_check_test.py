"""The check of a machine with one GPU, rehearsed on the CPU with tiny shapes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks.gpu_check.__main__ import SECTIONS

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.sh"


def _check(out, *arguments, timeout):
    """(exit code, results by section, report, output) of one run from another folder."""
    done = subprocess.run(
        [SCRIPT, "--rehearse", "--out", out, *arguments],
        cwd=out,
        env=dict(os.environ, PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    results = out / "results.json"
    found = json.loads(results.read_text())["sections"] if results.exists() else {}
    report = out / "report.md"
    text = report.read_text() if report.exists() else ""
    return done.returncode, found, text, done.stdout + done.stderr


def test_sections_measure_write_and_report(tmp_path):
    names = ["roofline", "serve_qwen3_0.6b"]
    # Asked for in another order: the script keeps its own.
    code, found, report, output = _check(
        tmp_path, "--sections", ",".join(reversed(names)), timeout=240
    )
    assert code == 0, output
    assert list(found) == names
    assert {name: section["status"] for name, section in found.items()} == dict.fromkeys(
        names, "done"
    )
    assert found["roofline"]["results"]["copy_gb_per_s"] > 0
    served = found["serve_qwen3_0.6b"]["results"]["concurrency_2"]
    assert served["output_tok_per_s"] > 0
    assert served["decode_step_ms"] >= served["decode_waiting_ms"]
    assert "A rehearsal on the CPU" in report
    assert all(f"## {name}" in report for name in names)


def test_what_the_budget_does_not_reach_is_skipped_by_name(tmp_path):
    code, found, report, output = _check(tmp_path, "--budget_s", "1", timeout=60)
    assert code == 0, output
    assert list(found) == list(SECTIONS)
    assert all("of the budget were left" in section["status"] for section in found.values())
    assert all(f"| {name} | skipped" in report for name in SECTIONS)


def test_a_section_that_fails_is_named_and_the_rest_runs(tmp_path):
    broken = tmp_path / "broken"
    (broken / "jax").mkdir(parents=True)
    (broken / "jax" / "__init__.py").write_text("raise ImportError('no jax here')\n")
    environment = dict(os.environ, PYTHON=sys.executable, PYTHONPATH=str(broken))
    # The checkout comes first on the path, and has no jax of its own.
    done = subprocess.run(
        [SCRIPT, "--rehearse", "--out", tmp_path, "--sections", "roofline,watermark"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    sections = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert done.returncode == 1
    assert list(sections) == ["roofline", "watermark"]
    assert all(s["status"].startswith("failed: exit code") for s in sections.values())
    assert "no jax here" in (tmp_path / "roofline.log").read_text()


def test_an_unknown_section_is_refused(tmp_path):
    code, found, _, output = _check(tmp_path, "--sections", "rooflines", timeout=60)
    assert code == 2
    assert not found
    assert "rooflines not among roofline, suite" in output


@pytest.mark.slow
def test_every_section_rehearses(tmp_path):
    code, found, _, output = _check(tmp_path, "--budget_s", "900", timeout=1000)
    assert code == 0, output
    assert list(found) == list(SECTIONS)
    # A machine without torch or transformers skips what needs them, and says so.
    for name, section in found.items():
        assert (
            section["status"] == "done"
            or "is not installed" in section["status"]
            or ("needs the section" in section["status"])
        ), (name, section["status"])
