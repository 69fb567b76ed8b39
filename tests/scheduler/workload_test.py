"""Traces: what is read, and what is refused with one sentence."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

from scheduler.workload import load_trace, make_workload, parse_trace, trace_json

CLOSED = {
    "name": "small",
    "mode": "closed_loop",
    "max_concurrency": 2,
    "num_blocks": 100,
    "max_model_len": 512,
    "requests": [
        {"prompt_len": 10, "output_len": 20},
        {"prompt_len": 30, "output_len": 5, "max_tokens": 50},
    ],
}
OPEN = {
    "mode": "open_loop",
    "num_blocks": 100,
    "requests": [
        {"prompt_len": 10, "output_len": 20, "arrival": 0.5},
        {"prompt_len": 30, "output_len": 5, "arrival": 0.5, "priority": 2, "class": "chat"},
    ],
}


def changed(trace, index=None, **fields):
    trace = json.loads(json.dumps(trace))
    target = trace if index is None else trace["requests"][index]
    for name, value in fields.items():
        if value is ...:
            del target[name]
        else:
            target[name] = value
    return trace


def test_reads_a_closed_trace():
    workload = parse_trace(CLOSED)
    assert workload.max_concurrency == 2 and workload.arrivals is None
    assert workload.block_size == 16 and workload.max_num_seqs == 256
    # Without max_tokens only the context bounds an output.
    np.testing.assert_array_equal(workload.max_tokens, [502, 50])
    config = workload.scheduler_config(watermark=0.1)
    assert (config.num_blocks, config.max_model_len, config.watermark) == (100, 512, 0.1)


def test_reads_an_open_trace():
    workload = parse_trace(OPEN)
    np.testing.assert_array_equal(workload.arrivals, [0.5, 0.5])
    np.testing.assert_array_equal(workload.priorities, [0, 2])
    assert workload.classes == ("", "chat")


@pytest.mark.parametrize("trace", [CLOSED, OPEN])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_files_and_round_trip(trace, pack, tmp_path):
    workload = parse_trace(trace)
    path = tmp_path / "trace.json"
    path.write_bytes(pack(json.dumps(trace_json(workload)).encode()))
    again = load_trace(path)
    for field in dataclasses.fields(workload):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(workload, field.name))


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([], "a trace is a JSON object, not list"),
        (changed(CLOSED, requests=[]), "non-empty list 'requests'"),
        (changed(CLOSED, requests=[5]), "entry of 'requests' must be an object"),
        (changed(CLOSED, num_blocks=...), "needs 'num_blocks'"),
        (changed(CLOSED, num_blocks="many"), "num_blocks='many' is not an integer"),
        (changed(CLOSED, num_blocks=0), "num_blocks=0 must be at least 1"),
        (changed(CLOSED, mode="loop"), "mode='loop' is neither"),
        (changed(CLOSED, max_concurrency=...), "max_concurrency=None is not an integer"),
        (changed(CLOSED, max_concurrency=0), "max_concurrency=0 must be at least 1"),
        (changed(CLOSED, 1, prompt_len=0), "request 1: prompt_len=0 must be at least 1"),
        (changed(CLOSED, 1, prompt_len=-4), "request 1: prompt_len=-4 must be at least 1"),
        (changed(CLOSED, 1, prompt_len=1.5), "request 1: prompt_len=1.5 is not an integer"),
        (changed(CLOSED, 0, prompt_len=...), "request 0: prompt_len=None is not an integer"),
        (changed(CLOSED, 0, output_len=0), "request 0: output_len=0 must be at least 1"),
        (changed(CLOSED, 0, max_tokens=0), "request 0: max_tokens=0 must be at least 1"),
        (changed(CLOSED, 0, max_tokens=19), "output_len=20 is more than its max_tokens"),
        (changed(CLOSED, 0, output_len=600), "= 610 is more than max_model_len=512"),
        (
            changed(CLOSED, num_blocks=3),
            "request 1: needs 3 blocks of 16 tokens but the pool has 2 usable ones",
        ),
        (changed(OPEN, 0, arrival=-1.0), "arrival=-1.0 is negative"),
        (changed(OPEN, 0, arrival=None), "arrival=None is not a number of seconds"),
        (changed(OPEN, 0, arrival="now"), "arrival='now' is not a number of seconds"),
        (changed(OPEN, 1, arrival=0.4), "request 1: arrival=0.4 is earlier .* sort the requests"),
    ],
)
def test_refuses_with_one_sentence(trace, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_trace(trace)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"\x1f\x8bbroken", b"[1, 2"])
def test_files_that_are_no_json_are_named(content, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.json is not a JSON trace"):
        load_trace(path)


def test_a_request_that_just_fits_is_taken():
    # The last token of an output is never written: 15 + 18 - 1 = 32 tokens in 2 blocks.
    make_workload("w", [15], [18], num_blocks=3, max_concurrency=1)
    with pytest.raises(ValueError, match="needs 3 blocks"):
        make_workload("w", [15], [19], num_blocks=3, max_concurrency=1)


@pytest.mark.parametrize("loop", [{}, {"arrivals": [0.0], "max_concurrency": 1}])
def test_a_workload_is_open_or_closed(loop):
    with pytest.raises(ValueError, match="either arrivals"):
        make_workload("w", [15], [18], num_blocks=30, **loop)
