"""The TPU kernels in the TPU interpreter: simulated copies and semaphores, races detected."""

import functools
from types import SimpleNamespace

import jax
from jax.experimental.pallas import tpu as pltpu
from kernel_suite import KernelSuite

from pallas_kernels import tpu

PARAMS = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait"
)


def interpreted(function):
    """`function` in the interpreter; fails on a data race."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call

        pltpu.reset_tpu_interpret_mode_state()
        with pltpu.force_tpu_interpret_mode(PARAMS):
            result = jax.block_until_ready(function(*args, **kwargs))
        races = interpret_pallas_call.races
        assert races is None or not races.races_found, "the interpreter found a data race"
        return result

    return call


class TestTpu(KernelSuite):
    kernels = SimpleNamespace(
        **{
            **vars(tpu),
            "attend": interpreted(tpu.attend),
            "kv_write": interpreted(tpu.kv_write),
            "ragged_paged_attention": interpreted(tpu.ragged_paged_attention),
        }
    )
