"""The TPU kernels in the TPU interpreter: simulated copies and semaphores, races detected."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxprs_in_params
from kernel_suite import KernelSuite

from benchmarks.tpu_cycle_model import decode_runs, prefill_runs
from pallas_kernels import reference, tpu, tpu_softmax, tpu_tables
from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.testing import Case, make_case

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
    # Every case compiles programs of its own, in seconds; these differ most.
    quick_cases = frozenset(
        {
            "mixed",
            "no_rows",
            "empty_rows",
            "gqa_3",
            "head_dim_256",
            "page_64",
            "sinks_window_cap",
            "sliding_window_decode",
            "bf16",
            "bf16_queries_f32_kv",
            "int8_kv_bf16",
            "fp8_kv",
        }
    )
    kernels = SimpleNamespace(
        **{
            **vars(tpu),
            "attend": interpreted(tpu.attend),
            "kv_write": interpreted(tpu.kv_write),
            "ragged_paged_attention": interpreted(tpu.ragged_paged_attention),
        }
    )


def attend(case: Case):
    """(out, pages) of one case in the interpreter."""
    return TestTpu().attend(case)


@pytest.mark.parametrize("window", [None, 140])
def test_many_grid_steps_tiles_and_blocks(monkeypatch, window) -> None:
    """Sizes so small that every loop and every hand-over between buffers is taken."""
    monkeypatch.setattr(tpu_tables, "_DECODE_ROWS", 2)
    blocks = tpu_tables.Blocks(
        decode_keys=128, tile_rows=64, step_rows=32, step_keys=128, prefill_keys=128
    )
    rows = [(1, 300), (1, 20), (1, 129), (1, 128), (1, 1), (50, 290), (20, 20), (30, 150)]
    case = make_case(rows, sliding_window=window)

    class Small(KernelSuite):
        kernels = SimpleNamespace(**{**vars(tpu), "attend": interpreted(tpu.attend)})

    with tpu_tables.use_blocks(blocks):
        Small().check(case)


def test_batch_invariant_output_has_the_same_bits_however_the_row_is_cut() -> None:
    whole = make_case([(1, 9), (24, 40)], batch_invariant=True, sliding_window=30)
    out, pages = attend(whole)
    logical = np.asarray(tpu.kv_pages_to_logical(pages, whole.spec))
    # The same row alone, its last token decoded: q of token 24 of the batch above.
    last = make_case(
        [(1, 40)], batch_invariant=True, sliding_window=30, num_pages=whole.spec.num_pages
    )
    batch = last.batch._replace(
        page_indices=whole.batch.page_indices[1:2].repeat(2, axis=0).at[1].set(0),
        slots=jnp.zeros_like(last.batch.slots),
    )
    again = TestTpu.kernels.ragged_paged_attention(
        jnp.zeros_like(last.q).at[0].set(whole.q[24]),
        tpu.kv_pages_from_logical(jnp.asarray(logical), whole.spec),
        batch,
        whole.spec,
        whole.config,
        k_scale=None,
        v_scale=None,
        sinks=None,
    )
    np.testing.assert_array_equal(np.asarray(again)[0], np.asarray(out)[24])


def _dots(jaxpr, found: list) -> list:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation)
        for inner in jaxprs_in_params(equation.params):
            _dots(inner, found)
    return found


@pytest.mark.parametrize("decode", [True, False])
def test_float32_queries_multiply_at_the_highest_precision(decode: bool) -> None:
    rows = [(1, 20), (1, 3)] if decode else [(5, 20)]
    case = make_case(rows, max_query_len=1 if decode else None)
    jaxpr = jax.make_jaxpr(
        lambda q, pages, batch: tpu.ragged_paged_attention(q, pages, batch, case.spec, case.config)
    )(case.q, tpu.init_kv_pages(case.spec), case.batch)
    dots = _dots(jaxpr.jaxpr, [])
    assert dots
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert all(equation.params["precision"] == highest for equation in dots)


@pytest.mark.parametrize(
    "rows",
    [[(1, 1000), (1, 513), (1, 0), (1, 128)], [(40, 200), (9, 9)], [(300, 700)]],
    ids=["decode", "prefill", "prefill_below_the_diagonal"],
)
def test_copies_and_products_are_those_of_the_cycle_model(monkeypatch, rows) -> None:
    """The kernels do what benchmarks.tpu_cycles counts: each live page once, no other product."""
    decode = all(q_len == 1 for q_len, _ in rows)
    case = make_case(rows, max_query_len=1 if decode else None, num_kv_heads=1)
    copies, products = [], []
    start, multiply = interpret_pallas_call.dma_start, tpu_softmax.Scoring.products

    def counting_start(*args, **kwargs):
        copies.append(1)
        return start(*args, **kwargs)

    def counting_products(self, q, keys):
        jax.debug.callback(lambda: products.append(keys.shape[0]))
        return multiply(self, q, keys)

    monkeypatch.setattr(interpret_pallas_call, "dma_start", counting_start)
    monkeypatch.setattr(tpu_softmax.Scoring, "products", counting_products)
    logical = reference.kv_write(
        np.asarray(case.k), np.asarray(case.v), case.logical, case.batch, case.spec
    )
    scales = {"k_scale": None, "v_scale": None, "sinks": None}
    interpreted(tpu.ragged_paged_attention)(
        case.q,
        tpu.kv_pages_from_logical(jnp.asarray(logical), case.spec),
        case.batch,
        case.spec,
        case.config,
        **scales,
    )
    jax.effects_barrier()
    blocks, layout = tpu_tables.blocks_for("v5p", "f32"), tpu.layout_of(case.spec)
    if decode:
        kv_lens, pages = [n for _, n in rows], tpu_tables.decode_pages(blocks, layout)
        runs = decode_runs(kv_lens, 16, pages)
        assert runs["pages"] == sum(-(-n // 16) for n in kv_lens)
        assert len(products) == runs["whole"] + runs["chunks"]
    else:
        sizes = tpu_tables.prefill_blocks(blocks, layout, num_tokens=case.q.shape[0], q_per_kv=4)
        runs = prefill_runs(
            rows,
            16,
            sizes.pages_per_block,
            sizes.tile_tokens,
            sizes.step_tokens,
            sizes.step_keys,
            1,
        )
        assert len(products) == runs["plain"] + runs["masked"]
    assert len(copies) == runs["pages"]


def test_copies_that_nobody_waits_for_are_found(monkeypatch) -> None:
    """The suite is awake: without its waits the kernel races, or computes on NaN."""
    monkeypatch.setattr("pallas_kernels.tpu_decode.wait_pages", lambda *args: None)
    case = make_case([(1, 20)], max_query_len=1)
    with pytest.raises(AssertionError, match=r"data race|finite"):
        TestTpu().check(case)
    pltpu.reset_tpu_interpret_mode_state()


SPEC = KVCacheSpec(4, 16, 2, 64, jnp.float32)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"page_size": 24}, NotImplementedError, "page_size=24.*16, 32, 64, 128 or 256"),
        ({"page_size": 512}, NotImplementedError, "page_size=512"),
        ({"head_dim": 512}, NotImplementedError, "head_dim=512.*at most 256"),
        ({"dtype": jnp.float16}, NotImplementedError, "dtype=float16"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads=0 must be at least 1"),
        ({"dtype": jnp.int32}, ValueError, "dtype=int32 is not one of"),
    ],
)
def test_what_is_not_served_is_named(changes, error, words) -> None:
    with pytest.raises(error, match=words):
        tpu.init_kv_pages(dataclasses.replace(SPEC, **changes))


def test_float16_queries_are_computed_in_float32() -> None:
    case = make_case([(1, 20), (5, 9)], q_dtype=jnp.float16)
    TestTpu().check(case)
    assert attend(case)[0].dtype == jnp.float16


@pytest.mark.parametrize("decode", [True, False])
def test_page_tables_beyond_scalar_memory_go_in_parts(monkeypatch, decode: bool) -> None:
    rows = [(1, 40), (1, 1), (1, 16), (1, 17), (1, 64)]
    rows += [] if decode else [(20, 20), (7, 45), (0, 0), (2, 2)]
    case = make_case(rows, max_query_len=1 if decode else None)
    width = case.batch.page_indices.shape[1]
    monkeypatch.setattr(tpu_tables, "SMEM_BYTES", 2 * width * 4 * 4 // 3 + 4)
    assert tpu_tables.table_rows(width) == 2

    class Fresh(KernelSuite):
        kernels = SimpleNamespace(**{**vars(tpu), "attend": interpreted(tpu.attend)})

    Fresh().check(case)


def test_a_row_beyond_scalar_memory_is_declined() -> None:
    case = make_case([(1, 20)], table_width=200_000)
    with pytest.raises(NotImplementedError, match="200000 pages per row, 800000 bytes"):
        tpu.ragged_paged_attention(
            case.q, tpu.init_kv_pages(case.spec), case.batch, case.spec, AttentionConfig(0.1)
        )
