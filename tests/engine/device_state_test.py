"""What is packed on the host is what the device unpacks."""

import jax.numpy as jnp
import numpy as np
import pytest

from engine.device_state import (
    Need,
    StepShape,
    apply_join,
    apply_updates,
    init_state,
    pack_join,
    pack_params,
    pack_step,
    unpack_params,
    unpack_step,
)
from engine.sampling_params import SamplingParams


def test_params_round_trip():
    params = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        min_tokens=3,
        stop_token_ids=[11, 12],
        logit_bias={7: -2.5},
        logprobs=2,
    )
    row, need = pack_params(params, prompt_len=10, seed=2**32 - 1, eos_ids=(2,))
    out = unpack_params(jnp.asarray(row[None]))
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        np.testing.assert_allclose(getattr(out, name)[0], getattr(params, name), rtol=1e-6)
    assert out.repetition_penalty[0] == 1.25
    assert out.top_k[0] == 5
    assert np.uint32(out.seed[0]) == 2**32 - 1
    assert out.prompt_len[0] == 10
    assert out.min_len[0] == 13
    assert out.stop_ids[0, :4].tolist() == [2, 11, 12, -1]
    assert out.bias_ids[0, :2].tolist() == [7, -1]
    assert out.bias_values[0, 0] == -2.5
    assert need == (
        Need.RANDOM | Need.TRUNCATE | Need.PENALTIES | Need.BIAS | Need.MIN_TOKENS | Need.LOGPROBS
    )


def test_greedy_needs_nothing():
    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5)
    assert pack_params(greedy, prompt_len=1, seed=0, eos_ids=())[1] == Need.NONE


@pytest.mark.parametrize("decode", [True, False])
def test_step_round_trip(decode):
    shape = StepShape(8 if decode else 64, 8, decode)
    slots = np.array([4, 0, 2], np.int32)
    lengths = np.ones(3, np.int32) if decode else np.array([1, 30, 7], np.int32)
    samples = np.array([True, True, True] if decode else [True, False, True])
    updates = np.array([[4, 0], [3, 1], [9, 8]], np.int32)
    packed = pack_step(
        shape,
        padding_slot=8,
        need=Need.RANDOM,
        slots=slots,
        num_tokens=lengths,
        samples=samples,
        num_decodes=1,
        updates=updates,
    )
    assert packed.shape == (shape.input_size,)
    out = unpack_step(shape, jnp.asarray(packed))
    assert (out.num_rows, out.need, out.num_decodes) == (3, Need.RANDOM, 1)
    assert out.slots.tolist() == [4, 0, 2] + [8] * 5
    assert out.num_tokens.tolist() == lengths.tolist() + [0] * 5
    assert out.samples.tolist() == samples.tolist() + [False] * 5

    state = apply_updates(init_state(8, 32, 6), out.updates)
    table = np.zeros((9, 6), np.int32)
    table[4, 3], table[0, 1] = 9, 8
    np.testing.assert_array_equal(state.block_table[:8], table[:8])


def test_a_quiet_decode_step_uploads_a_few_hundred_bytes():
    assert 4 * StepShape(32, 32, decode=True).input_size <= 300


def test_join_fills_one_slot():
    state = init_state(3, 5, 2)
    tokens, blocks = np.arange(1, 6, dtype=np.int32), np.array([7, 8], np.int32)
    params, _ = pack_params(SamplingParams(), prompt_len=3, seed=1, eos_ids=())
    state = apply_join(state, jnp.asarray(pack_join(1, 4, tokens, blocks, params)))
    assert state.tokens[1].tolist() == [1, 2, 3, 4, 5]
    assert state.block_table[1].tolist() == [7, 8]
    assert state.computed.tolist() == [0, 4, 0, 0]
    np.testing.assert_array_equal(state.params[1], params)
    assert not np.any(state.tokens[jnp.array([0, 2, 3])])
