"""A `tokenizers` tokenizer from the metadata of a GGUF file.

GGUF names the tokenizer's kind (`tokenizer.ggml.model`) and, for byte-level BPE, how text is cut
before merging (`tokenizer.ggml.pre`); the names and their meaning are those of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "llama-v3": _LLAMA3_PATTERN,
    "smaug-bpe": _LLAMA3_PATTERN,
    "qwen2": _QWEN2_PATTERN,
    "deepseek-r1-qwen": _QWEN2_PATTERN,
    "tekken": _TEKKEN_PATTERN,
}
# These take the longest token of the vocabulary before they look at merges.
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken"}
_ADD_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_DIGITS_ONE_BY_ONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
_GPT2 = {"default", "gpt-2", "gpt2", "phi-2", "jina-es", "jina-de", "olmo", "roberta-bpe"}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes.

    Args:
      metadata: key -> value; arrays as sequences.

    Raises:
      ValueError: the kind of tokenizer is not supported, or an array is missing or misshapen.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or tokens is None:
        raise ValueError("the GGUF file carries no tokenizer (tokenizer.ggml.tokens is missing)")
    types = metadata.get("tokenizer.ggml.token_type")
    types = [1] * len(tokens) if types is None else [int(t) for t in types]
    if len(types) != len(tokens):
        raise ValueError(
            f"the GGUF file has {len(tokens)} tokens but {len(types)} entries in "
            "tokenizer.ggml.token_type"
        )
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(metadata, tokens, types)
    else:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} is not supported (supported: gpt2, llama); give a "
            "directory with a tokenizer.json by --tokenizer"
        )
    _add_marked_tokens(tokenizer, tokens, types)
    _add_bos_and_eos(tokenizer, metadata, tokens, add_bos)
    return tokenizer


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name in _PATTERNS:
        cut = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERNS[name]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif name in _DIGITS_ONE_BY_ONE:
        cut = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif name in _GPT2:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        known = ", ".join(sorted(_GPT2 | _DIGITS_ONE_BY_ONE | set(_PATTERNS)))
        raise ValueError(
            f"tokenizer.ggml.pre={name!r} is not supported (supported: {known}); give a "
            "directory with a tokenizer.json by --tokenizer"
        )
    lines = metadata.get("tokenizer.ggml.merges")
    if lines is None:
        raise ValueError("the GGUF file has no tokenizer.ggml.merges")
    # Byte-level tokens write a space as "Ġ", so the first space parts the two sides.
    merges = [tuple(line.split(" ", 1)) for line in lines]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,  # pyright: ignore[reportArgumentType]
            ignore_merges=name in _IGNORE_MERGES,
        )
    )
    if _PATTERNS.get(name) is _QWEN2_PATTERN:
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = cut  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer, name in _ADD_BOS_BY_DEFAULT


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError("the GGUF file has no tokenizer.ggml.scores for each of its tokens")
    unknown = next((tokens[i] for i, t in enumerate(types) if t == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (  # pyright: ignore[reportAttributeAccessIssue]
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer, True


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that give what SentencePiece's BPE gives.

    SentencePiece joins the neighbours whose union has the best score; a merge list applies the
    earliest entry first. So: every way to part a piece into two pieces, by score of the whole.
    """
    normal = {
        token: i for i, token in enumerate(tokens) if types[i] not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in normal.items():
        score = -float(scores[index])
        for cut in range(1, len(token)):
            left = normal.get(token[:cut])
            right = normal.get(token[cut:]) if left is not None else None
            if left is not None and right is not None:
                found.append((score, left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_marked_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Control and user-defined tokens are found in the text before it is cut."""
    control = [
        AddedToken(t, special=True, normalized=False)
        for t, kind in zip(tokens, types)
        if kind in (_CONTROL, _UNKNOWN)
    ]
    defined = [
        AddedToken(t, special=False, normalized=False)
        for t, kind in zip(tokens, types)
        if kind == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _add_bos_and_eos(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], add_bos: bool
) -> None:
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    template, special = "$A", {}
    for wanted, key, place in (
        (add_bos, "tokenizer.ggml.bos_token_id", "{token} {template}"),
        (add_eos, "tokenizer.ggml.eos_token_id", "{template} {token}"),
    ):
        index = metadata.get(key)
        if not wanted or index is None:
            continue
        name = f"<token {int(index)}>".replace(" ", "_")
        special[name] = {"id": name, "ids": [int(index)], "tokens": [tokens[int(index)]]}
        template = place.format(token=name, template=template)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=template.split(),
            pair=[*template.split(), "$B:1"],
            special_tokens=list(special.values()),
        )
