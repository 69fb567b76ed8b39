"""What every implementation of the kernel contract must do.

A test module per implementation subclasses KernelSuite, sets `kernels` (a module or object with the
contract's functions, without the `implementation` argument) and leaves out by name, in `skipped`,
what that implementation declines with NotImplementedError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import reference
from pallas_kernels.batch import decode_batch
from pallas_kernels.testing import Case, make_case

MIXED = [(1, 33), (1, 16), (1, 1), (1, 50), (20, 20), (7, 45), (2, 2)]
# Errors allowed by the queries' type, as a share of the largest value stored.
BOUNDS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 2e-2}
DECODE = [(1, 40), (1, 1), (1, 16), (1, 17), (1, 64)]

# name -> a call that builds the case. Every name says what is special about it.
CASES: dict[str, Callable[[], Case]] = {
    "mixed": lambda: make_case(MIXED),
    "decode_only": lambda: make_case(DECODE, max_query_len=1),
    "prefill_only": lambda: make_case([(16, 16), (5, 5), (33, 33)]),
    "chunked_prefill": lambda: make_case([(16, 48), (1, 100), (40, 70)]),
    "empty_rows": lambda: make_case([(1, 20), (0, 0), (12, 20), (0, 0), (3, 3)]),
    "row_without_queries": lambda: make_case([(1, 20), (0, 18), (12, 20)]),
    "many_padding_rows": lambda: make_case([(1, 9), (4, 9)], padding_rows=6, padding_tokens=11),
    "no_rows": lambda: make_case([], padding_rows=2, padding_tokens=8),
    "shared_prefix": lambda: make_case([(1, 70), (1, 60), (9, 80)], shared_pages=3),
    "mha": lambda: make_case(MIXED, num_q_heads=4, num_kv_heads=4),
    "mqa": lambda: make_case(MIXED, num_q_heads=8, num_kv_heads=1),
    "gqa_3": lambda: make_case(MIXED, num_q_heads=9, num_kv_heads=3),
    "gqa_7": lambda: make_case(MIXED, num_q_heads=14, num_kv_heads=2),
    "gqa_16": lambda: make_case(MIXED, num_q_heads=32, num_kv_heads=2),
    "head_dim_80": lambda: make_case(MIXED, head_dim=80),
    "head_dim_96": lambda: make_case(MIXED, head_dim=96),
    "head_dim_128": lambda: make_case(MIXED, head_dim=128),
    "head_dim_256": lambda: make_case(MIXED, head_dim=256),
    "page_32": lambda: make_case(MIXED, page_size=32),
    "page_64": lambda: make_case([(1, 130), (1, 64), (70, 129)], page_size=64),
    "page_128": lambda: make_case([(1, 130), (30, 129)], page_size=128),
    "page_256": lambda: make_case([(1, 300), (30, 270)], page_size=256),
    "sliding_window": lambda: make_case([(1, 90), (1, 5), (30, 80), (8, 8)], sliding_window=20),
    "sliding_window_1": lambda: make_case([(1, 40), (20, 40)], sliding_window=1),
    "sliding_window_decode": lambda: make_case(
        [(1, 90), (1, 5), (1, 20), (1, 21), (1, 36)], sliding_window=20, max_query_len=1
    ),
    "soft_cap": lambda: make_case(MIXED, soft_cap=2.0),
    "sinks": lambda: make_case(MIXED, sinks=True),
    "sinks_window_cap": lambda: make_case(
        [(1, 90), (30, 80)], sinks=True, sliding_window=33, soft_cap=5.0
    ),
    "bf16": lambda: make_case(MIXED, q_dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16),
    "bf16_decode": lambda: make_case(
        DECODE, q_dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16, head_dim=128, max_query_len=1
    ),
    "bf16_gqa_3": lambda: make_case(
        MIXED, q_dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16, num_q_heads=9, num_kv_heads=3
    ),
    "bf16_queries_f32_kv": lambda: make_case(MIXED, q_dtype=jnp.bfloat16),
    "f32_queries_bf16_kv": lambda: make_case(MIXED, kv_dtype=jnp.bfloat16),
    "int8_kv": lambda: make_case(MIXED, kv_dtype=jnp.int8),
    "int8_kv_bf16": lambda: make_case(
        MIXED, q_dtype=jnp.bfloat16, kv_dtype=jnp.int8, page_size=32, head_dim=128
    ),
    "fp8_kv": lambda: make_case(MIXED, kv_dtype=jnp.float8_e4m3fn),
    "fp8_kv_bf16": lambda: make_case(
        MIXED, q_dtype=jnp.bfloat16, kv_dtype=jnp.float8_e4m3fn, page_size=32, head_dim=128
    ),
}


@st.composite
def ragged_cases(draw: st.DrawFn) -> Case:
    """Small ragged batches that dwell on page boundaries and single tokens.

    All have one shape (and a window or none), so that they share two compiled programs.
    """
    page_size, num_tokens = 16, 64
    near_boundary = st.builds(
        lambda pages, off: max(1, pages * page_size + off), st.integers(0, 4), st.integers(-1, 1)
    )
    lengths = near_boundary | st.integers(1, 70)
    rows = [(1, kv_len) for kv_len in draw(st.lists(lengths, max_size=3))]
    left = num_tokens - len(rows)
    for q_len, kv_len in draw(st.lists(st.tuples(st.integers(0, 40), lengths), max_size=3)):
        q_len = min(q_len, kv_len, left)
        left -= q_len
        rows.append((q_len, kv_len))
    return make_case(
        rows,
        page_size=page_size,
        sliding_window=draw(st.sampled_from([None, 17])),
        shared_pages=draw(st.integers(0, 2)),
        padding_rows=7 - len(rows),
        padding_tokens=left,
        num_pages=40,
        table_width=6,
        seed=draw(st.integers(0, 2**16)),
    )


class KernelSuite:
    """The shared tests. `kernels` is what is tested."""

    kernels: ClassVar[ModuleType | Any]
    skipped: ClassVar[frozenset[str]] = frozenset()
    # Names of the cases that run by default; the others are marked slow. None is all.
    quick_cases: ClassVar[frozenset[str] | None] = None

    @pytest.fixture(params=list(CASES))
    def case(self, request: pytest.FixtureRequest) -> Case:
        if request.param in self.skipped:
            case = CASES[request.param]()
            with pytest.raises(NotImplementedError):
                self.attend(case)
            pytest.skip("declined with NotImplementedError")
        return CASES[request.param]()

    def pages_of(self, case: Case) -> Any:
        return self.kernels.kv_pages_from_logical(jnp.asarray(case.logical), case.spec)

    def attend(self, case: Case) -> tuple[Any, Any]:
        """What models call. Subclasses may wrap it, for example in jit."""
        return self.kernels.attend(
            case.q,
            case.k,
            case.v,
            self.pages_of(case),
            case.batch,
            case.spec,
            case.config,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            sinks=case.sinks,
        )

    def check(self, case: Case) -> None:
        """Output against the specification, pages against the pages it would leave."""
        out, pages = self.attend(case)
        assert out.shape == case.q.shape
        got = np.asarray(out).astype(np.float64)
        assert np.isfinite(got).all(), "padding tokens must be finite as well"
        logical = np.asarray(self.kernels.kv_pages_to_logical(pages, case.spec))
        check_pages(logical, case)
        # Attention is judged on the pages as this implementation stored them.
        want = reference.ragged_paged_attention(
            np.asarray(case.q),
            logical,
            case.batch,
            case.spec,
            case.config,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            sinks=case.sinks,
        )
        check_close(got[: case.num_tokens], want[: case.num_tokens], logical, case)

    def test_attend(self, case: Case) -> None:
        self.check(case)

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    )
    @given(case=ragged_cases())
    def test_ragged_shapes(self, case: Case) -> None:
        self.check(case)

    def test_write_then_attend_equals_attend(self) -> None:
        case = CASES["mixed"]()
        scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
        want, _ = self.attend(case)
        pages = self.kernels.kv_write(
            case.k, case.v, self.pages_of(case), case.batch, case.spec, **scales
        )
        check_pages(np.asarray(self.kernels.kv_pages_to_logical(pages, case.spec)), case)
        got = self.kernels.ragged_paged_attention(
            case.q, pages, case.batch, case.spec, case.config, **scales, sinks=case.sinks
        )
        n = case.num_tokens
        np.testing.assert_allclose(np.asarray(got)[:n], np.asarray(want)[:n], rtol=0, atol=2e-5)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
    @pytest.mark.parametrize("head_dim", [64, 80, 128])
    def test_logical_round_trip(self, dtype: Any, head_dim: int) -> None:
        case = make_case([(1, 20)], kv_dtype=dtype, head_dim=head_dim)
        back = np.asarray(self.kernels.kv_pages_to_logical(self.pages_of(case), case.spec))
        assert back.dtype == case.logical.dtype
        assert back.tobytes() == case.logical.tobytes()

    def test_fresh_pages_are_zero_and_sized(self) -> None:
        spec = make_case([(1, 20)]).spec
        pages = self.kernels.init_kv_pages(spec)
        logical = np.asarray(self.kernels.kv_pages_to_logical(pages, spec))
        assert logical.shape == (
            spec.num_pages,
            spec.page_size,
            2,
            spec.num_kv_heads,
            spec.head_dim,
        )
        assert not logical.any()
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
        assert stored == spec.num_pages * self.kernels.kv_page_bytes(spec)

    def test_decode_batch_skips_empty_rows(self) -> None:
        case = make_case(DECODE, max_query_len=1, padding_rows=0, padding_tokens=0)
        kv_lens = case.batch.kv_lens.at[jnp.array([1, 3])].set(0)
        batch = decode_batch(kv_lens, case.batch.page_indices, page_size=case.spec.page_size)
        out, _ = self.attend(dataclasses.replace(case, batch=batch))
        got = np.asarray(out)
        assert np.isfinite(got).all()
        want, _ = self.attend(case)
        live = [0, 2, 4]
        np.testing.assert_allclose(got[live], np.asarray(want)[live], rtol=0, atol=2e-5)


def check_pages(logical: np.ndarray, case: Case) -> None:
    """The new keys and values lie in their slots; nothing else changed, bit for bit."""
    want = reference.kv_write(
        np.asarray(case.k),
        np.asarray(case.v),
        case.logical,
        case.batch,
        case.spec,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    # The null page takes what padding tokens write.
    got_bits, want_bits = (np.ascontiguousarray(x[1:]).view(np.uint8) for x in (logical, want))
    if np.dtype(case.spec.dtype).itemsize > 1:
        np.testing.assert_array_equal(got_bits, want_bits)
        return
    written = np.zeros(logical.shape[:2], bool)
    slots = np.asarray(case.batch.slots)[: case.num_tokens]
    written[slots // case.spec.page_size, slots % case.spec.page_size] = True
    np.testing.assert_array_equal(got_bits[~written[1:]], want_bits[~written[1:]])
    # A division that rounds otherwise may land on the neighbouring code.
    got, near = (x[written].astype(np.float32) for x in (logical, want))
    assert np.isfinite(got).all()
    step = 1.0 if np.dtype(case.spec.dtype).kind == "i" else np.maximum(np.abs(near) / 8, 2**-9)
    assert (np.abs(got - near) <= step).all()
    assert (got != near).sum() <= 0.01 * got.size


def check_close(got: np.ndarray, want: np.ndarray, logical: np.ndarray, case: Case) -> None:
    """Largest error within BOUNDS of the largest value stored."""
    values = reference.dequantize(logical[:, :, 1], case.v_scale)
    top = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    bound = BOUNDS[case.q.dtype.name]
    error = np.abs(got - want).max(initial=0.0)
    assert error <= bound * max(top, 1.0), f"error {error:.3g} exceeds {bound} * {top:.3g}"
