"""Text from tokens: equal to decoding everything, never half a character, stops found anywhere."""

import random
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.detokenizer import Detokenizer, StopChecker
from engine.testing import byte_tokenizer
from engine.tokenizer import Tokenizer

BYTES = byte_tokenizer()


def _push_all(detokenizer, ids):
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def _sentencepiece():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁he", "l", "o"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(content=" ", left=1)]
    )  # fmt: skip
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def _wordpiece():
    vocab = {w: i for i, w in enumerate(["[UNK]", "play", "##ing", "cat", "##s", ",", "the"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


@given(st.text(max_size=40))
def test_pieces_add_up(text):
    ids = BYTES.encode(text)
    pieces = _push_all(Detokenizer(BYTES), ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(2, 257), max_size=40))
def test_broken_bytes_equal_decoding_at_once(ids):
    assert "".join(_push_all(Detokenizer(BYTES), ids)) == BYTES.decode(ids)


def test_sentencepiece():
    tokenizer = _sentencepiece()
    assert tokenizer.bytes.exact
    rocket = [3 + b for b in "🚀".encode()]
    ids = [260, 261, 261, 262, *rocket, 259, 262]
    pieces = _push_all(Detokenizer(tokenizer), ids)
    # The first space stays: the text continues a prompt.
    assert pieces[:4] == [" he", "l", "l", "o"]
    assert pieces[4:8] == ["", "", "", "🚀"]
    assert "".join(pieces) == " hello🚀 o"


def test_decoders_that_look_at_neighbours():
    tokenizer = _wordpiece()
    assert not tokenizer.bytes.exact
    ids = tokenizer.encode("the cats, playing the playing cat")
    pieces = _push_all(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(map(bool, pieces)) >= len(ids) - 1


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip):
    ids = [1, *BYTES.encode("a"), 0, *BYTES.encode("b")]
    pieces = _push_all(Detokenizer(BYTES, skip_special_tokens=skip), ids)
    assert "".join(pieces) == ("ab" if skip else "<bos>a<eos>b") == BYTES.decode(ids, skip)


def test_ids_beyond_the_vocabulary_leave_no_text():
    assert _push_all(Detokenizer(BYTES), [100_000]) == ["", ""]


# Stop strings ----------------------------------------------------------------------------------


def _expected(text, stops):
    """Where the stop string that is complete first begins and ends; the longest on a tie."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return None
    end, _, stop = min(ends)
    return end - len(stop), end, stop


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_stops_equal_a_search_of_the_whole_text(text, stops, rng):
    checker, seen, found = StopChecker(stops), 0, None
    while seen < len(text) and found is None:
        step = rng.randint(1, 4)
        found = checker.feed(text[seen : seen + step])
        if found is not None:
            found = seen + found[0], found[1]
        seen += step
        if found is None:
            # What is held back is the longest end that begins a stop string; no more, no less.
            shown = text[:seen]
            longest = max(
                (k for s in stops for k in range(len(s)) if shown.endswith(s[:k])), default=0
            )
            assert checker.held_back == longest
    expected = _expected(text, stops)
    assert found == (expected and expected[1:])


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=5), max_size=3))
def test_text_before_the_stop(text, stops):
    for include in (False, True):
        detokenizer = Detokenizer(BYTES, stop=stops, include_stop_str_in_output=include)
        out = ""
        for token in BYTES.encode(text):
            out += detokenizer.push(token)
            if detokenizer.stop_reason is not None:
                break
        out += detokenizer.finish()
        expected = _expected(text, stops)
        if expected is None:
            assert out == text
            assert detokenizer.stop_reason is None
        else:
            start, end, stop = expected
            assert out == text[: end if include else start]
            assert detokenizer.stop_reason == stop
            assert detokenizer.push(70) == ""


def test_text_of_the_first_min_tokens_does_not_stop():
    detokenizer = Detokenizer(BYTES, stop=["ab"], min_tokens=3)
    out = [detokenizer.push(t) for t in BYTES.encode("abababx")]
    assert out[:5] == ["a", "b", "a", "b", ""]
    assert detokenizer.stop_reason == "ab"


def test_nothing_is_held_back_that_need_not_be():
    detokenizer = Detokenizer(BYTES, stop=["xyz"])
    assert [detokenizer.push(t) for t in BYTES.encode("axyabxy")] == [
        "a", "", "", "xya", "b", "", "",
    ]  # fmt: skip
    assert detokenizer.finish() == "xy"


def test_work_per_token_does_not_grow():
    """Long outputs and long, self-similar stop strings: constant work per character."""
    ids = BYTES.encode("a" * 20_000)
    stops = ["a" * 500 + "b", "a" * 400 + "c"]

    def cost(count):
        best = float("inf")
        for _ in range(3):
            detokenizer = Detokenizer(BYTES, stop=stops)
            start = time.thread_time()
            for token in ids[:count]:
                detokenizer.push(token)
            best = min(best, time.thread_time() - start)
        return best / count

    assert cost(20_000) < 3 * cost(2_000) + 1e-6


def test_broken_characters_do_not_pile_up_in_the_window():
    tokenizer = _sentencepiece()
    tokenizer.bytes.exact = False  # decode in a window
    ids = [3 + 0xE2] * 200
    pieces = _push_all(Detokenizer(tokenizer), ids)
    assert "".join(pieces).count("\ufffd") == 200
    assert max(map(len, pieces)) <= 16


def test_window_and_bytes_agree():
    tokenizer = _sentencepiece()
    rng = random.Random(0)
    for _ in range(30):
        text = "".join(rng.choice(["he", "l", "o", " ", "é", "🚀"]) for _ in range(20))
        ids = tokenizer.encode(text)
        tokenizer.bytes.exact = True
        by_bytes = "".join(_push_all(Detokenizer(tokenizer), ids))
        tokenizer.bytes.exact = False
        by_window = "".join(_push_all(Detokenizer(tokenizer), ids))
        assert by_bytes.lstrip() == by_window.lstrip()
