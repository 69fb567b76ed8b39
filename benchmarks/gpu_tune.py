"""Times tile sizes, warps and stages of the GPU kernels and prints entries for gpu_tables.

    python -m benchmarks.gpu_tune                  # decode and prefill, Llama 3's heads, bfloat16
    python -m benchmarks.gpu_tune --head_dim 256 --kv_dtype int8

Needs an NVIDIA GPU, unless --rehearse: then tiny shapes run in the interpreter and mean nothing.
Candidates whose result is wrong or that do not compile are passed over and named.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check import attention
from benchmarks.gpu_check.section import time_jax
from benchmarks.gpu_check.shapes import AttentionShape, attention_shape
from pallas_kernels import gpu, gpu_tables
from pallas_kernels.gpu_tables import Kind, Tiles

_MAX_ERROR = 0.05


def candidates(kind: Kind, rehearse: bool = False) -> list[Tiles]:
    """Tiles worth timing; the table's own entry is timed beside them."""
    if rehearse:
        return [Tiles(16, 16, 4, 2), Tiles(16, 32, 4, 2)]
    rows = (16,) if kind == "decode" else (64, 128)
    sizes = itertools.product(rows, (16, 32, 64, 128), (4, 8), (2, 3, 4))
    return [Tiles(*size) for size in sizes]


def _call(kind: Kind, shape: AttentionShape, kv_dtype: str) -> Any:
    """The call to time, newly traced so that it takes the tiles in force."""
    if kind == "decode":
        inputs = attention.decode_inputs(shape, kv_dtype, shape.rows, shape.context)
        return attention.attend_call(shape, inputs, 1)
    inputs = attention.prefill_inputs(shape, kv_dtype)
    return attention.attend_call(shape, inputs, None)


def tune(
    kind: Kind, shape: AttentionShape, kv_dtype: str, rehearse: bool = False
) -> tuple[Tiles, float]:
    """The fastest tiles and their seconds per call. Raises RuntimeError if none gave a result.

    Results are compared with those of the table's entry, which the shared suite covers.
    """
    itemsize = 4 if kv_dtype == "float32" else 2
    own = gpu_tables.tiles(kind, itemsize, shape.head_dim)
    best: tuple[Tiles, float] | None = None
    want = None
    for tiles in dict.fromkeys([own, *candidates(kind, rehearse)]):
        jax.clear_caches()
        with gpu_tables.override(**{kind: tiles}):
            try:
                call = _call(kind, shape, kv_dtype)
                got = jax.block_until_ready(call())
                seconds = time_jax(call, repeats=shape.repeats)
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                print(f"passed over {tiles}: {str(error).splitlines()[0][:120]}", flush=True)
                continue
        want = got if want is None else want
        error = float(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max())
        if not error <= _MAX_ERROR:
            print(f"passed over {tiles}: differs by {error:.3g} from the table's entry", flush=True)
            continue
        print(f"{kind} {seconds * 1e6:.1f} us {tiles}", flush=True)
        if best is None or seconds < best[1]:
            best = (tiles, seconds)
    if best is None:
        raise RuntimeError(f"no tiles of the {kind} kernel gave a result at {shape}")
    return best


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_tune", description=__doc__)
    parser.add_argument("--head_dim", type=int, default=None, help="size of a head")
    parser.add_argument("--kv_dtype", default="bfloat16", help="of the pages")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, interpreted")
    args = parser.parse_args(argv)
    on_gpu = jax.default_backend() == "gpu"
    if not (on_gpu or args.rehearse):
        parser.error(f"tuning needs an NVIDIA GPU, and JAX runs on {jax.default_backend()} here")
    shape = attention_shape(args.rehearse)
    if args.head_dim is not None:
        shape = dataclasses.replace(shape, head_dim=args.head_dim)
    itemsize = 4 if args.kv_dtype == "float32" else 2
    size = max(64, gpu_tables.padded_head_dim(shape.head_dim))
    entries = []
    with contextlib.nullcontext() if on_gpu else gpu.interpret_mode():
        for kind in ("decode", "prefill"):
            tiles, _ = tune(kind, shape, args.kv_dtype, args.rehearse)
            numbers = ", ".join(str(n) for n in dataclasses.astuple(tiles))
            entries.append(f'("{kind}", {itemsize}, {size}): Tiles({numbers}),')
    print(f"# compute capability {gpu_tables.compute_capability()}")
    print("\n".join(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
