"""The GPU kernels: the shared suite, in Pallas' interpreter where there is no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_suite import CASES, DECODE, MIXED, KernelSuite, check_close

from pallas_kernels import attention, gpu, gpu_tables, reference
from pallas_kernels.attention_types import KVCacheSpec
from pallas_kernels.batch import ragged_batch
from pallas_kernels.gpu_layout import is_split, value_offset
from pallas_kernels.gpu_prefill import max_tiles, tile_map
from pallas_kernels.testing import Case, lower_for_cuda, make_case

ON_GPU = jax.default_backend() == "gpu"
# The interpreter's program is compiled once and run once: most of the time goes into compiling.
FAST_COMPILE = None if ON_GPU else {"xla_backend_optimization_level": 0}
# Cases that differ from one that stays only in a size: left to `pytest -m slow` and real GPUs.
SLOW = {
    "gqa_7",
    "head_dim_96",
    "many_padding_rows",
    "page_64",
    "page_128",
    "prefill_only",
    "sliding_window_1",
    "bf16_gqa_3",
    "fp8_kv",
    "int8_kv",
}


@pytest.fixture(autouse=True)
def _interpreted():
    with contextlib.nullcontext() if ON_GPU else gpu.interpret_mode():
        yield


@functools.lru_cache(maxsize=8)
def _compiled(spec: KVCacheSpec, config: Any) -> Any:
    return jax.jit(
        functools.partial(gpu.attend, spec=spec, config=config), compiler_options=FAST_COMPILE
    )


class TestGpu(KernelSuite):
    kernels = gpu

    @pytest.fixture(
        params=[
            pytest.param(name, marks=pytest.mark.slow) if name in SLOW and not ON_GPU else name
            for name in CASES
        ]
    )
    def case(self, request: pytest.FixtureRequest) -> Case:
        return CASES[request.param]()

    def attend(self, case: Case) -> tuple[Any, Any]:
        scales = {"k_scale": case.k_scale, "v_scale": case.v_scale, "sinks": case.sinks}
        attend = _compiled(case.spec, case.config)
        return attend(case.q, case.k, case.v, self.pages_of(case), case.batch, **scales)


def _attend(case: Case) -> tuple[np.ndarray, np.ndarray]:
    out, pages = TestGpu().attend(case)
    return np.asarray(out), np.asarray(gpu.kv_pages_to_logical(pages, case.spec))


def _check(case: Case) -> None:
    out, logical = _attend(case)
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
    used = slice(0, case.num_tokens)
    check_close(out[used].astype(np.float64), want[used], logical, case)


@pytest.mark.parametrize("max_query_len", [1, None])
def test_long_contexts_are_split_over_programs(max_query_len, monkeypatch) -> None:
    # Rows that use no split, one, some and all of them; the merge adds the sinks.
    monkeypatch.setattr("pallas_kernels.gpu_decode.MIN_SPLIT", 32)
    rows = [(1, 5), (1, 32), (1, 33), (1, 300)]
    rows += [] if max_query_len == 1 else [(3, 70)]
    case = make_case(
        rows, max_query_len=max_query_len, sinks=True, sliding_window=200, padding_tokens=1
    )
    monkeypatch.setattr(gpu_tables, "num_splits", lambda *_: 4)
    _compiled.cache_clear()
    jax.clear_caches()
    try:
        _check(case)
    finally:
        _compiled.cache_clear()
        jax.clear_caches()


def test_batch_invariant_rows_do_not_depend_on_their_batch() -> None:
    mixed = make_case([(1, 33), (9, 40), (20, 20)], batch_invariant=True, q_dtype=jnp.bfloat16)
    together, _ = _attend(mixed)
    batch = mixed.batch
    # The second row alone, its nine tokens in two steps, in a batch of other width.
    start, end = 1, 10
    pages = gpu.kv_pages_from_logical(jnp.asarray(mixed.logical), mixed.spec)
    for first, last in ((start, start + 4), (start + 4, end)):
        alone = ragged_batch(
            jnp.asarray([0, last - first], jnp.int32),
            batch.kv_lens[1:2] - (end - last),
            batch.page_indices[1:2],
            jnp.ones(1, jnp.int32),
            jnp.zeros(1, jnp.int32),
            num_tokens=8,
            page_size=mixed.spec.page_size,
        )
        pad = 8 - (last - first)
        q, k, v = (
            jnp.pad(x[first:last], ((0, pad), (0, 0), (0, 0))) for x in (mixed.q, mixed.k, mixed.v)
        )
        out, pages = _compiled(mixed.spec, mixed.config)(q, k, v, pages, alone)
        got = np.asarray(out)[: last - first]
        np.testing.assert_array_equal(got.view(np.uint16), together[first:last].view(np.uint16))


def test_tile_map_covers_every_token_once() -> None:
    case = make_case([(1, 9), (1, 4), (20, 20), (0, 0), (7, 30), (8, 8)], padding_tokens=5)
    tokens, block_q = case.q.shape[0], 8
    tiles = np.asarray(tile_map(case.batch, 2, num_tokens=tokens, block_q=block_q))
    assert len(tiles) == max_tiles(tokens, case.batch.kv_lens.shape[0], block_q)
    taken = [
        (row, token, position + token - start)
        for row, start, end, position in tiles
        for token in range(start, min(start + block_q, end))
    ]
    assert sorted(token for _, token, _ in taken) == list(range(2, tokens))
    positions, cu = np.asarray(case.batch.positions), np.asarray(case.batch.cu_q_lens)
    for row, token, position in taken:
        if token < case.num_tokens:
            assert cu[row] <= token < cu[row + 1]
            assert position == positions[token]
        else:
            assert position < 0  # sees no context


@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
def test_float16_queries_and_pages(rows) -> None:
    max_query_len = 1 if rows is DECODE else None
    case = make_case(rows, q_dtype=jnp.float16, kv_dtype=jnp.float16, max_query_len=max_query_len)
    out, logical = _attend(case)
    want = reference.ragged_paged_attention(
        np.asarray(case.q), logical, case.batch, case.spec, case.config
    )
    got = out[: case.num_tokens].astype(np.float64)
    top = np.nanmax(np.abs(logical[:, :, 1].astype(np.float64)))
    # Three more bits than bfloat16, whose bound in the shared suite is 2e-2.
    assert np.abs(got - want[: case.num_tokens]).max() <= 2e-2 / 8 * top


def test_one_byte_pages_beyond_signed_offsets_are_two_arrays() -> None:
    spec = KVCacheSpec(1 << 15, 16, 8, 128, jnp.int8)  # 2**30 bytes
    assert not is_split(spec)
    middle = dataclasses.replace(spec, num_pages=3 << 15)
    assert is_split(middle)
    assert value_offset(middle) == 0
    assert not is_split(dataclasses.replace(middle, dtype=jnp.bfloat16))
    assert not is_split(dataclasses.replace(spec, num_pages=5 << 15))


def test_two_arrays_give_the_same_attention(monkeypatch) -> None:
    case = make_case(MIXED[:3] + MIXED[5:6], kv_dtype=jnp.int8)
    want, want_pages = _attend(case)
    monkeypatch.setattr("pallas_kernels.gpu_layout.is_split", lambda spec: True)
    _compiled.cache_clear()
    got, got_pages = _attend(case)
    _compiled.cache_clear()
    assert len(gpu.init_kv_pages(case.spec)) == 2
    np.testing.assert_array_equal(got[: case.num_tokens], want[: case.num_tokens])
    np.testing.assert_array_equal(got_pages[1:], want_pages[1:])


@pytest.mark.parametrize(
    ("capability", "dtype", "words"),
    [
        (75, jnp.bfloat16, "7.5.*8.0"),
        (80, jnp.float8_e4m3fn, "8.0.*8.9"),
    ],
)
def test_what_a_gpu_cannot_do_is_declined_with_the_reason(capability, dtype, words) -> None:
    case = make_case(DECODE)
    spec = dataclasses.replace(case.spec, dtype=dtype)
    with gpu_tables.target(capability), pytest.raises(NotImplementedError, match=words):
        gpu.attend(case.q, case.k, case.v, (), case.batch, spec, case.config)


def test_pages_that_are_declined_are_passed_over_with_one_warning(caplog) -> None:
    spec = make_case(DECODE).spec
    attention._resolve.cache_clear()
    with gpu_tables.target(70):
        assert attention.resolve_implementation(spec, platform="gpu") == "xla"
        assert attention.resolve_implementation(spec, platform="gpu") == "xla"
    (record,) = caplog.records
    assert "gpu" in record.message
    assert "compute capability 7.0" in record.message
    attention._resolve.cache_clear()
    with gpu_tables.target(80):
        assert attention.resolve_implementation(spec, platform="gpu") == "gpu"
    attention._resolve.cache_clear()


def test_head_sizes_beyond_the_tables_are_declined() -> None:
    spec = dataclasses.replace(make_case(DECODE).spec, head_dim=512)
    with pytest.raises(NotImplementedError, match="head_dim=512"):
        gpu.kv_page_bytes(spec)


def test_wrong_shapes_are_the_callers_error() -> None:
    case = make_case(DECODE)
    pages = gpu.init_kv_pages(case.spec)
    with pytest.raises(ValueError, match="3 query heads"):
        gpu.ragged_paged_attention(case.q[:, :3], pages, case.batch, case.spec, case.config)
    with pytest.raises(ValueError, match="k of shape"):
        gpu.kv_write(case.k[:, :1], case.v, pages, case.batch, case.spec)


@pytest.mark.parametrize("name", ["mixed", "bf16_decode", "int8_kv_bf16", "sinks_window_cap"])
def test_kernels_lower_for_cuda_without_a_device(name) -> None:
    """The Triton dialect accepts the kernels; what it makes of them, benchmarks.gpu_aot shows."""
    case = CASES[name]()
    pages = gpu.kv_pages_from_logical(case.logical, case.spec)
    step = jax.jit(
        functools.partial(gpu.attend, spec=case.spec, config=case.config), donate_argnums=(3,)
    )
    with gpu.interpret_mode(False):
        text = lower_for_cuda(
            step,
            case.q,
            case.k,
            case.v,
            pages,
            case.batch,
            k_scale=case.k_scale,
            v_scale=case.v_scale,
            sinks=case.sinks,
        )
    calls = [line for line in text.splitlines() if "gpu.triton" in line]
    decode_only = case.config.max_query_len == 1
    assert len(calls) == (2 if decode_only else 3)
    # The pages and, in a mixed step, the other kernel's output are updated in place.
    assert sum("output_operand_alias" in call for call in calls) == (1 if decode_only else 2)


def test_splits_fill_the_device_and_no_more() -> None:
    with gpu_tables.target(90):
        assert gpu_tables.num_splits(128, 8, 8192) == 1
        assert gpu_tables.num_splits(1, 8, 8192) == 16
        assert gpu_tables.num_splits(1, 8, 256) == 1
        assert gpu_tables.num_splits(128, 8, 131072) == 16
        assert gpu_tables.num_splits(1, 1, 1 << 20) == 64


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_generation_has_tiles(capability) -> None:
    with gpu_tables.target(capability):
        for kind in ("decode", "prefill"):
            for itemsize in (2, 4):
                for head_dim in (32, 64, 80, 96, 128, 192, 256):
                    tiles = gpu_tables.tiles(kind, itemsize, head_dim)
                    assert tiles.block_m >= 16 and tiles.block_n >= 16
