"""What this device reaches at best: copying memory, and multiplying matrices of random numbers."""

from __future__ import annotations

import platform

from benchmarks.gpu_check.section import Section, run, time_jax


def measure(section: Section) -> None:
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    section.put("device", device.device_kind)
    section.put("compute_capability", str(getattr(device, "compute_capability", "")))
    section.put("multiprocessors", getattr(device, "core_count", None))
    section.put("jax", jax.__version__)
    section.put("python", platform.python_version())
    stats = device.memory_stats() or {}
    section.put("memory_limit_gib", round(stats.get("bytes_limit", 0) / 2**30, 2))

    size = 1 << (20 if section.rehearse else 30)
    x = jnp.zeros((size,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + 1)
    seconds = time_jax(lambda: copy(x), repeats=10)
    section.put("copy_gb_per_s", round(2 * x.nbytes / seconds / 1e9, 1))

    n = 256 if section.rehearse else 8192
    a, b = jax.random.normal(jax.random.key(0), (2, n, n), jnp.bfloat16)
    seconds = time_jax(lambda: jnp.matmul(a, b), repeats=10)
    section.put("bf16_tflop_per_s", round(2 * n**3 / seconds / 1e12, 2))
    seconds = time_jax(lambda: copy(a[:1, :16]), repeats=100)
    section.put("dispatch_us", round(1e6 * seconds, 1))


if __name__ == "__main__":
    run(measure)
