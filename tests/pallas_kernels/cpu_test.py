"""The native CPU kernels against the shared suite, and what only they promise."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from kernel_suite import KernelSuite

from pallas_kernels import cpu


def _attend(q, k, v, pages, batch, spec, config, **scales):
    jitted = jax.jit(functools.partial(cpu.attend, spec=spec, config=config))
    return jitted(q, k, v, pages, batch, **scales)


class TestCpu(KernelSuite):
    """Under jit, as the engine runs it; the pages' functions as they are."""

    kernels = SimpleNamespace(**{**vars(cpu), "attend": _attend})
    skipped = frozenset({"fp8_kv", "fp8_kv_bf16"})

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
    @pytest.mark.parametrize("head_dim", [64, 80])
    def test_logical_round_trip(self, dtype, head_dim) -> None:
        super().test_logical_round_trip(dtype, head_dim)
