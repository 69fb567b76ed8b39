"""Unrolled layers against a scan over stacked layers: compile time and time of a decode step.

    python -m benchmarks.layer_stacking --layers=30 --rows=8

Random weights of SmolLM2-135M's shape. The scan runs the same layer code over parameters stacked
along a new first axis, with the KV pages stacked too and taken as scanned inputs and outputs.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from models.config import ModelConfig
from models.layers import rotary_tables
from models.weights import RandomSource, load_weights
from pallas_kernels import KVCacheSpec, decode_batch, init_kv_pages, resolve_implementation

FLAGS = flags.FLAGS
flags.DEFINE_integer("layers", 30, "Layers of the model.")
flags.DEFINE_integer("rows", 8, "Decoding rows.")
flags.DEFINE_integer("context", 128, "Context of each row, in tokens.")
flags.DEFINE_integer("steps", 20, "Timed steps; the median counts.")
flags.DEFINE_list("pool_pages", ["512", "2048"], "Sizes of the KV pool, pages of 16 tokens.")
flags.DEFINE_string("dtype", "float32", "Of weights, activations and pages.")

PAGE = 16


def _model():
    config = ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=FLAGS.layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        tie_embeddings=True,
    )
    return load_weights(config, RandomSource(config, 0), dtype=FLAGS.dtype, progress=False)


def _unrolled(graphdef, settings):
    def step(state, pages, tokens, batch):
        model = nnx.merge(graphdef, state)
        hidden, pages = model(tokens, batch, pages, **settings)
        return model.logits(hidden), pages

    return step


def _scanned(graphdef, layer_graphdef, settings):
    def step(state, pages, tokens, batch):
        rest, layers = state
        model = nnx.merge(graphdef, rest)
        rotary = rotary_tables(batch.positions, model.config)

        def body(hidden, xs):
            layer_state, layer_pages = xs
            layer = nnx.merge(layer_graphdef, layer_state)
            return layer(hidden, rotary, batch, layer_pages, batch_invariant=False, **settings)

        hidden, pages = jax.lax.scan(body, model.embedding(tokens), (layers, pages))
        return model.logits(hidden), pages

    return step


def _measure(name, step, state, pages, tokens, batch):
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=1).lower(state, pages, tokens, batch).compile()
    compile_s = time.perf_counter() - start
    times = []
    for _ in range(FLAGS.steps):
        start = time.perf_counter()
        logits, pages = compiled(state, pages, tokens, batch)
        jax.block_until_ready(logits)
        times.append(time.perf_counter() - start)
    # The best step as well: a busy machine only ever adds.
    print(
        f"{name}: compile {compile_s:.2f} s, step {1e3 * np.median(times):.1f} ms "
        f"(best {1e3 * min(times):.1f} ms)",
        flush=True,
    )


def main(_):
    """Prints a line per pool size and form."""
    model = _model()
    per_row = -(-FLAGS.context // PAGE)
    table = 1 + np.arange(FLAGS.rows * per_row, dtype=np.int32).reshape(FLAGS.rows, per_row)
    lens = jnp.full(FLAGS.rows, FLAGS.context, jnp.int32)
    batch = decode_batch(lens, jnp.asarray(table), page_size=PAGE)
    tokens = jnp.arange(FLAGS.rows, dtype=jnp.int32)
    layer_graphdef = nnx.graphdef(model.layers[0])
    layer_states = [nnx.state(layer) for layer in model.layers]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layer_states)
    graphdef, state = nnx.split(model)
    for pool in map(int, FLAGS.pool_pages):
        spec = KVCacheSpec(pool, PAGE, 3, 64, FLAGS.dtype)
        implementation = resolve_implementation(spec)
        settings = {"spec": spec, "max_query_len": 1, "implementation": implementation}
        new = functools.partial(init_kv_pages, spec, implementation=implementation)
        pages = [new() for _ in range(FLAGS.layers)]
        label = f"{implementation}, {pool} pages"
        _measure(f"unrolled, {label}", _unrolled(graphdef, settings), state, pages, tokens, batch)
        pages = jax.tree.map(lambda *x: jnp.stack(x), *[new() for _ in range(FLAGS.layers)])
        step = _scanned(graphdef, layer_graphdef, settings)
        _measure(f"scanned, {label}", step, (state, stacked), pages, tokens, batch)


if __name__ == "__main__":
    app.run(main)
