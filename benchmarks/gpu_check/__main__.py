"""Runs the sections in their order of priority, each in a process of its own.

This process never imports jax or torch: each section has the whole GPU to itself. Results are
written after every section, so that what was measured survives whatever comes later.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import write_report

# name -> (module, least seconds worth starting it with, most seconds it may take).
SECTIONS: dict[str, tuple[str, float, float]] = {
    "roofline": ("roofline", 10, 45),
    "suite": ("suite", 20, 90),
    "attention": ("attention", 15, 60),
    "serve_qwen3_0.6b": ("serve", 30, 90),
    "serve_llama3_8b": ("serve", 40, 120),
    "attention_peers": ("attention_peers", 15, 45),
    "torch_sdpa": ("torch_sdpa", 10, 40),
    "transformers": ("transformers_batching", 30, 60),
    "transformers_same_weights": ("same_weights", 20, 60),
    "watermark": ("watermark", 30, 90),
    "command_buffers_off": ("serve", 30, 60),
}
# A section may need another one's results.
NEEDS = {"transformers_same_weights": "transformers"}
# Flags of single sections, beside the environment's own.
XLA_FLAGS = {"command_buffers_off": "--xla_gpu_enable_command_buffer="}


def main(argv: list[str]) -> int:
    """Returns 0 when every section that ran succeeded and none was cut off."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--out", default="gpu_check_results", help="folder for the results")
    parser.add_argument("--budget_s", type=float, default=360, help="seconds for all sections")
    parser.add_argument("--sections", default="", help="names, by comma; empty is all")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny shapes on the CPU, kernels interpreted"
    )
    args = parser.parse_args(argv)
    wanted = [name for name in args.sections.split(",") if name] or list(SECTIONS)
    unknown = sorted(set(wanted) - set(SECTIONS))
    if unknown:
        parser.error(f"--sections: {', '.join(unknown)} not among {', '.join(SECTIONS)}")
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    results: dict[str, Any] = {
        "rehearsal": args.rehearse,
        "budget_s": args.budget_s,
        "sections": {},
    }
    for name in [name for name in SECTIONS if name in wanted]:
        left = args.budget_s - (time.monotonic() - started)
        results["sections"][name] = run_section(name, out, left, args.rehearse, results["sections"])
        results["elapsed_s"] = round(time.monotonic() - started, 1)
        (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        write_report(results, out / "report.md")
        status = results["sections"][name]["status"]
        print(f"[{results['elapsed_s']:6.1f} s] {name}: {status}", flush=True)
    print(f"Results: {out / 'results.json'}, {out / 'report.md'}")
    bad = [s for s in results["sections"].values() if s["status"].startswith(("failed", "cut off"))]
    return 1 if bad else 0


def run_section(
    name: str, out: Path, left: float, rehearse: bool, done: dict[str, Any]
) -> dict[str, Any]:
    """Runs one section to its end, its limit or the budget's; keeps what it wrote until then."""
    module, least, most = SECTIONS[name]
    least = min(least, 3.0) if rehearse else least
    if left < least:
        return {"status": f"skipped: {left:.0f} s of the budget were left, it needs {least:.0f}"}
    need = NEEDS.get(name)
    if need and done.get(need, {}).get("status") != "done":
        return {"status": f"skipped: it needs the section {need}"}
    limit = min(left, most)
    path = out / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.gpu_check.{module}", name, str(path)]
    command += ["--rehearse"] if rehearse else []
    begun = time.monotonic()
    with open(out / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(name, out, rehearse),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
            status = "done" if code == 0 else f"failed: exit code {code}, see {name}.log"
        except subprocess.TimeoutExpired:
            # The section leads its own process group: nothing else is in it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"cut off after {limit:.0f} s; what it had measured is kept"
    found: dict[str, Any] = {}
    if path.exists():
        found = json.loads(path.read_text())
    if status == "done" and found.get("skipped"):
        status = f"skipped: {found['skipped']}"
    elif status == "done" and found.get("failures"):
        status = f"failed: {len(found['failures'])} checks, see {name}.json"
    return {"status": status, "seconds": round(time.monotonic() - begun, 1), "results": found}


def environment(name: str, out: Path, rehearse: bool) -> dict[str, str]:
    """The section's environment: where it finds earlier results, and how JAX takes memory."""
    env = dict(os.environ, GPU_CHECK_OUT=str(out))
    if importlib.util.find_spec("jaxtyping") is None:
        # Only annotations need it; a bare machine may lack it.
        stubs = Path(__file__).with_name("stubs")
        env["PYTHONPATH"] = f"{env.get('PYTHONPATH', '')}{os.pathsep}{stubs}".lstrip(os.pathsep)
    if rehearse:
        env["JAX_PLATFORMS"] = "cpu"
        env["CUDA_VISIBLE_DEVICES"] = ""
    if name in XLA_FLAGS:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {XLA_FLAGS[name]}".strip()
    if name.startswith(("torch", "transformers")) and name != "transformers_same_weights":
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return env


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
