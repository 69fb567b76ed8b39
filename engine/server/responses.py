"""Answers in the shape of OpenAI's API, whole or chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.tokenizer import Tokenizer


class Usage:
    """Token counts of an HTTP request, over its prompts and sequences."""

    def __init__(self, prompt_lens: Sequence[int]):
        """Args:
        prompt_lens: tokens of each prompt.
        """
        self._prompt_tokens = sum(prompt_lens)
        self._completion_tokens = 0
        self._metrics = [RequestMetrics()] * len(prompt_lens)

    def add(self, prompt: int, num_tokens: int, metrics: RequestMetrics) -> None:
        """Counts new tokens of one prompt; `metrics` replaces what was known of it."""
        self._completion_tokens += num_tokens
        self._metrics[prompt] = metrics

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's fields, and what preemptions cost."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(m.num_cached_tokens for m in self._metrics)
            },
            "num_preemptions": sum(m.num_preemptions for m in self._metrics),
            "num_recomputed_tokens": sum(m.num_recomputed_tokens for m in self._metrics),
        }


class AnswerFormat:
    """What both endpoints' answers have in common.

    A choice's index counts over prompts, then over the n sequences of each.
    """

    whole_object: str
    chunk_object: str

    def __init__(self, response_id: str, model: str, tokenizer: Tokenizer):
        """Args:
        response_id: of the answer.
        model: the name that the client used.
        tokenizer: for log-probabilities.
        """
        self._head = {"id": response_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer

    def whole(self, outputs: Sequence[RequestOutput], n: int, usage: Usage) -> dict[str, Any]:
        """The answer in one piece.

        Args:
          outputs: finished, one per prompt in the prompts' order.
          n: sequences per prompt.
          usage: of all of it.
        """
        choices = [
            self.choice(i * n + completion.index, completion)
            for i, output in enumerate(outputs)
            for completion in sorted(output.outputs, key=lambda o: o.index)
        ]
        warnings = [output.warning for output in outputs if output.warning is not None]
        body = {**self._head, "object": self.whole_object, "choices": choices}
        body["usage"] = usage.body
        if warnings:
            body["warnings"] = warnings
        return body

    def chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One event of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": list(choices), **more}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Choices of the chunks that come before any text."""
        return []

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """A finished sequence."""
        raise NotImplementedError

    def delta(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """What is new of a sequence."""
        raise NotImplementedError


class CompletionFormat(AnswerFormat):
    """/v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        echoed: Mapping[int, str] | None = None,
    ):
        """Args:
        response_id, model, tokenizer: see above.
        echoed: text to put before each choice, by its index.
        """
        super().__init__(response_id, model, tokenizer)
        self._echoed = dict(echoed or {})
        self._offsets: dict[int, int] = {}

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """Text, log-probabilities and why it ended."""
        return {
            "index": index,
            "text": self._echoed.pop(index, "") + output.text,
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    delta = choice

    def _logprobs(self, index: int, output: CompletionOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        tokens, chosen, top, offsets = [], [], [], []
        for token_id, entries in zip(output.token_ids, output.logprobs):
            spelling = self._spell(token_id, entries[token_id])
            tokens.append(spelling)
            chosen.append(entries[token_id].logprob)
            top.append({self._spell(i, entry): entry.logprob for i, entry in entries.items()})
            offsets.append(offset)
            offset += len(entries[token_id].decoded_token or "")
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _spell(self, token_id: int, entry: Logprob) -> str:
        """The token's text; part of a character is spelt as its bytes, so that keys differ."""
        text = entry.decoded_token or ""
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self._tokenizer.bytes.get(token_id))


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, response_id: str, model: str, tokenizer: Tokenizer, *, top_logprobs: int):
        """Args:
        response_id, model, tokenizer: see above.
        top_logprobs: alternatives to list per token.
        """
        super().__init__(response_id, model, tokenizer)
        self._top_logprobs = top_logprobs

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """The role comes first."""
        return [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(num_choices)
        ]

    def choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """The assistant's message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def delta(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """More of the assistant's message."""
        return {
            "index": index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        content = []
        for token_id, entries in zip(output.token_ids, output.logprobs):
            likeliest = sorted(entries.items(), key=lambda item: -item[1].logprob)
            top = [self._entry(i, entry) for i, entry in likeliest[: self._top_logprobs]]
            content.append({**self._entry(token_id, entries[token_id]), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": entry.decoded_token,
            "logprob": entry.logprob,
            "bytes": list(self._tokenizer.bytes.get(token_id)),
        }
