"""Heads split over 8 virtual CPU devices, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import KVCacheSpec, tensor_parallel

PROGRAM = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec as P
from pallas_kernels import reference, tensor_parallel, tpu
from pallas_kernels.testing import make_case

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tp",))
for kv_heads, options in ((2, {"sinks": True}),):
    case = make_case(
        [(1, 20), (9, 20)], num_q_heads=16, num_kv_heads=kv_heads, head_dim=64, **options
    )
    pool = tensor_parallel.pool_kv_heads(kv_heads, 8)
    assert pool == 8
    spec = dataclasses.replace(case.spec, num_kv_heads=pool)
    copies = pool // kv_heads
    logical = np.repeat(case.logical, copies, axis=3)
    k, v = jnp.repeat(case.k, copies, axis=1), jnp.repeat(case.v, copies, axis=1)
    pages = jax.device_put(
        tpu.kv_pages_from_logical(jnp.asarray(logical), spec), NamedSharding(mesh, P(None, "tp"))
    )
    with tensor_parallel.split_heads(mesh, "tp"), pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(uninitialized_memory="nan")
    ):
        out, pages = jax.jit(
            lambda q, k, v, pages, batch, sinks: tpu.attend(
                q, k, v, pages, batch, spec, case.config, sinks=sinks
            ),
            compiler_options={"xla_backend_optimization_level": 0},
        )(case.q, k, v, pages, case.batch, case.sinks)
    want, stored = reference.attend(
        np.asarray(case.q), np.asarray(case.k), np.asarray(case.v), case.logical, case.batch,
        case.spec, case.config, sinks=case.sinks,
    )
    n = case.num_tokens
    error = np.abs(np.asarray(out)[:n] - want[:n]).max()
    assert error < 1e-5 * np.nanmax(np.abs(stored)), error
    got = np.asarray(tpu.kv_pages_to_logical(pages, spec))[1:]
    np.testing.assert_array_equal(got, np.repeat(stored, copies, axis=3)[1:])
    assert len(pages.sharding.device_set) == 8
    assert pages.addressable_shards[0].data.shape[1] == 1
print("equal")
"""


def test_eight_devices_give_what_one_gives() -> None:
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        # The interpreter blocks a thread per device at its barriers.
        "NPROC": "32",
    }
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=env,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")


@pytest.mark.parametrize(("heads", "devices", "pool"), [(8, 8, 8), (8, 4, 8), (2, 8, 8), (1, 4, 4)])
def test_pool_heads(heads: int, devices: int, pool: int) -> None:
    assert tensor_parallel.pool_kv_heads(heads, devices) == pool


def test_uneven_heads_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="6 KV heads cannot be split over 4 devices"):
        tensor_parallel.pool_kv_heads(6, 4)


def test_pages_that_do_not_divide_are_refused() -> None:
    class Axis:
        size = 4

    with pytest.raises(ValueError, match="num_kv_heads=6 does not divide over 4 devices"):
        tensor_parallel.local_spec(KVCacheSpec(4, 16, 6, 64, "float32"), Axis())
