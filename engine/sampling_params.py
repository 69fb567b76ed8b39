"""How the next token is chosen and when a request ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 32
MAX_N = 128


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not a finite number")
    return float(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is not an integer")
    return value


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Choices for one request, with the names and defaults vLLM users know.

    Attributes:
      n: sequences to generate for the prompt.
      max_tokens: most tokens to generate; None is up to the model's length.
      min_tokens: end-of-sequence and stop ids cannot be drawn before this many tokens.
      temperature: 0 is greedy.
      top_k: keep the k likeliest tokens; -1 or 0 keeps all.
      top_p: keep the smallest set of tokens with this much probability.
      min_p: drop tokens less likely than min_p times the likeliest.
      seed: makes the draw repeatable; None draws a fresh seed.
      presence_penalty, frequency_penalty: subtracted for tokens already generated (once; per count).
      repetition_penalty: divides (positive) or multiplies (negative) the logits of tokens in the
        prompt or the output.
      logit_bias: token id -> number added to its logit, in [-100, 100].
      stop: strings that end the text; not included unless include_stop_str_in_output.
      stop_token_ids: ids that end the request.
      ignore_eos: end-of-sequence does not end the request.
      logprobs: number of likeliest tokens to report per step, the drawn one always among them;
        None reports nothing.
      skip_special_tokens: special tokens do not appear in the text.
      detokenize: False leaves the text empty (and forbids `stop`).
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        if not 1 <= _integer("n", self.n) <= MAX_N:
            raise ValueError(f"n={self.n} is not between 1 and {MAX_N}")
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 1:
            raise ValueError(f"max_tokens={self.max_tokens} is not at least 1")
        if _integer("min_tokens", self.min_tokens) < 0:
            raise ValueError(f"min_tokens={self.min_tokens} is negative")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if not 0.0 <= _number("temperature", self.temperature) <= 100.0:
            raise ValueError(f"temperature={self.temperature} is not between 0 and 100")
        if _integer("top_k", self.top_k) < -1:
            raise ValueError(f"top_k={self.top_k} is neither -1 (off) nor at least 0")
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]")
        if not 0.0 <= _number("min_p", self.min_p) <= 1.0:
            raise ValueError(f"min_p={self.min_p} is not in [0, 1]")
        if self.seed is not None:
            _integer("seed", self.seed)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= _number(name, getattr(self, name)) <= 2.0:
                raise ValueError(f"{name}={getattr(self, name)} is not in [-2, 2]")
        if not 0.0 < _number("repetition_penalty", self.repetition_penalty) <= 100.0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} is not in (0, 100]")
        if (
            self.logprobs is not None
            and not 0 <= _integer("logprobs", self.logprobs) <= MAX_LOGPROBS
        ):
            raise ValueError(f"logprobs={self.logprobs} is not between 0 and {MAX_LOGPROBS}")
        self._check_logit_bias()
        self._check_stops()

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(bias)} entries; the limit is {MAX_LOGIT_BIAS}")
        for token, value in bias.items():
            _integer("logit_bias key", token)
            if not -100.0 <= _number(f"logit_bias[{token}]", value) <= 100.0:
                raise ValueError(f"logit_bias[{token}]={value} is not in [-100, 100]")

    def _check_stops(self) -> None:
        stop = self.stop_strings
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError("stop contains an empty string or something that is not a string")
        if stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True")
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(ids)} ids; the limit is {MAX_STOP_TOKEN_IDS}"
            )
        for token in ids:
            if _integer("stop_token_ids", token) < 0:
                raise ValueError(f"stop_token_ids contains the negative id {token}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def needs_history(self) -> bool:
        """Whether a penalty looks at what was said before."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError where a token id lies outside the vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids or ():
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} names token {token}; the vocabulary has {vocab_size}")
