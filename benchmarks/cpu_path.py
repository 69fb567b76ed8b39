"""Times the CPU path piece by piece: memory bandwidth, matrix products, attention, whole steps.

    python -m benchmarks.cpu_path bandwidth dots
    python -m benchmarks.cpu_path decode prefill --dtype=float32,bfloat16,int8 --kernels=native,xla
    python -m benchmarks.cpu_path pool

Weights are random in SmolLM2-135M's shape, so nothing is downloaded. A decode step is everything
between tokens in and greedy tokens out, on a pool of KV pages for 16384 tokens. Figures are the
fastest and the median of the repetitions, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig
from models.linear import Linear
from models.transformer import Transformer, parameter_bytes
from pallas_kernels import (
    AttentionConfig,
    KVCacheSpec,
    attend,
    cpu_build,
    decode_batch,
    init_kv_pages,
    ragged_batch,
    resolve_implementation,
)

SMOLLM2_135M = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    tie_embeddings=True,
)
PAGE_SIZE = 16


def measure(call: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Fastest and median milliseconds of `repeat` calls, after one for free."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), float(np.median(times))


def bandwidth(repeat: int) -> float:
    """Bytes per second at which all threads together read 512 MiB, as the native product does."""
    size = 2**27
    layer = Linear(1024, size // 1024, dtype=jnp.float32)
    x = jnp.ones((1, 1024), jnp.float32)
    graph, state = nnx.split(layer)
    step = jax.jit(lambda state, x: nnx.merge(graph, state)(x).max())
    best, _ = measure(lambda: step(state, x), repeat)
    return 4 * size / best * 1e3


def layer_of(settings: str, rows: int):
    """(dtype of activations, quantization) of a name: float32, bfloat16 or int8."""
    del rows
    if settings == "int8":
        return jnp.bfloat16, "int8"
    return jnp.dtype(settings), None


def dots(settings: str, rows: int, repeat: int) -> None:
    """[rows, 576] x [576, 3072], 30 different weights, so that they come from memory."""
    dtype, quantization = layer_of(settings, rows)
    layers = nnx.List(Linear(576, 3072, dtype=dtype, quantization=quantization) for _ in range(30))
    graph, state = nnx.split(layers)
    x = jnp.ones((rows, 576), dtype)

    @jax.jit
    def run(state, x):
        for layer in nnx.merge(graph, state):
            x = x + 0 * layer(x)[:, :576]
        return x

    best, median = measure(lambda: run(state, x), repeat)
    size = sum(a.nbytes for a in jax.tree.leaves(state)) / 30
    print(
        f"dot {settings:9} rows {rows:4}: {best / 30:7.3f} ms (median {median / 30:.3f}), "
        f"{size / best * 30 / 1e6:5.1f} GB/s, {2 * rows * 576 * 3072 * 30 / best / 1e6:5.0f} GFLOP/s"
    )


class Bench:
    """A random model and its pages."""

    def __init__(self, settings: str, pool_tokens: int, kv_dtype: str | None = None):
        self.dtype, quantization = layer_of(settings, 1)
        self.settings = settings
        config = SMOLLM2_135M
        self.model = Transformer(config, dtype=self.dtype, quantization=quantization)
        rng = np.random.default_rng(0)
        for _, param in nnx.iter_graph(self.model):
            if isinstance(param, nnx.Param) and param.ndim > 1:
                if param.dtype == jnp.int8:
                    value = rng.integers(-127, 128, param.shape, dtype=np.int8)
                else:
                    value = rng.standard_normal(param.shape, np.float32) * 0.05
                param[...] = jnp.asarray(value, param.dtype)
        self.graph, self.state = nnx.split(self.model)
        self.bytes = parameter_bytes(self.model)
        self.spec = KVCacheSpec(
            pool_tokens // PAGE_SIZE + 1,
            PAGE_SIZE,
            config.num_kv_heads,
            config.head_dim,
            jnp.dtype(kv_dtype or self.dtype),
        )
        self.implementation = resolve_implementation(self.spec)
        self.pages = [
            init_kv_pages(self.spec, implementation=self.implementation)
            for _ in range(config.num_layers)
        ]

    def _run(self, state, tokens, batch, pages, max_query_len):
        model = nnx.merge(self.graph, state)
        hidden, pages = model(
            tokens,
            batch,
            pages,
            spec=self.spec,
            max_query_len=max_query_len,
            implementation=self.implementation,
        )
        last = hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)]
        return jnp.argmax(model.logits(last), axis=-1), pages

    def time(self, tokens, batch, max_query_len, repeat) -> tuple[float, float, float]:
        """(fastest, median, compile time) of a step, in ms, ms, s."""
        start = time.perf_counter()
        step = (
            jax.jit(self._run, static_argnums=4, donate_argnums=3)
            .lower(self.state, tokens, batch, self.pages, max_query_len)
            .compile()
        )
        compiled = time.perf_counter() - start

        def call():
            out, self.pages = step(self.state, tokens, batch, self.pages)
            return out

        return *measure(call, repeat), compiled

    def decode(self, rows: int, context: int, repeat: int) -> tuple[float, float, float]:
        """One token for each of `rows` sequences of `context` tokens."""
        width = -(-8192 // PAGE_SIZE)
        used = -(-context // PAGE_SIZE)
        table = np.zeros((rows, width), np.int32)
        table[:, :used] = 1 + np.arange(rows * used).reshape(rows, used) % (self.spec.num_pages - 1)
        batch = decode_batch(
            jnp.full(rows, context, jnp.int32), jnp.asarray(table), page_size=PAGE_SIZE
        )
        return self.time(jnp.ones(rows, jnp.int32), batch, 1, repeat)

    def prefill(self, tokens: int, repeat: int) -> tuple[float, float, float]:
        """One prompt of `tokens` tokens in one step."""
        table = np.zeros((1, -(-8192 // PAGE_SIZE)), np.int32)
        used = -(-tokens // PAGE_SIZE)
        table[0, :used] = 1 + np.arange(used)
        lengths = jnp.asarray([tokens], jnp.int32)
        batch = ragged_batch(
            jnp.asarray([0, tokens], jnp.int32),
            lengths,
            jnp.asarray(table),
            jnp.asarray([1], jnp.int32),
            jnp.asarray([0], jnp.int32),
            num_tokens=tokens,
            page_size=PAGE_SIZE,
        )
        return self.time(jnp.ones(tokens, jnp.int32), batch, None, repeat)


def attention(settings: str, rows: int, context: int, repeat: int) -> None:
    """One layer's attention of a decode step, 30 times over different pages."""
    dtype, _ = layer_of(settings, rows)
    used = -(-context // PAGE_SIZE)
    spec = KVCacheSpec(30 * rows * used + 1, PAGE_SIZE, 3, 64, dtype)
    name = resolve_implementation(spec)
    pages = init_kv_pages(spec, implementation=name)
    tables = 1 + np.arange(30 * rows * used, dtype=np.int32).reshape(30, rows, used)
    lengths = jnp.full(rows, context, jnp.int32)
    batches = [decode_batch(lengths, jnp.asarray(t), page_size=PAGE_SIZE) for t in tables]
    config = AttentionConfig(sm_scale=0.125, max_query_len=1)
    q, k, v = (jnp.ones((rows, heads, 64), dtype) for heads in (9, 3, 3))

    def run(pages, q, batches):
        for batch in batches:
            out, pages = attend(q, k, v, pages, batch, spec, config, implementation=name)
            q = q + 0 * out
        return q, pages

    step = jax.jit(run, donate_argnums=0)
    held = [pages]

    def call():
        out, held[0] = step(held[0], q, batches)
        return out

    best, median = measure(call, repeat)
    size = 30 * rows * context * 2 * 3 * 64 * dtype.itemsize
    print(
        f"attention {name} {settings:9} rows {rows:3} context {context:5}: {best / 30:7.3f} ms a "
        f"layer (median {median / 30:.3f}), {size / best / 1e6:5.1f} GB/s"
    )


def main() -> None:
    """Runs the parts named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parts = ("bandwidth", "dots", "attention", "decode", "prefill", "pool")
    parser.add_argument("parts", nargs="*", default=["bandwidth", "decode"], choices=parts)
    parser.add_argument("--dtype", default="float32,bfloat16,int8")
    parser.add_argument("--kernels", default="native", help="native, xla or both")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--tokens", default="128,512,2048")
    parser.add_argument("--kv_dtype", help="of keys and values; default that of the activations")
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    rows = [int(r) for r in args.rows.split(",")]
    for kernels in args.kernels.split(","):
        cpu_build.set_mode(kernels)
        print(f"-- {kernels} kernels")
        run_parts(args, rows)


def run_parts(args: argparse.Namespace, rows: list[int]) -> None:
    """Every part asked for, with the kernels chosen."""
    if "bandwidth" in args.parts:
        print(f"memory: {bandwidth(args.repeat) / 1e9:.1f} GB/s")
    for settings in args.dtype.split(","):
        if "dots" in args.parts:
            for m in rows:
                dots(settings, m, args.repeat)
        if "attention" in args.parts:
            for m in rows:
                attention(settings, m, args.context, args.repeat)
        if "decode" in args.parts:
            bench = Bench(settings, 16384, args.kv_dtype)
            for m in rows:
                best, median, compiled = bench.decode(m, args.context, args.repeat)
                print(
                    f"decode {bench.implementation} {settings:9} rows {m:3} context {args.context}: "
                    f"{best:7.2f} ms (median {median:.2f}), {1e3 * m / best:6.1f} tok/s, weights "
                    f"at {bench.bytes / best / 1e6:.1f} GB/s, compiled in {compiled:.1f} s",
                    flush=True,
                )
        if "prefill" in args.parts:
            bench = Bench(settings, 16384, args.kv_dtype)
            for tokens in (int(t) for t in args.tokens.split(",")):
                best, median, compiled = bench.prefill(tokens, max(3, args.repeat // 3))
                print(
                    f"prefill {bench.implementation} {settings:9} tokens {tokens:5}: {best:8.1f} ms "
                    f"(median {median:.1f}), {1e3 * tokens / best:6.0f} tok/s, compiled in "
                    f"{compiled:.1f} s",
                    flush=True,
                )
        if "pool" in args.parts:
            for pool_tokens in (8192, 65536):
                best, median, _ = Bench(settings, pool_tokens).decode(8, args.context, args.repeat)
                print(
                    f"pool of {pool_tokens:6} tokens, {settings:9}, 8 rows: {best:7.2f} ms "
                    f"(median {median:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
