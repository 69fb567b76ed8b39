"""The shared kernel suite on this device; with pytest where it is installed.

Without pytest and hypothesis, the same comparison runs over a fixed list of cases.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.section import Section, run

ROOT = Path(__file__).resolve().parents[2]


def measure(section: Section) -> None:
    missing = [
        name
        for name in ("pytest", "hypothesis", "pytest_timeout")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        section.put("how", f"fixed cases, because {', '.join(missing)} is not installed")
        _fixed_cases(section)
    else:
        section.put("how", "pytest tests/pallas_kernels/gpu_test.py")
        _pytest(section)


def _pytest(section: Section) -> None:
    command = [sys.executable, "-m", "pytest", "tests/pallas_kernels/gpu_test.py", "-q"]
    command += ["-p", "no:cacheprovider", "-m", "slow or not slow"]
    if section.rehearse:
        command += ["-k", "row_without_queries or fresh or splits or generation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    tail = done.stdout.strip().splitlines()[-1:] or [""]
    section.put("summary", tail[0])
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", tail[0])
    }
    section.put("counts", counts)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode or not counts.get("passed"):
        section.put("failures", failed or [f"pytest ended with exit code {done.returncode}"])


def _fixed_cases(section: Section) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import gpu, reference
    from pallas_kernels.testing import make_case

    mixed = [(1, 33), (1, 16), (1, 1), (1, 50), (20, 20), (7, 45), (2, 2)]
    bf16: dict[str, Any] = {"q_dtype": jnp.bfloat16, "kv_dtype": jnp.bfloat16}
    cases: dict[str, dict[str, Any]] = {
        "mixed": {},
        "bf16": bf16,
        "bf16 d80": bf16 | {"head_dim": 80},
        "bf16 d96": bf16 | {"head_dim": 96},
        "bf16 d128": bf16 | {"head_dim": 128},
        "bf16 d256": bf16 | {"head_dim": 256},
        "gqa 3": bf16 | {"num_q_heads": 9, "num_kv_heads": 3},
        "window, cap, sinks": {"sliding_window": 20, "soft_cap": 5.0, "sinks": True},
        "int8": {"q_dtype": jnp.bfloat16, "kv_dtype": jnp.int8},
        "fp8": {"q_dtype": jnp.bfloat16, "kv_dtype": jnp.float8_e4m3fn},
        "page 64": bf16 | {"page_size": 64},
    }
    if section.rehearse:
        cases = {"mixed": {}}
    failures = []
    interpreted = contextlib.nullcontext() if _on_gpu() else gpu.interpret_mode()
    with interpreted:
        for name, options in cases.items():
            case = make_case(mixed, **options)
            pages = gpu.kv_pages_from_logical(jnp.asarray(case.logical), case.spec)
            scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
            try:
                out, pages = gpu.attend(
                    case.q,
                    case.k,
                    case.v,
                    pages,
                    case.batch,
                    case.spec,
                    case.config,
                    sinks=case.sinks,
                    **scales,
                )
                jax.block_until_ready(out)
            except NotImplementedError as reason:
                section.put(name, f"declined: {reason}")
                continue
            logical = np.asarray(gpu.kv_pages_to_logical(pages, case.spec))
            want = reference.ragged_paged_attention(
                np.asarray(case.q),
                logical,
                case.batch,
                case.spec,
                case.config,
                sinks=_host(case.sinks),
                **{name: _host(scale) for name, scale in scales.items()},
            )
            got = np.asarray(out).astype(np.float64)
            error = float(np.abs(got - want)[: case.num_tokens].max())
            bound = 1e-4 if case.q.dtype == jnp.float32 else 0.1
            section.put(name, {"max_error": error, "bound": bound})
            if not (np.isfinite(got).all() and error <= bound):
                failures.append(name)
    if failures:
        section.put("failures", failures)


def _host(array: Any) -> Any:
    import numpy as np

    return None if array is None else np.asarray(array)


def _on_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


if __name__ == "__main__":
    run(measure)
