"""The engine's loop on a tiny model: nothing around a request changes its tokens."""

import dataclasses

import numpy as np
import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.compile_cache import CompileCounter
from engine.core import EngineCore

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def _prompts(count, seed=0, low=1, high=60):
    rng = np.random.default_rng(seed)
    return [
        {"prompt_token_ids": rng.integers(2, 96, int(rng.integers(low, high))).tolist()}
        for _ in range(count)
    ]


def _tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm(tiny_settings):
    return LLM(**tiny_settings, progress=False)


@pytest.fixture(scope="module")
def expected(tiny_settings):
    """Each prompt alone, without overlap, prefix cache or chunks."""
    quiet = {
        **tiny_settings,
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 128,
        "warmup": False,
    }
    llm = LLM(**quiet, progress=False)
    return [_tokens(llm.generate(p, GREEDY, use_tqdm=False))[0] for p in _prompts(16)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"async_scheduling": False},
        {"max_decode_steps": 4},
        {"max_decode_steps": 8, "num_kv_blocks": 10, "enable_prefix_caching": False},
        {"cpu_kernels": "xla"},
        {"max_num_batched_tokens": 8},
        {"num_kv_blocks": 10, "enable_prefix_caching": False},
        {"num_kv_blocks": 10, "enable_prefix_caching": True},
        {"num_kv_blocks": 10, "watermark": 0.1},
        {"num_kv_blocks": 10, "watermark": "auto"},
        {"num_kv_blocks": 10, "reserve_full_sequence": False, "async_scheduling": False},
    ],
    ids=str,
)
def test_tokens_do_not_change(tiny_settings, expected, change):
    llm = LLM(**{**tiny_settings, "warmup": False, **change}, progress=False)
    outputs = llm.generate(_prompts(16), GREEDY, use_tqdm=False)
    assert _tokens(outputs) == expected
    again = llm.generate(_prompts(16), GREEDY, use_tqdm=False)
    assert _tokens(again) == expected
    if change.get("num_kv_blocks") == 10 and not change.get("watermark"):
        assert sum(o.metrics.num_preemptions for o in outputs) > 0
    llm.core.check_integrity()
    assert not llm.core.has_unfinished()


def test_nothing_compiles_after_warm_up(llm):
    counter = CompileCounter()
    for rows in range(1, 9):
        prompts = _prompts(rows, seed=rows, low=1, high=100)
        params = [SamplingParams(max_tokens=1 + i, temperature=i % 2) for i in range(rows)]
        llm.generate(prompts, params, use_tqdm=False)
    for length in range(1, 127, 7):
        llm.generate({"prompt_token_ids": [3] * length}, GREEDY, use_tqdm=False)
    everything = SamplingParams(
        top_k=3, top_p=0.9, min_p=0.01, presence_penalty=1, frequency_penalty=1,
        repetition_penalty=1.1, logit_bias={4: 1.0}, min_tokens=2, logprobs=3, max_tokens=5,
    )  # fmt: skip
    llm.generate(_prompts(3), everything, use_tqdm=False)
    assert counter.count == 0


def test_seeded_draws_do_not_depend_on_batch_mates(llm):
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True)
        for i in range(8)
    ]
    prompts = _prompts(8, seed=5)
    together = _tokens(llm.generate(prompts, params, use_tqdm=False))
    for i in (0, 3, 7):
        alone = _tokens(llm.generate(prompts[i], params[i], use_tqdm=False))[0]
        assert alone == together[i]
    assert len({tuple(t) for t in together}) == 8


def test_n_gives_different_sequences_in_order(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(_prompts(1), params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    (again,) = llm.generate(_prompts(1), params, use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in output.outputs]


def test_stop_token_is_kept_and_named(llm):
    (free,) = llm.generate(_prompts(1), GREEDY, use_tqdm=False)
    ids = free.outputs[0].token_ids
    stop = ids[5]
    params = dataclasses.replace(GREEDY, stop_token_ids=[stop])
    (output,) = llm.generate(_prompts(1), params, use_tqdm=False)
    assert output.outputs[0].token_ids == ids[: ids.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_min_tokens_delays_the_stop(llm):
    (free,) = llm.generate(_prompts(1), GREEDY, use_tqdm=False)
    stop = free.outputs[0].token_ids[0]
    params = dataclasses.replace(GREEDY, stop_token_ids=[stop], min_tokens=6)
    (output,) = llm.generate(_prompts(1), params, use_tqdm=False)
    ids = output.outputs[0].token_ids
    assert len(ids) >= 6
    assert stop not in ids[:6]


def test_stop_string_ends_and_frees(llm):
    (free,) = llm.generate("hello there", GREEDY, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[4:7]
    params = dataclasses.replace(GREEDY, stop=stop)
    (output,) = llm.generate("hello there", params, use_tqdm=False)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    llm.core.check_integrity()


def test_logprobs(llm):
    params = dataclasses.replace(GREEDY, logprobs=4, max_tokens=6)
    (output,) = llm.generate(_prompts(1), params, use_tqdm=False)
    completion = output.outputs[0]
    assert len(completion.logprobs) == 6
    for token, reported in zip(completion.token_ids, completion.logprobs, strict=True):
        assert reported[token].rank == 1
        assert len(reported) == 4
        values = sorted((r.logprob for r in reported.values()), reverse=True)
        assert reported[token].logprob == values[0]
    total = sum(r[t].logprob for t, r in zip(completion.token_ids, completion.logprobs))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_abort_in_flight_frees_everything(tiny_settings):
    core = EngineCore(EngineConfig(**tiny_settings, warmup=False), progress=False)
    for i in range(6):
        core.add_request(f"r{i}", [5 + i] * 30, GREEDY)
    seen = set()
    for step in range(200):
        seen |= {output.request_id for output in core.step()}
        if step == 3:
            assert core.abort("r1")
            assert not core.abort("r1")
            assert core.abort("r5")
            seen.clear()
        core.check_integrity()
        if not core.has_unfinished():
            break
    assert not core.has_unfinished()
    assert seen == {"r0", "r2", "r3", "r4"}
    assert core.scheduler.kv_cache_usage == 0


@pytest.mark.parametrize(
    ("ids", "params", "named"),
    [
        ([], GREEDY, "empty"),
        ([96], GREEDY, "96"),
        ([-1], GREEDY, "-1"),
        ([1] * 128, GREEDY, "128 tokens"),
        ([[1]], GREEDY, "flat list"),
        ([1], dataclasses.replace(GREEDY, stop_token_ids=[500]), "500"),
    ],
)
def test_refused_requests_leave_nothing_behind(llm, ids, params, named):
    with pytest.raises(ValueError) as error:
        llm.generate([{"prompt_token_ids": [3]}, {"prompt_token_ids": ids}], params, use_tqdm=False)
    assert named in str(error.value)
    assert not llm.core.has_unfinished()
    llm.core.check_integrity()


def test_a_derived_max_model_len_is_lowered_to_the_pool(tiny_settings):
    settings = {**tiny_settings, "num_kv_blocks": 3, "max_model_len": None, "warmup": False}
    llm = LLM(**settings, progress=False)
    assert llm.core.sizes.max_model_len == 32
    assert "max_model_len lowered from 256 to the pool's 32 tokens" in llm.core.summary()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [3] * 30}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].finish_reason == "length"


def test_max_model_len_beyond_the_pool_names_both(tiny_settings):
    with pytest.raises(ValueError, match=r"3 KV blocks.*32 tokens.*max_model_len=128"):
        LLM(**{**tiny_settings, "num_kv_blocks": 3, "warmup": False}, progress=False)


def test_length_limit(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [9] * 100}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 28
    assert output.outputs[0].finish_reason == "length"


def test_summary_says_what_was_sized(llm):
    summary = llm.core.summary()
    assert "200 blocks as asked for" in summary
    assert "199 usable blocks x 16 = 3184 tokens" in summary
    assert "max_num_seqs 8" in summary


def test_a_run_of_steps_is_one_dispatch_and_ends_early(tiny_settings, llm, monkeypatch):
    monkeypatch.setattr("engine.core._DECODE_RUN_S", 1e6)  # as long as the setting allows
    settings = {**tiny_settings, "max_decode_steps": 8, "async_scheduling": False, "warmup": False}
    many = LLM(**settings, progress=False)
    stats = many.core.scheduler.stats
    params = dataclasses.replace(GREEDY, max_tokens=25)
    (output,) = many.generate(_prompts(1), params, use_tqdm=False)
    # The prompt and its first token, one step to measure, two runs of eight, and one of seven.
    assert stats.num_steps == 5
    ids = output.outputs[0].token_ids
    assert ids == llm.generate(_prompts(1), params, use_tqdm=False)[0].outputs[0].token_ids

    stop = dataclasses.replace(params, stop_token_ids=[ids[3]])
    (output,) = many.generate(_prompts(1), stop, use_tqdm=False)
    assert output.outputs[0].token_ids == ids[: ids.index(ids[3]) + 1]
    # The device stopped with the row, not at the end of its run of eight.
    prompt = len(_prompts(1)[0]["prompt_token_ids"])
    assert int(many.core.runner.state.computed[0]) == prompt + ids.index(ids[3])
    many.core.check_integrity()
