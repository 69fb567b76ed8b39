"""Sampling inside the step: rows of logits in, one token per row out.

Everything a request did not ask for is skipped at run time by `lax.cond` on the step's `Need`
flags, so that one compiled step serves all of them. Nothing here sorts the vocabulary: thresholds
are found by bisection over the order of float32 bit patterns, which is exact after 32 halvings,
and draws invert the cumulative distribution in two levels (block sums, then one block).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from engine.device_state import Need, RowParams
from engine.sampling_params import MAX_LOGPROBS

_BLOCK = 128


class SampledLogprobs(NamedTuple):
    """Log-probabilities of the unmodified logits, per row.

    Attributes:
      chosen: of the drawn token.
      rank: of the drawn token, 1 for the likeliest.
      top_values, top_ids: of the MAX_LOGPROBS likeliest.
    """

    chosen: Float32[Array, " R"]
    rank: Int32[Array, " R"]
    top_values: Float32[Array, "R K"]
    top_ids: Int32[Array, "R K"]


def sample(
    logits: Float32[Array, "R V"],
    params: RowParams,
    need: Int32[Array, ""],
    history: Callable[[], Int32[Array, "R L"]],
    lengths: Int32[Array, " R"],
) -> tuple[Int32[Array, " R"], SampledLogprobs]:
    """Draws the token at position `lengths[r]` of each row.

    Args:
      logits: float32, unmodified.
      params: the rows' choices.
      need: `Need` flags of the step.
      history: gives the rows' tokens; called inside the branch that needs them.
      lengths: tokens known so far, which is also the position of the drawn one.

    Returns:
      The tokens, and their log-probabilities (zeros unless `Need.LOGPROBS`).
    """
    tokens = jax.lax.cond(
        (need & _NOT_PLAIN) != 0,
        lambda: _choose(logits, params, need, history, lengths),
        lambda: argmax(logits),
    )
    logprobs = jax.lax.cond(
        (need & Need.LOGPROBS) != 0,
        lambda: _logprobs(logits, tokens),
        lambda: no_logprobs(logits.shape[0]),
    )
    return tokens, logprobs


# Without these a row's token is the likeliest one; one branch, because a branch copies what it
# passes through.
_NOT_PLAIN = Need.RANDOM | Need.PENALTIES | Need.BIAS | Need.MIN_TOKENS


def _choose(
    logits: Array,
    params: RowParams,
    need: Array,
    history: Callable[[], Array],
    lengths: Array,
) -> Array:
    """Changes the logits as the rows ask for, then draws or takes the likeliest."""
    logits = _when(need, Need.PENALTIES, lambda x: _penalise(x, params, history(), lengths), logits)
    logits = _when(need, Need.BIAS, lambda x: _add_bias(x, params), logits)
    logits = _when(need, Need.MIN_TOKENS, lambda x: _mask_stops(x, params, lengths), logits)
    greedy = argmax(logits)
    return jax.lax.cond(
        (need & Need.RANDOM) != 0,
        lambda: jnp.where(params.temperature > 0, _draw(logits, params, need, lengths), greedy),
        lambda: greedy,
    )


def argmax(logits: Float32[Array, "R V"]) -> Int32[Array, " R"]:
    """Index of the largest logit, the first of equals, none of them NaN; in two levels.

    A maximum over blocks compiles to vector code everywhere; XLA:CPU's reduction of pairs does not,
    and takes more than ten times as long.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // _BLOCK)
    padding = ((0, 0), (0, blocks * _BLOCK - vocab))
    padded = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(rows, blocks, _BLOCK)
    block = jnp.argmax(jnp.max(padded, axis=-1), axis=-1)
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _when(need: Array, flag: Need, change: Callable[[Array], Array], logits: Array) -> Array:
    return jax.lax.cond((need & flag) != 0, change, lambda x: x, logits)


def _penalise(logits: Array, params: RowParams, history: Array, lengths: Array) -> Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    index = jnp.arange(history.shape[1])[None, :]
    known = index < lengths[:, None]
    generated = known & (index >= params.prompt_len[:, None])
    zeros = jnp.zeros(logits.shape, jnp.float32)
    count = zeros.at[rows, history].add(generated.astype(jnp.float32))
    seen = zeros.at[rows, history].max(known.astype(jnp.float32)) > 0
    penalty = params.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen, repeated, logits)
    logits -= params.frequency_penalty[:, None] * count
    return logits - params.presence_penalty[:, None] * (count > 0)


def _add_bias(logits: Array, params: RowParams) -> Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    used = params.bias_ids >= 0
    ids = jnp.where(used, params.bias_ids, 0)
    return logits.at[rows, ids].add(jnp.where(used, params.bias_values, 0.0))


def _mask_stops(logits: Array, params: RowParams, lengths: Array) -> Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    early = (lengths < params.min_len)[:, None] & (params.stop_ids >= 0)
    # Ids that need no mask are sent out of bounds, where a scatter drops them.
    ids = jnp.where(early, params.stop_ids, logits.shape[1])
    return logits.at[rows, ids].set(-jnp.inf, mode="drop")


def _draw(logits: Array, params: RowParams, need: Array, lengths: Array) -> Array:
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    scaled = logits / temperature
    scaled -= jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled)
    weights = _when(need, Need.TRUNCATE, lambda w: _truncate(w, params), weights)
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(
        params.seed.astype(jnp.uint32), lengths
    )
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)
    return _invert_cdf(weights, uniform)


def _truncate(weights: Array, params: RowParams) -> Array:
    """Zeroes the weights that top-k, top-p and min-p leave out, in that order.

    Weights are exp(logit - max): the likeliest token has weight 1 and stays.
    """
    vocab = weights.shape[-1]
    top_k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab), vocab)

    def at_least_k(threshold: Array) -> Array:
        return jnp.sum(weights >= threshold[:, None], axis=-1) >= top_k

    weights = jnp.where(weights >= _largest(at_least_k, weights)[:, None], weights, 0.0)
    target = params.top_p * jnp.sum(weights, axis=-1)

    def at_least_p(threshold: Array) -> Array:
        kept = jnp.where(weights >= threshold[:, None], weights, 0.0)
        return jnp.sum(kept, axis=-1) >= target

    threshold = jnp.where(params.top_p < 1.0, _largest(at_least_p, weights), 0.0)
    threshold = jnp.maximum(threshold, params.min_p)
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


def _largest(
    holds: Callable[[Array], Bool[Array, " R"]], weights: Float32[Array, "R V"]
) -> Float32[Array, " R"]:
    """Largest threshold in [0, 1] for which the (falling) predicate holds, by bisection on bits.

    Non-negative float32 values order like their bit patterns.
    """
    low = jnp.zeros(weights.shape[0], jnp.int32)
    high = jnp.full(weights.shape[0], jnp.float32(1.0).view(jnp.int32) + 1)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        ok = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _invert_cdf(weights: Float32[Array, "R V"], uniform: Float32[Array, " R"]) -> Array:
    """Index where the cumulative weight first exceeds uniform * total; never one of weight 0."""
    rows, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab)))
    padded = padded.reshape(rows, blocks, _BLOCK)
    block_sums = jnp.sum(padded, axis=-1)
    block_ends = jnp.cumsum(block_sums, axis=-1)
    target = uniform * block_ends[:, -1]
    block = _first_beyond(block_ends, block_sums, target)
    inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    start = jnp.take_along_axis(block_ends - block_sums, block[:, None], axis=1)[:, 0]
    offset = _first_beyond(jnp.cumsum(inside, axis=-1), inside, target - start)
    return (block * _BLOCK + offset).astype(jnp.int32)


def _first_beyond(ends: Array, sums: Array, target: Array) -> Array:
    """First index with ends > target among those of positive weight, else the last of them.

    Rounding can put the target at the very end; then the last positive entry is taken.
    """
    index = jnp.arange(ends.shape[1])
    positive = sums > 0
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    beyond = positive & (ends > target[:, None])
    return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last)


def _logprobs(logits: Array, tokens: Array) -> SampledLogprobs:
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    rank = jnp.sum(logprobs > chosen, axis=-1) + 1
    values, ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    pad = MAX_LOGPROBS - values.shape[-1]
    values = jnp.pad(values, ((0, 0), (0, pad)), constant_values=-jnp.inf)
    ids = jnp.pad(ids, ((0, 0), (0, pad)), constant_values=-1)
    return SampledLogprobs(chosen[:, 0], rank.astype(jnp.int32), values, ids.astype(jnp.int32))


def no_logprobs(rows: int) -> SampledLogprobs:
    """Zeros in the place of log-probabilities that nobody asked for."""
    return SampledLogprobs(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
    )
