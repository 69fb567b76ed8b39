"""Paged attention and the KV write on TPUs: Pallas kernels lowered to Mosaic.

A step runs a kernel over its decoding rows (tpu_decode) and, unless the batch is decode-only, one
over tiles of query tokens (tpu_prefill). Keys and values are written by a kernel of their own
(tpu_write). The layout of the pages is in tpu_layout; docs/kernels.md has the reasons.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Num, Shaped

from pallas_kernels import tensor_parallel, tpu_layout, tpu_tables
from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec
from pallas_kernels.batch import RaggedBatch
from pallas_kernels.tpu_decode import decode_attention
from pallas_kernels.tpu_layout import Layout, head_groups, layout_of, pack_kv, pad_queries
from pallas_kernels.tpu_prefill import prefill_attention
from pallas_kernels.tpu_softmax import Scoring
from pallas_kernels.tpu_write import granules_of, write_granules

# Which dimension counts heads, for `tensor_parallel`.
_HEAD_POSITION = {"q": 1, "k": 1, "v": 1, "pages": 1, "k_scale": 0, "v_scale": 0, "sinks": 0}


def init_kv_pages(spec: KVCacheSpec) -> Shaped[Array, "N H C S L"]:
    """Zeroed pages of one layer. Axis 1 (KV heads) is the one to shard."""
    return jnp.zeros(layout_of(spec).shape, spec.dtype)


def kv_pages_from_logical(
    logical: Shaped[Array, "N S 2 H D"], spec: KVCacheSpec
) -> Shaped[Array, "N H C S L"]:
    """Lays out logical pages; a copy."""
    return tpu_layout.pages_from_logical(logical, layout_of(spec))


def kv_pages_to_logical(
    pages: Shaped[Array, "N H C S L"], spec: KVCacheSpec
) -> Shaped[Array, "N S 2 H D"]:
    """The inverse of `kv_pages_from_logical`; a copy."""
    return tpu_layout.pages_to_logical(pages, layout_of(spec))


def kv_page_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one page of one layer, lanes padded to 128."""
    return int(np.prod(layout_of(spec).shape[1:])) * np.dtype(spec.dtype).itemsize


def check_supported(spec: KVCacheSpec, config: AttentionConfig) -> None:
    """Raises NotImplementedError, with the reason, for what these kernels do not do."""
    del config  # every window, cap and query length is served
    layout_of(spec)


def kv_write(
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: Shaped[Array, "N H C S L"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    single: bool = False,
) -> Shaped[Array, "N H C S L"]:
    """Writes keys and values to `batch.slots`, in place where `pages` is donated.

    stored = x / scale in float32, rounded to nearest even; one-byte types saturate. Tokens in the
    null page are not written at all. `single` promises one token per row.
    """
    layout = layout_of(spec)
    if (axis := tensor_parallel.head_axis()) is not None:
        return _by_heads(
            kv_write,
            axis,
            spec,
            1,
            batch=batch,
            k=k,
            v=v,
            pages=pages,
            k_scale=k_scale,
            v_scale=v_scale,
            static={"single": single},
        )
    chip = tpu_tables.current_chip()
    rows = pack_kv(_stored(k, k_scale, spec), _stored(v, v_scale, spec), layout)
    tokens = rows.shape[0]
    granules = granules_of(
        batch.slots,
        page_size=spec.page_size,
        granule=layout.granule,
        num_rows=batch.kv_lens.shape[0],
    )
    return write_granules(
        rows.reshape(tokens, -1, layout.lanes),
        pages,
        granules,
        granule=layout.granule,
        single=single,
        vmem_limit_bytes=tpu_tables.vmem_limit(chip),
    )


def ragged_paged_attention(
    q: Num[Array, "T Hq D"],
    pages: Shaped[Array, "N H C S L"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> Num[Array, "T Hq D"]:
    """Attention of each query over its row's pages; zeros or finite values for padding tokens.

    Raises NotImplementedError for a row whose page table alone is beyond scalar memory.
    """
    if q.dtype == jnp.float16 or (q.dtype == jnp.bfloat16 and spec.dtype == jnp.float32):
        # The MXU multiplies no float16, and float32 pages are worth their precision.
        out = ragged_paged_attention(
            q.astype(jnp.float32),
            pages,
            batch,
            spec,
            config,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
        )
        return out.astype(q.dtype)
    if (axis := tensor_parallel.head_axis()) is not None:
        return _by_heads(
            ragged_paged_attention,
            axis,
            spec,
            1,
            batch=batch,
            q=q,
            pages=pages,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            static={"config": config},
        )
    call = _Call.of(q, batch, spec, config)
    if config.max_query_len == 1 and not config.batch_invariant:
        return call.decode(q, pages, batch, k_scale, v_scale, sinks)
    if config.batch_invariant:
        # One kernel for all rows: a token's result does not depend on how its row was cut.
        used = jnp.arange(batch.kv_lens.shape[0]) < batch.num_seqs[0]
        return call.prefill(q, pages, batch, used, k_scale, v_scale, sinks)
    row = jnp.arange(batch.kv_lens.shape[0])
    used = (row >= batch.num_decodes[0]) & (row < batch.num_seqs[0])
    prefilled = call.prefill(q, pages, batch, used, k_scale, v_scale, sinks)
    # Decoding rows come first: row r is token r.
    rows = min(row.shape[0], q.shape[0])
    head = batch._replace(kv_lens=batch.kv_lens[:rows], page_indices=batch.page_indices[:rows])
    decoded = call.decode(q[:rows], pages, head, k_scale, v_scale, sinks)
    is_decode = (jnp.arange(rows) < batch.num_decodes[0])[:, None, None]
    return prefilled.at[:rows].set(jnp.where(is_decode, decoded, prefilled[:rows]))


def attend(
    q: Num[Array, "T Hq D"],
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: Shaped[Array, "N H C S L"],
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
) -> tuple[Num[Array, "T Hq D"], Shaped[Array, "N H C S L"]]:
    """`kv_write`, then `ragged_paged_attention`."""
    single = config.max_query_len == 1
    pages = kv_write(k, v, pages, batch, spec, k_scale=k_scale, v_scale=v_scale, single=single)
    out = ragged_paged_attention(
        q, pages, batch, spec, config, k_scale=k_scale, v_scale=v_scale, sinks=sinks
    )
    return out, pages


def _by_heads(
    function: Callable[..., Any],
    axis: tensor_parallel.HeadAxis,
    spec: KVCacheSpec,
    out_position: int,
    *,
    static: dict[str, Any],
    **arrays: Any,
) -> Any:
    """`function` on each device's heads."""
    local = tensor_parallel.local_spec(spec, axis)

    def call(**inputs: Any) -> Any:
        with tensor_parallel.no_split():
            return function(**inputs, spec=local, **static)

    return tensor_parallel.by_heads(
        call,
        axis,
        arrays,
        replicated=("batch",),
        head_position=_HEAD_POSITION,
        out_positions=out_position,
    )


def _stored(
    x: Num[Array, "T H D"], scale: Float32[Array, " H"] | None, spec: KVCacheSpec
) -> Float32[Array, "T H D"]:
    """x as it will be stored, in float32: a value that the pages' dtype holds exactly."""
    dtype = np.dtype(spec.dtype)
    value = x.astype(jnp.float32)
    if scale is not None:
        value = value / scale[:, None]
    if dtype.kind == "i":
        limits = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(value), limits.min, limits.max)
    if dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        value = jnp.clip(value, -limit, limit)
    return value.astype(dtype).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Call:
    """Everything static about one call."""

    layout: Layout
    config: AttentionConfig
    scoring: Scoring
    blocks: tpu_tables.Blocks
    vmem_limit_bytes: int

    @classmethod
    def of(cls, q: Array, batch: RaggedBatch, spec: KVCacheSpec, config: AttentionConfig) -> _Call:
        layout = layout_of(spec)
        width = batch.page_indices.shape[1]
        if tpu_tables.table_rows(width) == 0:
            raise NotImplementedError(
                f"RaggedBatch.page_indices has {width} pages per row, {width * 4} bytes of the "
                f"TPU's {tpu_tables.SMEM_BYTES} bytes of scalar memory: use larger pages or a "
                "shorter max_model_len"
            )
        chip = tpu_tables.current_chip()
        operands = "f32" if q.dtype == jnp.float32 else "bf16"
        shape = tpu_tables.shape_class(layout, q.shape[1], q.dtype)
        return cls(
            layout=layout,
            config=config,
            scoring=Scoring(config.sm_scale, config.soft_cap, q.dtype),
            blocks=tpu_tables.blocks_for(chip, operands, shape),
            vmem_limit_bytes=tpu_tables.vmem_limit(chip),
        )

    def decode(
        self,
        q: Num[Array, "R Hq D"],
        pages: Shaped[Array, "N H C S L"],
        batch: RaggedBatch,
        k_scale: Float32[Array, " H"] | None,
        v_scale: Float32[Array, " H"] | None,
        sinks: Float32[Array, " Hq"] | None,
    ) -> Num[Array, "R Hq D"]:
        """Rows of one query token: token r is row r."""
        most = tpu_tables.table_rows(batch.page_indices.shape[1])
        if q.shape[0] > most:
            parts = [
                self.decode(
                    q[start : start + most],
                    pages,
                    batch._replace(
                        kv_lens=batch.kv_lens[start : start + most],
                        page_indices=batch.page_indices[start : start + most],
                        num_decodes=batch.num_decodes - start,
                    ),
                    k_scale,
                    v_scale,
                    sinks,
                )
                for start in range(0, q.shape[0], most)
            ]
            return jnp.concatenate(parts)
        rows, q_heads, _ = q.shape
        heads = self.layout.spec.num_kv_heads
        groups = head_groups(q_heads, heads)
        step = tpu_tables.decode_rows(self.layout, groups, rows=rows, q_itemsize=q.dtype.itemsize)
        padding = -rows % step
        grouped = pad_queries(q, heads, groups.q_per_kv, self.layout.lanes)
        grouped = grouped.reshape(rows, groups.count, groups.rows, self.layout.lanes)
        per_row = (groups.count, groups.rows)
        if k_scale is not None:
            k_scale = jnp.repeat(k_scale, groups.q_per_kv).reshape(per_row)
        if sinks is not None:
            sinks = _pad_heads(sinks, heads, groups.q_per_kv).reshape(per_row)
        out = decode_attention(
            jnp.pad(grouped, ((0, padding), (0, 0), (0, 0), (0, 0))),
            pages,
            jnp.pad(batch.kv_lens, (0, padding)),
            jnp.pad(batch.page_indices, ((0, padding), (0, 0))),
            batch.num_decodes[0],
            groups=groups,
            scoring=self.scoring,
            sliding_window=self.config.sliding_window,
            key_scale=k_scale,
            sinks=sinks,
            pages_per_block=tpu_tables.decode_pages(self.blocks, self.layout),
            rows_per_step=step,
            vmem_limit_bytes=self.vmem_limit_bytes,
        )
        out = out[:rows].reshape(rows, heads, groups.q_per_kv, -1)
        return self._finish(out, q, v_scale)

    def prefill(
        self,
        q: Num[Array, "T Hq D"],
        pages: Shaped[Array, "N H C S L"],
        batch: RaggedBatch,
        used: Shaped[Array, " R"],
        k_scale: Float32[Array, " H"] | None,
        v_scale: Float32[Array, " H"] | None,
        sinks: Float32[Array, " Hq"] | None,
    ) -> Num[Array, "T Hq D"]:
        """The rows in `used`, of any query length."""
        rows, width = batch.page_indices.shape
        most = tpu_tables.table_rows(width)
        if rows > most:
            out = jnp.zeros_like(q)
            token = jnp.arange(q.shape[0])
            for start in range(0, rows, most):
                stop = min(start + most, rows)
                part = batch._replace(
                    cu_q_lens=batch.cu_q_lens[start : stop + 1],
                    kv_lens=batch.kv_lens[start:stop],
                    page_indices=batch.page_indices[start:stop],
                )
                own = (token >= part.cu_q_lens[0]) & (token < part.cu_q_lens[-1])
                found = self.prefill(q, pages, part, used[start:stop], k_scale, v_scale, sinks)
                out = jnp.where(own[:, None, None], found, out)
            return out
        tokens, q_heads, _ = q.shape
        heads, lanes = self.layout.spec.num_kv_heads, self.layout.lanes
        q_per_kv = head_groups(q_heads, heads).q_per_kv
        blocks = tpu_tables.prefill_blocks(
            self.blocks, self.layout, num_tokens=tokens, q_per_kv=q_per_kv
        )
        padding = -tokens % blocks.tile_tokens
        by_head = jnp.swapaxes(pad_queries(q, heads, q_per_kv, lanes), 0, 1)  # [H, T, G, L]
        by_head = jnp.pad(by_head, ((0, 0), (0, padding), (0, 0), (0, 0)))
        out = prefill_attention(
            by_head.reshape(heads, -1, lanes),
            pages,
            batch.cu_q_lens,
            batch.kv_lens,
            batch.page_indices,
            used,
            q_per_kv=q_per_kv,
            scoring=self.scoring,
            sliding_window=self.config.sliding_window,
            key_scale=k_scale,
            sinks=None if sinks is None else _pad_heads(sinks, heads, q_per_kv),
            blocks=blocks,
            vmem_limit_bytes=self.vmem_limit_bytes,
            aligned=self.config.batch_invariant,
        )
        out = jnp.swapaxes(out.reshape(heads, -1, q_per_kv, lanes)[:, :tokens], 0, 1)
        return self._finish(out, q, v_scale)

    def _finish(
        self,
        out: Num[Array, "T H G L"],
        q: Num[Array, "T Hq D"],
        v_scale: Float32[Array, " H"] | None,
    ) -> Num[Array, "T Hq D"]:
        """Drops padded heads and lanes and applies the values' scale."""
        tokens, heads, _, _ = out.shape
        start = self.layout.value_lane
        out = out[:, :, : q.shape[1] // heads, start : start + q.shape[2]]
        if v_scale is not None:
            out = (out.astype(jnp.float32) * v_scale[:, None, None]).astype(q.dtype)
        return out.reshape(tokens, q.shape[1], q.shape[2])


def _pad_heads(
    sinks: Float32[Array, " Hq"], num_kv_heads: int, q_per_kv: int
) -> Float32[Array, "H G"]:
    grouped = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
    return jnp.pad(grouped, ((0, 0), (0, q_per_kv - grouped.shape[1])))
