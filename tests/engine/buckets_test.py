"""Shapes cover the limits and are chosen tightly."""

import pytest

from engine.buckets import Buckets, decode_row_buckets, mixed_token_buckets


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 32, 64, 100, 256])
def test_decode_buckets_end_at_the_limit(limit):
    sizes = decode_row_buckets(limit)
    assert sizes[-1] == limit
    assert sizes[0] == 1
    assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize("limit", [1, 16, 17, 512, 2048, 5000])
def test_mixed_buckets_end_at_the_limit(limit):
    sizes = mixed_token_buckets(limit)
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))


def test_every_step_within_the_limits_has_a_tight_shape():
    buckets = Buckets(max_num_seqs=24, max_num_batched_tokens=100)
    for rows in range(1, 25):
        shape = buckets.select(num_rows=rows, num_tokens=rows, num_decodes=rows)
        assert shape.decode
        assert shape.num_rows >= rows
        assert not any(rows <= s.num_rows < shape.num_rows for s in buckets.decode)
        for tokens in range(rows + 1, 101):
            shape = buckets.select(num_rows=rows, num_tokens=tokens, num_decodes=rows - 1)
            assert not shape.decode
            assert shape.num_tokens >= tokens
            assert shape.num_rows >= rows
    assert len(set(buckets.all)) == len(buckets.all)


def test_one_token_prefill_is_not_a_decode():
    buckets = Buckets(8, 64)
    assert not buckets.select(num_rows=1, num_tokens=1, num_decodes=0).decode


@pytest.mark.parametrize(
    ("rows", "tokens", "decodes", "flag"),
    [(9, 9, 9, "--max_num_seqs"), (8, 65, 0, "--max_num_batched_tokens")],
)
def test_over_the_largest_names_the_flag(rows, tokens, decodes, flag):
    with pytest.raises(ValueError, match=flag):
        Buckets(8, 64).select(num_rows=rows, num_tokens=tokens, num_decodes=decodes)


def test_every_step_is_padded_to_the_least_size():
    buckets = Buckets(4, 64, least=8)
    assert all(shape.num_rows >= 8 and shape.num_tokens >= 8 for shape in buckets.all)
    assert buckets.select(num_rows=1, num_tokens=1, num_decodes=1).num_rows == 8
    assert len({(s.num_tokens, s.num_rows, s.decode) for s in buckets.all}) == len(buckets.all)
