"""Every wrong choice is refused with a sentence that names it."""

import math

import pytest

from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("n", 0, "n=0"),
        ("n", 1000, "n=1000"),
        ("n", 1.5, "n=1.5"),
        ("max_tokens", 0, "max_tokens=0"),
        ("max_tokens", -1, "max_tokens=-1"),
        ("min_tokens", -1, "min_tokens=-1"),
        ("temperature", -0.1, "temperature=-0.1"),
        ("temperature", math.nan, "temperature=nan"),
        ("temperature", True, "temperature=True"),
        ("top_k", -2, "top_k=-2"),
        ("top_p", 0.0, "top_p=0.0"),
        ("top_p", 1.1, "top_p=1.1"),
        ("min_p", 1.5, "min_p=1.5"),
        ("presence_penalty", 2.5, "presence_penalty=2.5"),
        ("frequency_penalty", -2.5, "frequency_penalty=-2.5"),
        ("repetition_penalty", 0.0, "repetition_penalty=0.0"),
        ("logprobs", 21, "logprobs=21"),
        ("logprobs", -1, "logprobs=-1"),
        ("logit_bias", {1: 101.0}, "logit_bias[1]=101.0"),
        ("logit_bias", dict.fromkeys(range(301), 0.0), "301 entries"),
        ("stop", [""], "empty string"),
        ("stop_token_ids", [-1], "-1"),
        ("stop_token_ids", list(range(33)), "33 ids"),
        ("seed", 1.5, "seed=1.5"),
    ],
)
def test_refuses(field, value, named):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_min_tokens_beyond_max_tokens():
    with pytest.raises(ValueError, match="min_tokens=5 exceeds max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_stop_needs_text():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_stop_string_alone_is_one_stop():
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_vocabulary():
    params = SamplingParams(logit_bias={7: 1.0}, stop_token_ids=[3])
    params.check_vocabulary(8)
    with pytest.raises(ValueError, match="logit_bias names token 7"):
        params.check_vocabulary(7)
    with pytest.raises(ValueError, match="stop_token_ids names token 3"):
        SamplingParams(stop_token_ids=[3]).check_vocabulary(3)
