"""Command lines of vLLM's users, rewritten."""

import pytest

from engine.server.argv import normalize_argv

BOOLEANS = {"reserve_full_sequence", "enable_prefix_caching", "warmup"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max-num-seqs=4 --max_model_len 8", "--max_num_seqs=4 --max_model_len 8"),
        ("-seed=3", "--seed=3"),
        ("--no-enable-prefix-caching", "--noenable_prefix_caching"),
        ("--no_warmup --warmup --nowarmup", "--nowarmup --warmup --nowarmup"),
        ("--no-scheduler-reserve-full-isl", "--noreserve_full_sequence"),
        ("--scheduler-reserve-full-isl=false", "--reserve_full_sequence=false"),
        ("--num-gpu-blocks-override 7", "--num_kv_blocks 7"),
        ("--gpu-memory-utilization=0.5", "--device_memory_utilization=0.5"),
        ("--model=a-b/c-d_e --port 1", "--model=a-b/c-d_e --port 1"),
        ("--seed -5 --watermark -0.1", "--seed -5 --watermark -0.1"),
        ("some/model --port=1", "--model=some/model --port=1"),
        ("serve some/model", "--model=some/model"),
        ("serve", ""),
        ("--api-key a b --port 2", "--api_key a --api_key b --port 2"),
        ("--api-key=a b", "--api_key=a b"),
        ("--disable-log-requests --port=1", "--port=1"),
        ("--port=1 -- --max-x", "--port=1 -- --max-x"),
        ("", ""),
    ],
)
def test_lines(line, expected):
    assert normalize_argv(line.split(), BOOLEANS, {"api_key"}) == expected.split()
