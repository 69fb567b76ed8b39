"""The specification: the shared suite against itself, and against a softmax written out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_suite import KernelSuite

from pallas_kernels import reference
from pallas_kernels.testing import make_case


class TestReference(KernelSuite):
    kernels = reference


def test_one_query_by_hand() -> None:
    case = make_case([(1, 3)], num_q_heads=1, num_kv_heads=1, padding_tokens=0)
    out, pages = reference.attend(
        np.asarray(case.q), np.asarray(case.k), np.asarray(case.v), case.logical, *_static(case)
    )
    stored = pages[int(case.batch.page_indices[0, 0]), :3].astype(np.float64)
    key, value = stored[:, 0, 0], stored[:, 1, 0]
    weights = np.exp(key @ np.asarray(case.q, np.float64)[0, 0] / 8.0)
    np.testing.assert_allclose(out[0, 0], weights @ value / weights.sum(), rtol=1e-12)
    np.testing.assert_array_equal(stored[2, 0, 0], np.asarray(case.k)[0, 0])


def test_last_position_sees_only_itself_through_a_window_of_one() -> None:
    case = make_case([(4, 9)], sliding_window=1, padding_tokens=0)
    out, _ = reference.attend(
        np.asarray(case.q), np.asarray(case.k), np.asarray(case.v), case.logical, *_static(case)
    )
    np.testing.assert_allclose(out, np.repeat(np.asarray(case.v), 2, axis=1), rtol=1e-6)


def test_a_large_sink_takes_all_weight() -> None:
    case = make_case([(1, 9)], padding_tokens=0)
    sinks = np.full(4, 50.0, np.float32)
    out, _ = reference.attend(
        np.asarray(case.q),
        np.asarray(case.k),
        np.asarray(case.v),
        case.logical,
        *_static(case),
        sinks=sinks,
    )
    assert np.abs(out).max() < 1e-15


@pytest.mark.parametrize(
    ("value", "scale", "dtype", "stored"),
    [
        (2.5, 1.0, jnp.int8, 2.0),
        (3.5, 1.0, jnp.int8, 4.0),
        (1000.0, 2.0, jnp.int8, 127.0),
        (-1000.0, 2.0, jnp.int8, -128.0),
        (1e6, 1.0, jnp.float8_e4m3fn, 448.0),
        (3.0, 0.5, jnp.float8_e4m3fn, 6.0),
    ],
)
def test_quantize_rounds_to_even_and_saturates(value, scale, dtype, stored) -> None:
    got = reference.quantize(np.full((1, 1, 1), value), np.full(1, scale, np.float32), dtype)
    assert got.astype(np.float32).item() == stored


def _static(case):
    return case.batch, case.spec, case.config
