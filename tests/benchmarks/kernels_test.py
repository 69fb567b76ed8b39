"""Timing kernels and tuning their block sizes; the search itself needs no TPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernels
from pallas_kernels import tpu_tables
from pallas_kernels.attention_types import KVCacheSpec

SPEC = KVCacheSpec(9, 16, 2, 64, jnp.float32)
DECODE = kernels.Workload(((1, 32), (1, 20)), SPEC, 4, "float32")
PREFILL = kernels.Workload(((24, 24),), SPEC, 4, "float32")


@pytest.fixture(autouse=True)
def fresh_table(monkeypatch, tmp_path):
    monkeypatch.setattr(tpu_tables, "TABLE_FILE", tmp_path / "blocks.json")
    tpu_tables._tuned.cache_clear()
    yield
    tpu_tables._tuned.cache_clear()


def test_each_kernel_takes_the_sizes_that_make_its_step_fastest() -> None:
    def timed(work: kernels.Workload) -> float:
        blocks = tpu_tables.blocks_for("v6e", "bf16")
        if work is DECODE:
            return abs(blocks.decode_keys - 256) + blocks.decode_bytes
        slow = abs(blocks.tile_rows - 8192) + abs(blocks.step_rows - 256)
        return slow + blocks.step_keys + blocks.prefill_heads

    base = tpu_tables.Blocks(step_rows=256)
    found = kernels.tune([DECODE, PREFILL], base, timed)
    assert found == dataclasses.replace(
        base, decode_bytes=2**20, decode_keys=256, tile_rows=8192, step_keys=128
    )


def test_sizes_that_do_not_compile_are_passed_over(capsys) -> None:
    def timed(work: kernels.Workload) -> float:
        blocks = tpu_tables.blocks_for("v6e", "bf16")
        if blocks.tile_rows > 4096:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem")
        return 1.0 / blocks.tile_rows

    assert kernels.tune([PREFILL], tpu_tables.Blocks(tile_rows=16384), timed).tile_rows == 4096
    assert "passed over" in capsys.readouterr().out


def test_a_step_that_nothing_runs_is_told() -> None:
    def timed(work: kernels.Workload) -> float:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: vmem")

    with pytest.raises(RuntimeError, match="no block sizes ran for the decode step"):
        kernels.tune([DECODE], tpu_tables.Blocks(), timed)


def test_what_is_written_is_what_the_kernels_take() -> None:
    first, second = tpu_tables.Blocks(decode_keys=256), tpu_tables.Blocks(decode_keys=1024)
    kernels.write_table("v6e", "mine", first)
    kernels.write_table("v5e", "mine", first)
    kernels.write_table("v6e", "mine", second)
    assert tpu_tables.blocks_for("v6e", "bf16", "mine") == second
    assert tpu_tables.blocks_for("v5e", "bf16", "mine") == first


@pytest.mark.parametrize("work", [DECODE, PREFILL])
def test_a_call_is_timed(work: kernels.Workload) -> None:
    assert 0 < kernels.time_workload(work, "xla", repeats=2, chain=2) < 5
