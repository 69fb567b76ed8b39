"""The jitted step: tokens in, one token per row out, all state updated in place on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int32

from engine.device_state import (
    DeviceState,
    StepInput,
    StepShape,
    apply_updates,
    unpack_params,
    unpack_step,
)
from engine.sampler import SampledLogprobs, no_logprobs, sample
from pallas_kernels import KVCacheSpec, KVPages, RaggedBatch, decode_batch, ragged_batch


class StepOutput(NamedTuple):
    """What a step sends back; only `tokens` is read unless somebody asked for log-probabilities.

    Attributes:
      tokens: int32 [R]; meaningless for rows that do not sample. Of a decode step that can run
        several times in a row, int32 [max_decode_steps, R].
      logprobs: see `SampledLogprobs`; of the last step.
    """

    tokens: Int32[Array, "*K R"]
    logprobs: SampledLogprobs


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Static settings shared by all of an engine's steps."""

    spec: KVCacheSpec
    implementation: str
    batch_invariant: bool = False
    max_decode_steps: int = 1


StepFunction = Callable[
    [Sequence[Array], list[KVPages], DeviceState, Array],
    tuple[list[KVPages], DeviceState, StepOutput],
]


def make_step(graphdef: Any, treedef: Any, config: StepConfig, shape: StepShape) -> StepFunction:
    """Builds the step of one bucket.

    Args:
      graphdef: of the model, from `nnx.split`.
      treedef: of the model's state; the step takes its flat leaves, which dispatch fastest.
      config: static settings.
      shape: the bucket.

    Returns:
      step(leaves, kv_pages, state, packed) -> (kv_pages, state, output). Jit it with kv_pages
      and state donated: both are updated in place.
    """

    def step(
        leaves: Sequence[Array], kv_pages: list[KVPages], state: DeviceState, packed: Array
    ) -> tuple[list[KVPages], DeviceState, StepOutput]:
        def model(leaves: Sequence[Array]) -> Any:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

        rows = unpack_step(shape, packed)
        state = apply_updates(state, rows.updates)
        if not shape.decode or config.max_decode_steps == 1:
            return _run_once(model(leaves), config, shape, rows, kv_pages, state)

        def run(step: Array, kv_pages: list[KVPages], state: DeviceState) -> Any:
            # Ties the weights to the loop's counter: else the compiler computes ahead of the loop
            # what depends on weights alone, for example a float32 copy of the embedding.
            tied, _ = jax.lax.optimization_barrier((leaves, step))
            return _run_once(model(tied), config, shape, rows, kv_pages, state)

        return _run_many(run, config, shape, rows, kv_pages, state)

    return step


def _run_once(
    model: Any,
    config: StepConfig,
    shape: StepShape,
    rows: StepInput,
    kv_pages: list[KVPages],
    state: DeviceState,
) -> tuple[list[KVPages], DeviceState, StepOutput]:
    start = state.computed[rows.slots]
    batch, token_ids = _inputs(shape, config.spec.page_size, state, rows, start)
    hidden, kv_pages = model(
        token_ids,
        batch,
        kv_pages,
        spec=config.spec,
        max_query_len=1 if shape.decode else None,
        implementation=config.implementation,
        batch_invariant=config.batch_invariant,
    )
    if not shape.decode:
        hidden = hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)]
    logits = model.logits(hidden, batch_invariant=config.batch_invariant)
    lengths = start + rows.num_tokens
    tokens, logprobs = sample(
        logits,
        unpack_params(state.params[rows.slots]),
        rows.need,
        lambda: state.tokens[rows.slots],
        lengths,
    )
    # Rows that do not sample, and padding, write out of bounds, where a scatter drops them.
    column = jnp.where(rows.samples, lengths, state.tokens.shape[1])
    state = state._replace(
        tokens=state.tokens.at[rows.slots, column].set(tokens, mode="drop"),
        computed=state.computed.at[rows.slots].add(rows.num_tokens),
    )
    return kv_pages, state, StepOutput(tokens, logprobs)


def _run_many(
    run_once: Callable[[Array, list[KVPages], DeviceState], Any],
    config: StepConfig,
    shape: StepShape,
    rows: StepInput,
    kv_pages: list[KVPages],
    state: DeviceState,
) -> tuple[list[KVPages], DeviceState, StepOutput]:
    """Runs `rows.num_steps` decode steps in a row, fewer once every row has stopped.

    Tokens come back as [max_decode_steps, R]. A row that stopped runs on until all have: whoever
    reads the tokens drops what follows the stop, and what its extra steps write lies in blocks
    that it owns.
    """
    stop_ids = unpack_params(state.params[rows.slots]).stop_ids

    def goes_on(carry: Any) -> Array:
        step, stopped = carry[0], carry[1]
        return (step < rows.num_steps) & ~jnp.all(stopped)

    def run(carry: Any) -> Any:
        step, stopped, tokens, kv_pages, state, _ = carry
        kv_pages, state, output = run_once(step, kv_pages, state)
        stopped |= jnp.any(output.tokens[:, None] == stop_ids, axis=1)
        tokens = tokens.at[step].set(output.tokens)
        return step + 1, stopped, tokens, kv_pages, state, output.logprobs

    first = (
        jnp.int32(0),
        ~rows.samples,
        jnp.zeros((config.max_decode_steps, shape.num_rows), jnp.int32),
        kv_pages,
        state,
        no_logprobs(shape.num_rows),
    )
    _, _, tokens, kv_pages, state, logprobs = jax.lax.while_loop(goes_on, run, first)
    return kv_pages, state, StepOutput(tokens, logprobs)


def _inputs(
    shape: StepShape, page_size: int, state: DeviceState, rows: StepInput, start: Array
) -> tuple[RaggedBatch, Int32[Array, " T"]]:
    """The ragged batch of a step, and the tokens it runs (read from the resident history)."""
    pages = state.block_table[rows.slots]
    kv_lens = jnp.where(rows.num_tokens > 0, start + rows.num_tokens, 0)
    if shape.decode:
        batch = decode_batch(kv_lens, pages, page_size=page_size)
        used = rows.num_rows[None]
        batch = batch._replace(num_seqs=used, num_decodes=used)
        return batch, state.tokens[rows.slots, start]
    cu_q_lens = jnp.pad(jnp.cumsum(rows.num_tokens), (1, 0)).astype(jnp.int32)
    batch = ragged_batch(
        cu_q_lens,
        kv_lens,
        pages,
        rows.num_rows[None],
        rows.num_decodes[None],
        num_tokens=shape.num_tokens,
        page_size=page_size,
    )
    token = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right")
    slot = rows.slots[jnp.minimum(row, shape.num_rows - 1)]
    return batch, state.tokens[slot, batch.positions]
