"""Times the attention kernels on the machine's accelerator, and tunes their block sizes on a TPU.

    python -m benchmarks.kernels                   # the built-in shapes
    python -m benchmarks.kernels --tune            # writes pallas_kernels/tpu_blocks.json
    python -m benchmarks.kernels --heads 32,8 --head_dim 128 --page_size 32 --rows 64 --context 2048

A tuned entry is keyed by chip and shape class (heads, head size, page size, types). The sizes of the
decode kernel are those that make its step fastest, and likewise those of the prefill kernel.

Calls are chained inside one program, each on the output of the one before, so that a time is the
kernel's own and not the host's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pallas_kernels import AttentionConfig, RaggedBatch, tpu_tables
from pallas_kernels.attention import implementation_module, resolve_implementation
from pallas_kernels.attention_types import KVCacheSpec
from pallas_kernels.batch import ragged_batch
from pallas_kernels.tpu_layout import layout_of

_TUNE = flags.DEFINE_bool("tune", False, "Search block sizes and write the table.")
_IMPLEMENTATION = flags.DEFINE_string("implementation", None, "By name; default by platform.")
_HEADS = flags.DEFINE_list("heads", ["32", "8"], "Query heads, KV heads.")
_HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Size of a head.")
_PAGE_SIZE = flags.DEFINE_integer("page_size", 32, "Tokens per page.")
_ROWS = flags.DEFINE_integer("rows", 32, "Decoding rows.")
_CONTEXT = flags.DEFINE_integer("context", 1024, "Tokens of context of each decoding row.")
_PROMPT = flags.DEFINE_integer("prompt", 2048, "Tokens of the prefill step's one row.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of queries.")
_KV_DTYPE = flags.DEFINE_enum(
    "kv_dtype", "bfloat16", ["bfloat16", "float32", "int8", "float8_e4m3fn"], "Of pages."
)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed programs; the median is reported.")
_CHAIN = flags.DEFINE_integer("chain", 16, "Calls in a row in one program.", lower_bound=1)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call to time: rows of (query length, context length)."""

    rows: tuple[tuple[int, int], ...]
    spec: KVCacheSpec
    num_q_heads: int
    dtype: str

    @property
    def config(self) -> AttentionConfig:
        decode = all(q_len == 1 for q_len, _ in self.rows)
        return AttentionConfig(self.spec.head_dim**-0.5, max_query_len=1 if decode else None)

    @property
    def page_bytes_read(self) -> int:
        """Bytes of live keys and values."""
        element = jnp.dtype(self.spec.dtype).itemsize
        tokens = sum(kv_len for _, kv_len in self.rows)
        return tokens * 2 * self.spec.num_kv_heads * self.spec.head_dim * element

    @property
    def flops(self) -> float:
        """Causal multiply-adds, counted twice."""
        pairs = sum(q * kv - q * (q - 1) / 2 for q, kv in self.rows)
        return 4.0 * pairs * self.num_q_heads * self.spec.head_dim

    def inputs(self) -> dict[str, Any]:
        """Random arguments of `ragged_paged_attention`; pages in shuffled order."""
        rng, size = np.random.default_rng(0), self.spec.page_size
        counts = [-(-kv_len // size) for _, kv_len in self.rows]
        order = iter(rng.permutation(np.arange(1, self.spec.num_pages)))
        table = np.zeros((len(self.rows), max(counts)), np.int32)
        for row, count in enumerate(counts):
            table[row, :count] = [next(order) for _ in range(count)]
        q_lens = [q_len for q_len, _ in self.rows]
        tokens = sum(q_lens)
        decodes = sum(q_len == 1 for q_len in q_lens)
        batch: RaggedBatch = ragged_batch(
            jnp.asarray(np.cumsum([0, *q_lens]), jnp.int32),
            jnp.asarray([kv_len for _, kv_len in self.rows], jnp.int32),
            jnp.asarray(table),
            jnp.asarray([len(self.rows)], jnp.int32),
            jnp.asarray([decodes], jnp.int32),
            num_tokens=tokens,
            page_size=size,
        )
        shape = (tokens, self.num_q_heads, self.spec.head_dim)
        q = jnp.asarray(rng.standard_normal(shape), self.dtype)
        scale = None
        if jnp.dtype(self.spec.dtype).itemsize == 1:
            scale = jnp.full(self.spec.num_kv_heads, 0.02, jnp.float32)
        return {"q": q, "batch": batch, "k_scale": scale, "v_scale": scale}


def workloads() -> list[Workload]:
    """The decode and the prefill step that the flags describe."""
    q_heads, kv_heads = (int(n) for n in _HEADS.value)
    found = []
    for rows in (((1, _CONTEXT.value),) * _ROWS.value, ((_PROMPT.value, _PROMPT.value),)):
        pages = 1 + sum(-(-kv_len // _PAGE_SIZE.value) for _, kv_len in rows)
        spec = KVCacheSpec(
            pages, _PAGE_SIZE.value, kv_heads, _HEAD_DIM.value, jnp.dtype(_KV_DTYPE.value)
        )
        found.append(Workload(rows, spec, q_heads, _DTYPE.value))
    return found


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of `call`, which returns arrays, after one call to compile."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_workload(work: Workload, implementation: str, repeats: int, chain: int) -> float:
    """Seconds of one attention call, of `chain` in a row."""
    module = implementation_module(implementation)
    inputs = work.inputs()
    pages = module.init_kv_pages(work.spec)

    def call_chain(q: jax.Array, pages: Any, rest: dict[str, Any]) -> jax.Array:
        def call(_: Any, q: jax.Array) -> jax.Array:
            return module.ragged_paged_attention(
                q=q, pages=pages, spec=work.spec, config=work.config, **rest
            )

        return jax.lax.fori_loop(0, chain, call, q)

    q, function = inputs.pop("q"), jax.jit(call_chain)
    return median_seconds(lambda: function(q, pages, inputs), repeats) / chain


def candidates(base: tpu_tables.Blocks, decode: bool) -> list[tpu_tables.Blocks]:
    """Block sizes worth timing for one of the two kernels, what is built in (`base`) first."""
    if decode:
        sizes = ((1, 128), (1, 256), (1, 512), (2, 512), (4, 512), (4, 1024), (8, 1024))
        varied = [
            dataclasses.replace(base, decode_bytes=n * 2**20, decode_keys=k) for n, k in sizes
        ]
    else:
        varied = [
            dataclasses.replace(base, tile_rows=t, step_rows=r, step_keys=k, prefill_heads=h)
            for t, r, k, h in itertools.product(
                (2048, 4096, 8192, 16384), (128, 256), (128, 256, 512), (1, 2)
            )
        ]
    return list(dict.fromkeys([base, *varied]))


def tune(
    works: Sequence[Workload],
    base: tpu_tables.Blocks,
    timed: Callable[[Workload], float],
) -> tpu_tables.Blocks:
    """Best sizes for the decode step and for the prefill step of `works`, joined.

    Args:
      works: a decode and a prefill step.
      base: the sizes that are varied.
      timed: seconds of a call, traced under the sizes in question. Candidates for which it raises
        JaxRuntimeError (too much VMEM) are passed over and named.

    Raises:
      RuntimeError: no candidate ran for one of the steps.
    """
    chosen = base
    for work in works:
        decode = work.config.max_query_len == 1
        kind = "decode" if decode else "prefill"
        best: tuple[float, tpu_tables.Blocks] | None = None
        for blocks in candidates(base, decode):
            with tpu_tables.use_blocks(blocks):
                try:
                    seconds = timed(work)
                except jax.errors.JaxRuntimeError as error:
                    print(f"passed over {blocks}: {str(error)[:120]}")
                    continue
            print(f"{kind} {seconds * 1e6:.0f} us {blocks}")
            if best is None or seconds < best[0]:
                best = (seconds, blocks)
        if best is None:
            raise RuntimeError(f"no block sizes ran for the {kind} step: see what was passed over")
        chosen = _joined(chosen, best[1], decode)
    return chosen


def _joined(chosen: tpu_tables.Blocks, found: tpu_tables.Blocks, decode: bool) -> tpu_tables.Blocks:
    """`chosen` with the decode kernel's sizes, or all but those, from `found`."""
    of_decode, of_prefill = (found, chosen) if decode else (chosen, found)
    return dataclasses.replace(
        of_prefill, decode_bytes=of_decode.decode_bytes, decode_keys=of_decode.decode_keys
    )


def write_table(chip: str, shape: str, blocks: tpu_tables.Blocks) -> None:
    """Adds or replaces one entry of tpu_tables.TABLE_FILE."""
    path = tpu_tables.TABLE_FILE
    entries = json.loads(path.read_text()) if path.exists() else []
    entries = [e for e in entries if (e["chip"], e["shape"]) != (chip, shape)]
    entries.append({"chip": chip, "shape": shape, "blocks": dataclasses.asdict(blocks)})
    path.write_text(json.dumps(sorted(entries, key=lambda e: (e["chip"], e["shape"])), indent=2))


def main(argv: Sequence[str]) -> None:
    del argv
    works = workloads()
    name = _IMPLEMENTATION.value or resolve_implementation(works[0].spec, works[0].config)
    if _TUNE.value:
        if jax.default_backend() != "tpu":
            raise app.UsageError(
                f"--tune needs a TPU, and JAX runs on {jax.default_backend()} here"
            )
        chip, layout = tpu_tables.current_chip(), layout_of(works[0].spec)
        shape = tpu_tables.shape_class(layout, works[0].num_q_heads, jnp.dtype(works[0].dtype))
        operands = "f32" if "float32" in (_DTYPE.value, _KV_DTYPE.value) else "bf16"
        base = tpu_tables.blocks_for(chip, operands)
        blocks = tune(
            works, base, lambda work: time_workload(work, name, _REPEATS.value, _CHAIN.value)
        )
        write_table(chip, shape, blocks)
        print(f"{chip} {shape}: {blocks} -> {tpu_tables.TABLE_FILE}")
        return
    for work in works:
        seconds = time_workload(work, name, _REPEATS.value, _CHAIN.value)
        kind = "decode" if work.config.max_query_len == 1 else "prefill"
        print(
            f"{name} {kind} {len(work.rows)} rows of {work.rows[0][1]}: {seconds * 1e6:.0f} us, "
            f"{work.page_bytes_read / seconds / 1e9:.1f} GB/s of keys and values, "
            f"{work.flops / seconds / 1e12:.2f} TFLOP/s"
        )


if __name__ == "__main__":
    app.run(main)
