"""The bytes that each token stands for, so that text can be put together token by token."""

from __future__ import annotations

import json
from typing import Any

import tokenizers


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, read backwards.

    Bytes that print stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    table.update({chr(256 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


class TokenBytes:
    """Bytes per token, worked out once per token.

    Only decoders that treat every token alike can be read this way: byte-level BPE, SentencePiece
    (with byte fallback) and plain joining. For others `exact` is False.

    Attributes:
      exact: whether `get` gives what the tokenizer's own decoder would.
      special_ids: ids that `skip_special_tokens` leaves out.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        """Reads the decoder's description."""
        self._backend = backend
        self._kind, self._replacements = _decoder_kind(_description(backend))
        self.exact = self._kind is not None
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._cache: dict[int, bytes] = {}

    def get(self, token_id: int) -> bytes:
        """Bytes of a token; empty for ids that the vocabulary lacks (padding of the embedding)."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._work_out(token_id)
        return found

    def _work_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "byte_level":
            codes = [_BYTE_OF_CHAR.get(c) for c in token]
            if None in codes:  # an added token with spaces or letters of other scripts
                return token.encode()
            return bytes(codes)  # pyright: ignore[reportArgumentType]
        if self._kind == "byte_fallback" and len(token) == 6 and token.startswith("<0x"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, text in self._replacements:
            token = token.replace(pattern, text)
        return token.encode()


def _decoder_kind(decoder: dict[str, Any] | None) -> tuple[str | None, list[tuple[str, str]]]:
    """("byte_level" | "byte_fallback" | "plain" | None for unknown, replacements in order)."""
    if decoder is None:
        return None, []
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kind, replacements = "plain", []
    for step in steps:
        name = step["type"]
        if name == "ByteLevel":
            kind = "byte_level"
        elif name == "ByteFallback":
            kind = "byte_fallback"
        elif name == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif name == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif name not in ("Fuse", "Strip"):
            # Strip takes the space that the first word got; what we write always follows a prompt.
            return None, []
    if kind == "plain" and not any(s["type"] in ("Fuse", "Metaspace") for s in steps):
        return None, []
    return kind, replacements


def _description(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The decoder's entry of tokenizer.json, without writing out the vocabulary."""
    decoder: Any = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())
