"""The sampler against plain numpy: filters, penalties, masks, and the distribution of draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device_state import Need, pack_params, unpack_params
from engine.sampler import _truncate, argmax, sample
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

VOCAB = 300


def _rows(params, prompt_len=4, seeds=None, eos=(2,)):
    packed, need = [], Need.NONE
    for i, each in enumerate(params):
        row, wants = pack_params(
            each, prompt_len=prompt_len, seed=i if seeds is None else seeds[i], eos_ids=eos
        )
        packed.append(row)
        need |= wants
    return unpack_params(jnp.asarray(np.stack(packed))), need


@jax.jit
def _sample(logits, rows, need, history, lengths):
    return sample(logits, rows, need, lambda: history, lengths)


def _draw(logits, params, history=None, lengths=None, **kwargs):
    rows, need = _rows(params, **kwargs)
    count = len(params)
    history = np.zeros((count, 16), np.int32) if history is None else history
    lengths = np.full(count, 6, np.int32) if lengths is None else lengths
    tokens, logprobs = _sample(jnp.asarray(logits), rows, int(need), history, lengths)
    return np.asarray(tokens), jax.tree.map(np.asarray, logprobs)


def _logits(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 3


def _expected_weights(logits, temperature, top_k, top_p, min_p):
    """Reference by sorting, in float64."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    if top_k > 0:
        weights[weights < np.sort(weights)[::-1][min(top_k, VOCAB) - 1]] = 0
    if top_p < 1:
        order = np.argsort(-weights)
        total = np.cumsum(weights[order])
        last = np.searchsorted(total, top_p * total[-1])
        weights[weights < weights[order[min(last, VOCAB - 1)]]] = 0
    weights[weights < min_p] = 0
    return weights


@pytest.mark.parametrize("vocab", [1, 127, 128, 300, 49152])
def test_argmax_is_that_of_numpy(vocab):
    rng = np.random.default_rng(vocab)
    # Few distinct values: ties within blocks and between them.
    logits = rng.integers(-3, 3, (9, vocab)).astype(np.float32)
    logits[0] = -np.inf
    logits[1, rng.integers(vocab)] = np.inf
    np.testing.assert_array_equal(argmax(jnp.asarray(logits)), np.argmax(logits, axis=-1))


def test_greedy_takes_the_first_largest():
    logits = _logits(3)
    logits[1, [5, 9]] = 50.0
    tokens, _ = _draw(logits, [SamplingParams(temperature=0)] * 3)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert tokens[1] == 5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3),
    top_k=st.sampled_from([-1, 1, 2, 7, 50, VOCAB, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 0.001]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_truncation_equals_sorting(seed, temperature, top_k, top_p, min_p):
    logits = _logits(1, seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows, _ = _rows([params])
    scaled = logits / np.float32(temperature)
    weights = np.exp(scaled - scaled.max())
    kept = np.asarray(_truncate(jnp.asarray(weights), rows))[0] > 0
    expected = _expected_weights(logits[0], temperature, top_k, top_p, min_p) > 0
    # Float rounding may move the boundary of top-p by one token.
    assert (kept != expected).sum() <= (1 if top_p < 1 else 0)
    assert kept[logits[0].argmax()]


def test_draws_follow_the_distribution():
    count = 20_000
    logits = np.tile(_logits(1, 3)[:, :VOCAB], (count, 1))
    params = [SamplingParams(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01)] * count
    tokens, _ = _draw(logits, params, history=np.zeros((count, 1), np.int32))
    weights = _expected_weights(logits[0], 0.8, 20, 0.95, 0.01)
    expected = weights / weights.sum() * count
    observed = np.bincount(tokens, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    used = expected > 0
    chi2 = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    # Five standard deviations of the chi-squared distribution.
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.zeros((8, VOCAB), np.float32)
    params = [SamplingParams(temperature=1.0)] * 8
    seeds = [1, 1, 2, 3, 1, 5, 6, 7]
    lengths = np.array([6, 6, 6, 6, 7, 6, 6, 6], np.int32)
    tokens, _ = _draw(logits, params, lengths=lengths, seeds=seeds)
    assert tokens[0] == tokens[1]
    assert len({tokens[0], tokens[2], tokens[3], tokens[4]}) == 4
    alone, _ = _draw(logits[:1], params[:1], lengths=lengths[:1], seeds=seeds[:1])
    assert alone[0] == tokens[0]
    mixed = [SamplingParams(temperature=0), params[0]]
    beside_greedy, _ = _draw(logits[:2], mixed, lengths=lengths[:2], seeds=seeds[:2])
    assert beside_greedy[1] == tokens[0]
    assert beside_greedy[0] == 0


def test_penalties():
    logits = _logits(1)
    history = np.zeros((1, 16), np.int32)
    history[0, :6] = [10, 11, 12, 10, 11, 11]  # prompt of four, then 11 twice
    history[0, 6:] = 13  # beyond the known tokens: must not count
    tweak = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    expected = logits[0].copy()
    for token in (10, 11, 12):
        value = expected[token]
        expected[token] = value / 1.5 if value > 0 else value * 1.5
    expected[11] -= 0.5 + 2 * 0.25
    for token in (10, 11, 12, 13):
        # Whether the token wins flips exactly where its penalised logit crosses the best other.
        others = np.delete(expected, [token]).max()
        for push, wins in (
            (others - expected[token] + 0.01, True),
            (-0.01 + others - expected[token], False),
        ):
            tokens, _ = _draw(
                logits,
                [SamplingParams(temperature=0, logit_bias={token: float(push)}, **tweak)],
                history=history,
            )
            assert (tokens[0] == token) == wins, (token, push)


def test_min_tokens_masks_eos_and_stops_until_reached():
    logits = np.full((3, VOCAB), -5.0, np.float32)
    logits[:, 2], logits[:, 7], logits[:, 9] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=9, stop_token_ids=[7])
    # Prompt of four: lengths 4, 6, 7 are 0, 2 and 3 tokens of output.
    tokens, _ = _draw(logits, [params] * 3, lengths=np.array([4, 6, 7], np.int32))
    assert tokens.tolist() == [9, 9, 2]


def test_logprobs_are_of_the_unmodified_logits():
    logits = _logits(2)
    params = SamplingParams(temperature=0, logit_bias={5: 100.0}, logprobs=3)
    tokens, logprobs = _draw(logits, [params, SamplingParams(temperature=0)])
    assert tokens[0] == 5
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs.chosen[0], exact[0, 5], atol=1e-5)
    assert logprobs.rank[0] == (exact[0] > exact[0, 5]).sum() + 1
    best = np.argsort(-exact[0])[:MAX_LOGPROBS]
    np.testing.assert_array_equal(logprobs.top_ids[0], best)
    np.testing.assert_allclose(logprobs.top_values[0], exact[0, best], atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.999999, 1.0])
def test_inverse_of_the_distribution_never_draws_an_excluded_token(uniform):
    from engine.sampler import _invert_cdf

    weights = np.zeros((1, VOCAB), np.float32)
    weights[0, [130, 131, 290]] = [1.0, 0.0, 1.0]
    token = int(_invert_cdf(jnp.asarray(weights), jnp.full(1, uniform, jnp.float32))[0])
    assert token == (130 if uniform < 0.5 else 290)
