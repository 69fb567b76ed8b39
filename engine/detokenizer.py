"""Text from tokens as they come, and stop strings wherever the tokens cut them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.tokenizer import Tokenizer

# Without exact bytes per token, text is decoded in a window. Broken characters may keep the
# window from moving; after this many tokens it moves all the same, so that work stays bounded.
_LONGEST_WINDOW = 16


class StopChecker:
    """Finds the first stop string in a growing text, in constant amortised time per character.

    One Knuth-Morris-Pratt automaton per string. Its state is the length of the longest prefix of
    the string that the text ends with: exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]):
        """Args:
        stops: non-empty strings.
        """
        self._stops = [(stop, _failure(stop)) for stop in stops]
        self._states = [0] * len(stops)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Reads more text.

        Returns:
          None, or (end, stop): the string that is complete first, and where in `text` it ends.
          Of several that end at the same character the longest one is taken.
        """
        states = self._states
        for position, char in enumerate(text):
            found = None
            for i, (stop, failure) in enumerate(self._stops):
                state = states[i]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    if found is None or len(stop) > len(found):
                        found = stop
                    state = failure[state - 1]
                states[i] = state
            if found is not None:
                return position + 1, found
        return None

    @property
    def held_back(self) -> int:
        """Characters at the end of the text that may yet become part of a stop string."""
        return max(self._states)


def _failure(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper border."""
    table = [0] * len(pattern)
    state = 0
    for i in range(1, len(pattern)):
        while state and pattern[state] != pattern[i]:
            state = table[state - 1]
        if pattern[state] == pattern[i]:
            state += 1
        table[i] = state
    return table


class _ByteText:
    """Text by each token's bytes: constant time per token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._get = tokenizer.bytes.get
        self._skipped = tokenizer.bytes.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._get(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowText:
    """Text by decoding the last tokens twice, for decoders whose tokens depend on neighbours."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._skipped = tokenizer.bytes.special_ids if skip_special_tokens else frozenset()
        self._ids: list[int] = []
        self._shown = 0  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        known, full = self._texts()
        waits = full.endswith("\ufffd") or len(full) <= len(known)
        if waits and len(self._ids) - self._shown < _LONGEST_WINDOW:
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return full[len(known) :]

    def flush(self) -> str:
        known, full = self._texts()
        self._ids, self._shown = [], 0
        return full[len(known) :]

    def _texts(self) -> tuple[str, str]:
        known = self._decode(self._ids[: self._shown], skip_special_tokens=self._skip)
        return known, self._decode(self._ids, skip_special_tokens=self._skip)


class Detokenizer:
    """The text of one sequence, given out as far as nothing can change it any more.

    Never gives out part of a character, nor the beginning of what may become a stop string.

    Attributes:
      stop_reason: the stop string that was found, None before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
    ):
        """Args:
        tokenizer: of the model.
        stop: strings that end the text.
        min_tokens: stop strings in the text of the first so many tokens do not count.
        skip_special_tokens: special tokens leave no text.
        include_stop_str_in_output: keep the stop string in the text.
        """
        kind = _ByteText if tokenizer.bytes.exact else _WindowText
        self._text = kind(tokenizer, skip_special_tokens)
        self._stops = StopChecker(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._uncounted = min_tokens
        self._pending = ""
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is final now. Nothing follows a stop string."""
        if self.stop_reason is not None:
            return ""
        return self._add(self._text.push(token_id))

    def finish(self) -> str:
        """Returns what was held back, once no token follows; broken characters as U+FFFD."""
        if self.stop_reason is not None:
            return ""
        # The sequence ended by itself: a stop string that only appears now is part of the text.
        rest, self._pending = self._pending + self._text.flush(), ""
        return rest

    def _add(self, new: str) -> str:
        if self._stops is None:
            return new
        if self._uncounted > 0:
            self._uncounted -= 1
            return new
        found = self._stops.feed(new)
        text = self._pending + new
        if found is None:
            keep = self._stops.held_back
            out, self._pending = text[: len(text) - keep], text[len(text) - keep :]
            return out
        end, self.stop_reason = len(self._pending) + found[0], found[1]
        self._pending = ""
        return text[: end if self._include_stop else end - len(self.stop_reason)]
