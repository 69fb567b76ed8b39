"""The plain JAX implementation against the shared suite."""

import functools
from types import SimpleNamespace

import jax
from kernel_suite import KernelSuite

from pallas_kernels import xla


def _attend(q, k, v, pages, batch, spec, config, **scales):
    jitted = jax.jit(functools.partial(xla.attend, spec=spec, config=config))
    return jitted(q, k, v, pages, batch, **scales)


class TestXla(KernelSuite):
    """Under jit, as the engine runs it; the pages' functions as they are."""

    kernels = SimpleNamespace(**{**vars(xla), "attend": _attend})
