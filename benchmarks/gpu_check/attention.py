"""Our attention on this device: decode against copying, prefill against multiplying matrices."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from benchmarks.gpu_check.section import Section, run, share, time_jax
from benchmarks.gpu_check.shapes import AttentionShape, attention_shape


def measure(section: Section) -> None:
    import jax

    from pallas_kernels import gpu

    shape = attention_shape(section.rehearse)
    on_gpu = jax.default_backend() == "gpu"
    with contextlib.nullcontext() if on_gpu else gpu.interpret_mode():
        _decode(section, shape, "bfloat16")
        _prefill(section, shape)
        _decode(section, shape, "int8")
        _long(section, shape)
        _write(section, shape)


def decode_inputs(shape: AttentionShape, kv_dtype: Any, rows: int, context: int) -> dict[str, Any]:
    """Random pages and a full decode step over them; pages of a row lie scattered."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention_types import KVCacheSpec
    from pallas_kernels.batch import decode_batch

    per_row = -(-context // shape.page_size)
    pages = 1 + rows * per_row
    spec = KVCacheSpec(pages, shape.page_size, shape.num_kv_heads, shape.head_dim, kv_dtype)
    order = 1 + jax.random.permutation(jax.random.key(1), pages - 1)
    table = order.reshape(rows, per_row).astype(jnp.int32)
    batch = decode_batch(jnp.full((rows,), context, jnp.int32), table, page_size=shape.page_size)
    q = jax.random.normal(
        jax.random.key(2), (rows, shape.num_q_heads, shape.head_dim), jnp.bfloat16
    )
    return {"q": q, "batch": batch, "spec": spec, "pages": random_pages(spec)}


def random_pages(spec: Any) -> Any:
    """Pages in our layout filled with random numbers, made on the device."""
    import jax

    from pallas_kernels import gpu

    shapes = jax.eval_shape(functools.partial(gpu.init_kv_pages, spec))
    return tuple(
        jax.jit(functools.partial(_fill, shape=leaf.shape, dtype=leaf.dtype, seed=i))()
        for i, leaf in enumerate(shapes)
    )


def _fill(*, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    import jax
    import jax.numpy as jnp

    key = jax.random.key(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def attend_call(shape: AttentionShape, inputs: dict[str, Any], max_query_len: int | None) -> Any:
    """A jitted attention call over these inputs; takes no arguments."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import gpu
    from pallas_kernels.attention_types import AttentionConfig

    config = AttentionConfig(shape.head_dim**-0.5, max_query_len=max_query_len)
    scales = {}
    if jnp.dtype(inputs["spec"].dtype).itemsize == 1:
        ones = jnp.full((shape.num_kv_heads,), 1 / 64, jnp.float32)
        scales = {"k_scale": ones, "v_scale": ones}
    step = jax.jit(
        functools.partial(gpu.ragged_paged_attention, spec=inputs["spec"], config=config, **scales)
    )
    return lambda: step(inputs["q"], inputs["pages"], inputs["batch"])


def _decode(section: Section, shape: AttentionShape, kv_dtype: str) -> None:
    inputs = decode_inputs(shape, kv_dtype, shape.rows, shape.context)
    _report_decode(section, f"decode_{kv_dtype}", shape, inputs, shape.rows, shape.context)


def _long(section: Section, shape: AttentionShape) -> None:
    """Few rows with long contexts: the split decides."""
    rows, context = 2, shape.context * (1 if section.rehearse else 16)
    inputs = decode_inputs(shape, "bfloat16", rows, context)
    _report_decode(section, "decode_long", shape, inputs, rows, context)


def _report_decode(
    section: Section,
    key: str,
    shape: AttentionShape,
    inputs: dict[str, Any],
    rows: int,
    context: int,
) -> None:
    import jax.numpy as jnp

    call = attend_call(shape, inputs, 1)
    error = check_rows(shape, inputs, call())
    seconds = time_jax(call, repeats=shape.repeats)
    itemsize = jnp.dtype(inputs["spec"].dtype).itemsize
    read = 2 * rows * context * shape.num_kv_heads * shape.head_dim * itemsize
    rate = read / seconds / 1e9
    section.put(
        key,
        {
            "rows": rows,
            "context": context,
            "us": round(1e6 * seconds, 1),
            "gb_per_s": round(rate, 1),
            "share_of_copy": share(rate, section.ceiling("copy_gb_per_s")),
            "max_error": error,
        },
    )
    if error > 0.05:
        section.put("failures", [*section.results.get("failures", []), key])


def check_rows(shape: AttentionShape, inputs: dict[str, Any], out: Any) -> float:
    """Largest difference from attention written out in float32, over the first and last row."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.gpu_layout import is_split

    spec, batch = inputs["spec"], inputs["batch"]
    keys, values = inputs["pages"][0], inputs["pages"][-1]
    offset = 0 if is_split(spec) else spec.num_pages
    scale = 1 / 64 if jnp.dtype(spec.dtype).itemsize == 1 else 1.0
    group = shape.num_q_heads // shape.num_kv_heads
    worst = 0.0
    for row in (0, batch.kv_lens.shape[0] - 1):
        table = batch.page_indices[row]

        def gathered(pages: Any, table: Any) -> Any:
            tokens = pages[table].astype(jnp.float32) * scale  # [P, H, S, D]
            tokens = tokens.transpose(1, 0, 2, 3).reshape(shape.num_kv_heads, -1, shape.head_dim)
            return tokens[:, : int(batch.kv_lens[row])]  # noqa: B023

        k, v = gathered(keys, table), gathered(values, table + offset)
        q = inputs["q"][row].astype(jnp.float32).reshape(shape.num_kv_heads, group, -1)
        with jax.default_matmul_precision("highest"):
            scores = jnp.einsum("hgd,hnd->hgn", q, k) * shape.head_dim**-0.5
            want = jnp.einsum("hgn,hnd->hgd", jax.nn.softmax(scores, axis=-1), v)
        got = out[row].astype(jnp.float32).reshape(want.shape)
        worst = max(worst, float(jnp.abs(got - want).max()))
    return worst


def prefill_inputs(shape: AttentionShape, kv_dtype: Any = "bfloat16") -> dict[str, Any]:
    """One prompt of `shape.prompt` tokens."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention_types import KVCacheSpec
    from pallas_kernels.batch import ragged_batch

    pages = 1 + -(-shape.prompt // shape.page_size)
    spec = KVCacheSpec(pages, shape.page_size, shape.num_kv_heads, shape.head_dim, kv_dtype)
    batch = ragged_batch(
        jnp.asarray([0, shape.prompt], jnp.int32),
        jnp.asarray([shape.prompt], jnp.int32),
        jnp.arange(1, pages, dtype=jnp.int32)[None],
        jnp.ones(1, jnp.int32),
        jnp.zeros(1, jnp.int32),
        num_tokens=shape.prompt,
        page_size=shape.page_size,
    )
    q = jax.random.normal(
        jax.random.key(2), (shape.prompt, shape.num_q_heads, shape.head_dim), jnp.bfloat16
    )
    return {"q": q, "batch": batch, "spec": spec, "pages": random_pages(spec)}


def prefill_flop(shape: AttentionShape) -> float:
    """Multiplications and additions of causal attention over one prompt, both products."""
    return 4 * shape.prompt * (shape.prompt + 1) / 2 * shape.num_q_heads * shape.head_dim


def _prefill(section: Section, shape: AttentionShape) -> None:
    call = attend_call(shape, prefill_inputs(shape), None)
    seconds = time_jax(call, repeats=shape.repeats)
    rate = prefill_flop(shape) / seconds / 1e12
    section.put(
        "prefill",
        {
            "tokens": shape.prompt,
            "us": round(1e6 * seconds, 1),
            "tflop_per_s": round(rate, 2),
            "share_of_matmul": share(rate, section.ceiling("bf16_tflop_per_s")),
        },
    )


def _write(section: Section, shape: AttentionShape) -> None:
    """Writing a prompt's keys and values, pages donated."""
    import jax

    from pallas_kernels import gpu

    inputs = prefill_inputs(shape)
    k = inputs["q"][:, : shape.num_kv_heads]
    write = jax.jit(functools.partial(gpu.kv_write, spec=inputs["spec"]), donate_argnums=2)
    pages = inputs.pop("pages")

    def call() -> Any:
        nonlocal pages
        pages = write(k, k, pages, inputs["batch"])
        return pages

    seconds = time_jax(call, repeats=shape.repeats)
    rate = 4 * k.nbytes / seconds / 1e9
    section.put("kv_write", {"us": round(1e6 * seconds, 1), "gb_per_s": round(rate, 1)})


if __name__ == "__main__":
    run(measure)
