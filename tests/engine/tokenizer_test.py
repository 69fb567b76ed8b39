"""Tokenizers from directories and GGUF metadata, and chat templates."""

import itertools
import json
import pathlib

import pytest
import tokenizers
from tokenizers import models as token_models
from tokenizers import pre_tokenizers

from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.gguf_tokenizer import merges_from_scores
from engine.tokenizer import Tokenizer

DATA = pathlib.Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "smollm2_135m_q4_1_greedy.json").read_text())["cases"]


@pytest.fixture(scope="module")
def smollm2():
    from models.loading import default_model_path

    return Tokenizer.load(default_model_path())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["id"])
def test_reference_prompts(smollm2, case):
    chat = case["messages"] is not None
    if chat:
        assert smollm2.apply_chat_template(case["messages"]) == case["prompt"]
    ids = smollm2.encode(case["prompt"], add_special_tokens=not chat)
    assert ids == case["prompt_ids"]
    assert smollm2.encode_aside(case["prompt"], add_special_tokens=not chat) == ids
    assert smollm2.decode(case["output_ids"], skip_special_tokens=False) == case["text_all"]
    joined = b"".join(map(smollm2.bytes.get, case["output_ids"]))
    assert joined.decode("utf-8", "replace") == case["text_all"]


def test_default_model(smollm2):
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert smollm2.vocab_size == 49152
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.token_to_id("<|im_end|>") == 2
    assert smollm2.id_to_token(10**6) is None
    # Digits are cut one by one.
    assert len(smollm2.encode("1234567890")) == 10
    assert smollm2.encode("") == []


# GGUF ------------------------------------------------------------------------------------------


def _metadata(**more):
    tokens = ["<eos>", "<bos>", *(chr(c) for c in range(33, 127)), "Ġ", "ab", "12", "123", "<u>"]
    types = [3, 3] + [1] * (len(tokens) - 3) + [4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


def _spell(tokenizer, text, add_special_tokens=False):
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", "4", "Ġ", "ab"]),
        ("smollm", ["1", "2", "3", "4", "Ġ", "ab"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "ab"]),
        ("llama-bpe", ["123", "4", "Ġ", "ab"]),
        ("tekken", ["1", "2", "3", "4", "Ġ", "ab"]),
    ],
)
def test_numbers_by_pre_tokenizer(pre, pieces):
    tokenizer = Tokenizer.from_gguf_metadata(_metadata(pre=pre))
    assert _spell(tokenizer, "1234 ab") == pieces
    assert tokenizer.decode(tokenizer.encode("1234 ab", False)) == "1234 ab"


def test_marked_tokens_are_found_in_the_text():
    tokenizer = Tokenizer.from_gguf_metadata(_metadata())
    assert _spell(tokenizer, "a<eos>b<u>") == ["a", "<eos>", "b", "<u>"]
    ids = tokenizer.encode("a<eos><u>", False)
    assert tokenizer.decode(ids) == "a<u>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<eos><u>"


def test_first_and_last_token():
    assert _spell(Tokenizer.from_gguf_metadata(_metadata()), "a", True) == ["a"]
    both = Tokenizer.from_gguf_metadata(_metadata(add_bos_token=True, add_eos_token=True))
    assert _spell(both, "a", True) == ["<bos>", "a", "<eos>"]
    assert _spell(both, "a", False) == ["a"]
    llama3 = Tokenizer.from_gguf_metadata(_metadata(pre="llama-bpe"))
    assert _spell(llama3, "a", True) == ["<bos>", "a"]


def test_ends_of_turns_end_sequences():
    metadata = _metadata(eot_token_id=5)
    assert Tokenizer.from_gguf_metadata(metadata).eos_token_ids == (0, 5)
    metadata["tokenizer.ggml.tokens"][1] = "<|im_end|>"
    assert Tokenizer.from_gguf_metadata(metadata).eos_token_ids == (0, 5, 1)


def _sentencepiece_metadata():
    pieces = [
        ("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3),
        *((f"<0x{b:02X}>", 0, 6) for b in range(256)),
        ("▁", -10, 1), ("h", -11, 1), ("e", -12, 1), ("l", -13, 1), ("o", -14, 1),
        ("he", -1, 1), ("ll", -2, 1), ("hell", -3, 1), ("▁hell", -4, 1), ("▁h", -0.5, 1),
        ("el", -5, 1),
    ]  # fmt: skip
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [p for p, _, _ in pieces],
        "tokenizer.ggml.scores": [float(s) for _, s, _ in pieces],
        "tokenizer.ggml.token_type": [t for _, _, t in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _sentencepiece_reference(text, scores):
    """SentencePiece's BPE as it is defined: join the best-scored pair until none is left."""
    parts = list(text)
    while True:
        pairs = [
            (scores[a + b], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in scores
        ]
        if not pairs:
            return parts
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.mark.parametrize("text", ["hello", "hell", "he", "hel", "lleho", "elhello", "hellhell el"])
def test_sentencepiece_merges(text):
    metadata = _sentencepiece_metadata()
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    scores = {
        p: s
        for p, s, t in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
        )
        if t == 1
    }
    expected = _sentencepiece_reference("▁" + text.replace(" ", "▁"), scores)
    assert _spell(tokenizer, text) == expected
    assert tokenizer.decode(tokenizer.encode(text, False)) == text


def test_sentencepiece_bytes_and_first_token():
    tokenizer = Tokenizer.from_gguf_metadata(_sentencepiece_metadata())
    assert _spell(tokenizer, "é", True) == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hello é", False)) == "hello é"


def test_merges_of_equal_score_keep_the_vocabulary_order():
    merges = merges_from_scores(["a", "b", "ab", "ba", "aba"], [0, 0, -1, -1, -1], [1] * 5)
    assert merges == [("a", "b"), ("a", "ba"), ("b", "a"), ("ab", "a")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"pre": "mystery"}, "'mystery'"),
        ({"tokens": None}, "no tokenizer"),
        ({"merges": None}, "merges"),
        ({"token_type": [1]}, "1 entries"),
        ({"model": "llama"}, "scores"),
    ],
    ids=str,
)
def test_unsupported_gguf_tokenizers(change, words):
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_gguf_metadata(_metadata(**change))


# Directories -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    vocab = {"<eos>": 0, "<bos>": 1, "a": 2, "b": 3, "<end>": 4}
    backend = tokenizers.Tokenizer(token_models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>", "<bos>", "<end>"])
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def _write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_directory(folder):
    config = {"eos_token": {"content": "<eos>"}, "bos_token": "<bos>", "chat_template": "old"}
    _write(folder, "tokenizer_config.json", config)
    _write(folder, "generation_config.json", {"eos_token_id": [4, 0]})
    _write(folder, "chat_template.jinja", "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_ids == (4, 0)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<bos>x<eos>"
    # The file's own truncation is not ours.
    assert len(tokenizer.encode("a b a b a b")) == 6
    assert Tokenizer.load(folder / "tokenizer.json").vocab_size == tokenizer.vocab_size


def test_directory_falls_back(folder):
    _write(folder, "config.json", {"eos_token_id": 4})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_ids == (4,)
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template([])
    assert tokenizer.apply_chat_template([], chat_template="given") == "given"


def test_named_templates(folder):
    templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    _write(folder, "tokenizer_config.json", {"chat_template": templates})
    assert Tokenizer.load(folder).apply_chat_template([]) == "d"


def test_unusable_directories(folder, tmp_path):
    _write(folder, "tokenizer_config.json", "{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not readable JSON"):
        Tokenizer.load(folder)
    _write(folder, "tokenizer.json", "{}")
    with pytest.raises(ValueError, match=r"not a valid tokenizer\.json"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json.*--tokenizer"):
        Tokenizer.load(folder)
    with pytest.raises(ValueError, match=r"missing\.gguf does not exist"):
        Tokenizer.load(tmp_path / "missing.gguf")


def test_lone_surrogates_are_refused(folder):
    tokenizer = Tokenizer.load(folder)
    for encode in (tokenizer.encode, tokenizer.encode_aside):
        with pytest.raises(ValueError, match="surrogate"):
            encode("a\ud800")


# Templates -------------------------------------------------------------------------------------


def test_template_helpers():
    source = (
        "{%- for m in messages -%}{% if loop.index == 2 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}\n{% endfor %}{% generation %}[{{ strftime_now('%Y')|length }}]"
        "{% endgeneration %}{{ tools is none }}{{ extra }}"
    )
    rendered = ChatTemplate(source).render([{"content": "<é>"}, {"content": 2}], extra="!")
    assert rendered == '{"content": "<é>"}\n[4]True!'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[5].content.strip() }}", "refused|failed"),
        ("{{ ''.__class__.__mro__ }}", "refused|failed"),
        ("{% set _ = messages.append(1) %}", "refused|failed"),
        ("{{ 1 / 0 }}", "failed"),
    ],
)
def test_templates_that_fail(source, words):
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_templates_that_do_not_compile():
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}")
