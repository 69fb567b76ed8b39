"""The tuner of the GPU kernels, on the CPU."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_tune
from benchmarks.gpu_check.shapes import attention_shape
from pallas_kernels.gpu_tables import Tiles


@pytest.mark.slow  # compiles the interpreter's program of every candidate
def test_the_tuner_prints_a_table_entry_of_a_candidate(capsys):
    gpu_tune.main(["--rehearse"])
    lines = capsys.readouterr().out.splitlines()
    for kind in ("decode", "prefill"):
        timed = [line for line in lines if line.startswith(f"{kind} ")]
        assert len(timed) >= 2
        (entry,) = [line for line in lines if line.startswith(f'("{kind}", 2, 64): Tiles(')]
        fastest = min(timed, key=lambda line: float(line.split()[1]))
        numbers = [part.strip(" ),").split("=")[1] for part in fastest.split("(")[1].split(",")]
        assert entry.endswith(f"Tiles({', '.join(numbers)}),")


def test_tiles_that_give_wrong_results_are_passed_over(monkeypatch, capsys):
    wrong = Tiles(16, 16, 4, 2)

    def call(kind, shape, kv_dtype):
        is_wrong = gpu_tune.gpu_tables.tiles(kind, 2, 64) == wrong
        return lambda: jnp.full((4, 4), float(is_wrong))

    monkeypatch.setattr(gpu_tune, "_call", call)
    tiles, seconds = gpu_tune.tune("decode", attention_shape(True), "bfloat16", rehearse=True)
    assert tiles != wrong
    assert seconds > 0
    assert f"passed over {wrong}: differs by" in capsys.readouterr().out


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU is there")
def test_tuning_without_a_gpu_says_where_jax_runs(capsys):
    with pytest.raises(SystemExit):
        gpu_tune.main([])
    assert "needs an NVIDIA GPU, and JAX runs on cpu" in capsys.readouterr().err


def test_no_candidate_at_all_is_an_error(monkeypatch):
    def call(kind, shape, kv_dtype):
        raise ValueError("no such tiles")

    monkeypatch.setattr(gpu_tune, "_call", call)
    with pytest.raises(RuntimeError, match="no tiles of the decode kernel"):
        gpu_tune.tune("decode", attention_shape(True), "bfloat16", rehearse=True)
