"""Texts of requests: stop strings, n sequences, whole outputs and deltas."""

import pytest

from engine.output_processor import OutputProcessor
from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenOutput
from engine.sampling_params import SamplingParams
from engine.testing import FakeCore
from scheduler import QueueFullError


def _ids(text):
    return [2 + b for b in text.encode()]


def _run(core, processor):
    results = []
    while core.has_unfinished():
        results += processor.process(core.step())
    core.check_integrity()
    assert len(processor) == 0
    return results


def _one(text, params, **settings):
    core = FakeCore(**settings)
    processor = OutputProcessor(core)
    processor.add_request("r", text, _ids(text), params)
    (output,) = _run(core, processor)
    return output


def test_whole_output():
    output = _one("abc", SamplingParams(max_tokens=5, logprobs=1))
    assert output.prompt == "abc"
    assert output.prompt_token_ids == _ids("abc")
    assert output.finished
    (completion,) = output.outputs
    assert completion.text == "abcab"
    assert completion.token_ids == _ids("abcab")
    assert completion.finish_reason == "length"
    assert completion.cumulative_logprob == -2.5
    assert [e[t].decoded_token for t, e in zip(completion.token_ids, completion.logprobs)] == list(
        "abcab"
    )


def test_end_of_sequence_is_an_id_without_text():
    for params, text in (
        (SamplingParams(max_tokens=50), "ababab"),
        (SamplingParams(max_tokens=50, skip_special_tokens=False), "ababab"),
        (
            SamplingParams(
                max_tokens=50, skip_special_tokens=False, include_stop_str_in_output=True
            ),
            "ababab<eos>",
        ),
    ):
        (completion,) = _one("ab", params).outputs
        assert completion.text == text
        assert completion.token_ids == [*_ids("ababab"), 0]
        assert completion.finish_reason == "stop"
        assert completion.stop_reason is None


def test_stop_token():
    params = SamplingParams(max_tokens=50, stop_token_ids=[2 + ord("c")])
    (completion,) = _one("abc", params).outputs
    assert completion.text == "ab"
    assert completion.token_ids == _ids("abc")
    assert completion.stop_reason == 2 + ord("c")


def test_stop_string_ends_in_the_engine_too():
    params = SamplingParams(max_tokens=200, stop=["ca"])
    core = FakeCore()
    processor = OutputProcessor(core)
    processor.add_request("r", None, _ids("abc"), params)
    (output,) = _run(core, processor)
    assert core.num_steps < 10
    (completion,) = output.outputs
    assert completion.text == "ab"
    assert completion.token_ids == _ids("abca")
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == "ca"


def test_stop_string_and_length_at_once():
    (completion,) = _one("abc", SamplingParams(max_tokens=4, stop=["ca"])).outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "ca")
    (completion,) = _one("abc", SamplingParams(max_tokens=3, stop=["ca"])).outputs
    assert (completion.text, completion.finish_reason) == ("abc", "length")


def test_tokens_behind_a_stop_string_are_dropped():
    core = FakeCore()
    processor = OutputProcessor(core)
    processor.add_request("r", None, _ids("abc"), SamplingParams(max_tokens=50, stop=["bc"]))
    tokens = _ids("abcab")
    output = TokenOutput("r", tokens, None, None, None, RequestMetrics())
    (result,) = processor.process([output])
    assert result.outputs[0].text == "a"
    assert result.outputs[0].token_ids == _ids("abc")
    assert processor.process([output]) == []
    assert not core.has_unfinished()


def test_without_detokenization():
    (completion,) = _one("abc", SamplingParams(max_tokens=2, detokenize=False)).outputs
    assert completion.text == ""
    assert completion.token_ids == _ids("ab")


def test_n_sequences():
    seeds = []

    class Core(FakeCore):
        def add_request(self, request_id, prompt_token_ids, params, **more):
            seeds.append((request_id, params.n, params.seed))
            super().add_request(request_id, prompt_token_ids, params, **more)

    core = Core(max_num_seqs=2)
    processor = OutputProcessor(core)
    processor.add_request("r", None, _ids("ab"), SamplingParams(n=3, seed=7, max_tokens=4))
    (output,) = _run(core, processor)
    assert seeds == [("r#0", 1, 7), ("r#1", 1, 8), ("r#2", 1, 9)]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert [c.text for c in output.outputs] == ["abab"] * 3


def test_n_is_all_or_nothing():
    core = FakeCore(max_num_queued_reqs=2)
    processor = OutputProcessor(core)
    with pytest.raises(QueueFullError):
        processor.add_request("r", None, _ids("ab"), SamplingParams(n=3))
    assert not core.has_unfinished()
    assert len(processor) == 0


def test_deltas_add_up():
    core = FakeCore(max_num_seqs=2)
    processor = OutputProcessor(core, delta=True)
    params = SamplingParams(n=3, max_tokens=6, logprobs=2)
    processor.add_request("r", None, _ids("aé"), params)
    whole = None
    for delta in _run(core, processor):
        assert delta.outputs or delta.finished
        if whole is None:
            whole = delta
        else:
            whole.append(delta)
    assert whole.finished
    other = OutputProcessor(core)
    other.add_request("r", None, _ids("aé"), params)
    (expected,) = _run(core, other)
    whole.outputs.sort(key=lambda o: o.index)
    for got, want in zip(whole.outputs, expected.outputs, strict=True):
        assert got == want
        assert got.text == "aéaé"


def test_abort():
    core = FakeCore()
    processor = OutputProcessor(core, delta=True)
    for name in ("r", "s"):
        processor.add_request(name, None, _ids("ab"), SamplingParams(n=2, max_tokens=50))
    processor.process(core.step())
    assert processor.abort("r")
    assert not processor.abort("r")
    outputs = processor.process(core.step())
    assert {o.request_id for o in outputs} == {"s"}
    assert processor.abort_all() == ["s"]
    assert not core.has_unfinished()
    core.check_integrity()


def test_ids_may_be_used_again_but_not_twice():
    core = FakeCore()
    processor = OutputProcessor(core)
    processor.add_request("r", None, _ids("a"), SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="'r' is in use"):
        processor.add_request("r", None, _ids("a"), SamplingParams(max_tokens=1))
    _run(core, processor)
    processor.add_request("r", None, _ids("a"), SamplingParams(max_tokens=1))
    assert len(_run(core, processor)) == 1


def test_metrics_of_several_sequences():
    parts = [
        RequestMetrics(1, 10, 4, 0.5, 2.0),
        RequestMetrics(2, 5, 8, 0.25, 3.0),
        RequestMetrics(0, 0, 0, None, None),
    ]
    assert RequestMetrics.combine(parts) == RequestMetrics(3, 15, 8, 0.25, 2.0)
    assert RequestMetrics.combine(parts[:1]) is parts[0]


def test_appending_keeps_a_warning():
    first = RequestOutput(
        "r", None, [1], [CompletionOutput(0, "a", [1])], False, RequestMetrics(), "w"
    )
    later = RequestOutput("r", None, [1], [CompletionOutput(1, "b", [2])], True, RequestMetrics())
    first.append(later)
    assert first.warning == "w"
    assert first.finished
    assert [o.text for o in first.outputs] == ["a", "b"]
