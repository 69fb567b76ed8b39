"""Requests of OpenAI's API (with vLLM's additions), checked field by field."""

from __future__ import annotations

import json
import logging
from typing import Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError, validation_error

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
_MAX_STOPS = 64
_warned: set[str] = set()


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _SamplingRequest(BaseModel):
    """Fields that both endpoints share."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    min_tokens: int | None = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    priority: int | None = 0
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    add_special_tokens: bool | None = None

    # Fields whose meaning we know and do not offer: (name, values that ask for nothing).
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "prompt_logprobs": (),
        "truncate_prompt_tokens": (),
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "logits_processors": ([],),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "structured_outputs": (),
        "response_format": ({"type": "text"},),
        "kv_transfer_params": (),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
    }
    # Fields of OpenAI's service that change nothing about the answer.
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
         "prompt_cache_retention", "request_id"}
    )  # fmt: skip

    def check_extras(self) -> None:
        """Refuses known fields that are not supported, and warns once of unknown ones.

        Raises:
          ApiError: with status 400.
        """
        for name, value in (self.model_extra or {}).items():
            if name in self.UNSUPPORTED:
                if value is not None and value not in self.UNSUPPORTED[name]:
                    raise ApiError(
                        400, f"{name} is not supported", param=name, code="unsupported_parameter"
                    )
            elif name not in self.IGNORED and name not in _warned and len(_warned) < 1000:
                _warned.add(name)
                logger.warning("Ignoring the unknown request field %r", name[:100])

    def _params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        if len(stop) > _MAX_STOPS:
            raise ApiError(
                400, f"stop has {len(stop)} strings; the limit is {_MAX_STOPS}", param="stop"
            )
        given = {
            "n": self.n,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            logit_bias=_token_keys(self.logit_bias),
            stop=stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=logprobs,
            **{name: value for name, value in given.items() if value is not None},
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionRequest(_SamplingRequest):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises ValueError, ApiError."""
        self.check_extras()
        if self.suffix:
            raise ApiError(
                400, "suffix is not supported", param="suffix", code="unsupported_parameter"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(
                400, f"best_of={self.best_of} other than n={self.n or 1} is not supported",
                param="best_of", code="unsupported_parameter",
            )  # fmt: skip
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400, "logprobs of an echoed prompt are not supported",
                param="echo", code="unsupported_parameter",
            )  # fmt: skip
        return self._params(max_tokens=self.max_tokens, logprobs=self.logprobs)


class ChatMessage(BaseModel):
    """One message; further fields reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one text. Raises ApiError for images and sounds."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(_text_part(part) for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatRequest(_SamplingRequest):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_SamplingRequest.UNSUPPORTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "continue_final_message": (False,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = _SamplingRequest.IGNORED | {"parallel_tool_calls"}

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises ValueError, ApiError."""
        self.check_extras()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        limit = self.max_completion_tokens
        return self._params(
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


def _text_part(part: dict[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in ("text", "input_text"):
        raise ApiError(
            400, f"content of type {kind!r} is not supported; this model reads text",
            param="messages", code="unsupported_content",
        )  # fmt: skip
    if not isinstance(text, str):
        raise ApiError(400, "a text part needs a string in its field text", param="messages")
    return text


def _token_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON writes token ids as strings."""
    if not bias:
        return None
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        wrong = next(t for t in bias if not t.strip().lstrip("-").isdigit())
        raise ApiError(
            400, f"logit_bias names {wrong[:60]!r}, which is no token id", param="logit_bias"
        ) from None


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """Reads a JSON body.

    Raises:
      ApiError: with status 400 and what is wrong.
    """
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    return check_body(kind, value)


def check_body(kind: type[Body], value: Any) -> Body:
    """Checks a body that was read already. Raises ApiError."""
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise validation_error(error) from error
