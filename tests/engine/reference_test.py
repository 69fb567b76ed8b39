"""Greedy output of the real default model equals the recorded reference, whatever happens around it.

The reference is transformers in float32 on the same weights. Its smallest gap between the best and
the second-best token is 0.003 in log-probability, so any real fault changes tokens.
"""

import json
import pathlib

import pytest

from engine import LLM, SamplingParams

REFERENCE = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "smollm2_135m_q4_1_greedy.json").read_text()
)
CASES = REFERENCE["cases"]
GREEDY = SamplingParams(
    temperature=0, max_tokens=REFERENCE["new_tokens"], ignore_eos=True, logprobs=5
)


def _prompts(cases=CASES):
    return [{"prompt_token_ids": case["prompt_ids"]} for case in cases]


def _check(outputs, cases=CASES):
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].token_ids == case["output_ids"], case["id"]
        assert output.outputs[0].finish_reason == "length"


@pytest.fixture(scope="module")
def llm():
    return LLM(
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        num_kv_blocks=400,
        enable_prefix_caching=False,
        progress=False,
    )


def test_alone(llm):
    for case in CASES:
        _check(llm.generate(_prompts([case]), GREEDY, use_tqdm=False), [case])
    llm.core.check_integrity()


def test_in_a_batch_with_log_probabilities(llm):
    outputs = llm.generate(_prompts(), GREEDY, use_tqdm=False)
    _check(outputs)
    for case, output in zip(CASES, outputs, strict=True):
        for step, expected in enumerate(case["top5_first16"]):
            got = output.outputs[0].logprobs[step]
            for token, logprob in expected:
                assert got[token].logprob == pytest.approx(logprob, abs=1e-3), (case["id"], step)
    llm.core.check_integrity()


def test_text(llm):
    params = SamplingParams(temperature=0, max_tokens=64)
    for case in CASES:
        if case["kind"] != "chat" or case["first_eos_index"] is None:
            continue
        (output,) = llm.chat(case["messages"], params, use_tqdm=False)
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].text == case["text_until_eos"], case["id"]
        assert output.outputs[0].finish_reason == "stop"


def test_chunks_of_16_and_preemptions():
    """A pool that holds a fraction of the batch: requests are preempted and recomputed in chunks.

    Admitting by chunk instead of by sequence makes the long prompts collide, again and again.
    """
    cases = sorted(CASES, key=lambda case: -len(case["prompt_ids"]))
    longest = len(cases[0]["prompt_ids"]) + REFERENCE["new_tokens"]
    llm = LLM(
        dtype="float32",
        max_model_len=-(-longest // 16) * 16,
        max_num_seqs=12,
        max_num_batched_tokens=16,
        num_kv_blocks=-(-longest // 16) + 6,
        reserve_full_sequence=False,
        enable_prefix_caching=False,
        progress=False,
    )
    outputs = llm.generate(_prompts(cases), GREEDY, use_tqdm=False)
    _check(outputs, cases)
    assert sum(output.metrics.num_preemptions for output in outputs) >= 10
    assert sum(output.metrics.num_recomputed_tokens for output in outputs) > 0
    llm.core.check_integrity()
