"""The TPU kernels in the TPU interpreter: simulated copies and semaphores, races detected."""

import functools
from types import SimpleNamespace

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from kernel_suite import KernelSuite

from pallas_kernels import tpu

PARAMS = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait"
)
# Each program runs once or a few times: compiling it is what takes the time.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


def interpreted(function):
    """`function(*arrays, batch, spec[, config], **scales)` in the interpreter, free of races."""

    @functools.cache
    def compiled(static):
        return jax.jit(
            lambda arrays, batch, scales: function(*arrays, batch, *static, **scales),
            compiler_options=COMPILER_OPTIONS,
        )

    @functools.wraps(function)
    def call(*args, **scales):
        split = next(i for i, arg in enumerate(args) if hasattr(arg, "cu_q_lens"))
        with pltpu.force_tpu_interpret_mode(PARAMS):
            result = compiled(args[split + 1 :])(args[:split], args[split], scales)
            jax.block_until_ready(result)
        races = interpret_pallas_call.races
        assert races is not None and not races.races_found, "the interpreter found a data race"
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
