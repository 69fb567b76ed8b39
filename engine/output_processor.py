"""Turns the engine's tokens into texts: fans a prompt out to its n sequences and joins them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from engine.detokenizer import Detokenizer
from engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer


class Core(Protocol):
    """What is needed of `engine.core.EngineCore`."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def finish(self, request_id: str, stop_reason: str) -> None: ...


class _Sequence:
    """One of a request's sequences, running in the engine under an id of its own."""

    def __init__(self, core_id: str, index: int, parent: _Request, detokenizer: Detokenizer | None):
        self.core_id = core_id
        self.parent = parent
        self.detokenizer = detokenizer
        self.metrics = RequestMetrics()
        self.output = CompletionOutput(index)
        self.cumulative_logprob = 0.0


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    sequences: list[_Sequence]
    unfinished: int
    warning: str | None = None


class OutputProcessor:
    """Owns detokenization, stop strings and n > 1 above one engine.

    Single-threaded like the engine, whose `add_request`, `abort` and `finish` it calls.
    """

    def __init__(self, core: Core, *, delta: bool = False):
        """Args:
        core: the engine.
        delta: `process` returns what is new for every request that moved; otherwise only
          finished requests, whole.
        """
        self._core = core
        self._tokenizer = core.tokenizer
        self._delta = delta
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._requests)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Hands a request to the engine, all of its sequences or none.

        Args:
          request_id: unique among unfinished requests.
          prompt: the text, if known; only for the output.
          prompt_token_ids: the prompt.
          params: of the request.
          priority, arrival_time, cache_salt: see the engine.

        Raises:
          ValueError: the engine refused it.
          scheduler.QueueFullError: too many wait.
        """
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use")
        request = _Request(request_id, prompt, list(prompt_token_ids), params, [], params.n)
        for index in range(params.n):
            core_id = request_id if params.n == 1 else f"{request_id}#{index}"
            try:
                self._core.add_request(
                    core_id,
                    prompt_token_ids,
                    _child_params(params, index),
                    priority=priority,
                    arrival_time=arrival_time,
                    cache_salt=cache_salt,
                )
            except BaseException:
                self._drop(request)
                raise
            sequence = _Sequence(core_id, index, request, self._detokenizer(params))
            request.sequences.append(sequence)
            self._sequences[core_id] = sequence
        self._requests[request_id] = request

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            stop=params.stop_strings,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )

    def abort(self, request_id: str) -> bool:
        """Ends a request without further output; False where it is unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._drop(request)
        return True

    def abort_all(self) -> list[str]:
        """Ends every request without further output; returns their ids."""
        ids = list(self._requests)
        for request_id in ids:
            self.abort(request_id)
        return ids

    def _drop(self, request: _Request) -> None:
        for sequence in request.sequences:
            if self._sequences.pop(sequence.core_id, None) is not None:
                self._core.abort(sequence.core_id)

    def process(self, outputs: Sequence[TokenOutput]) -> list[RequestOutput]:
        """Takes a step's tokens in.

        Returns:
          With delta=True one entry per request that moved, holding only what is new. Otherwise
          the requests that have finished now, with all their sequences.
        """
        touched: dict[str, _Request] = {}
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:  # it ended by a stop string or was aborted while in flight
                continue
            self._take(sequence, output)
            touched[sequence.parent.request_id] = sequence.parent
        results = []
        for request_id, request in touched.items():
            finished = request.unfinished == 0
            if finished:
                del self._requests[request_id]
            if self._delta:
                changed = self._take_deltas(request)
                if changed or finished:
                    results.append(self._result(request, changed, finished))
            elif finished:
                results.append(self._result(request, [s.output for s in request.sequences], True))
        return results

    @staticmethod
    def _take_deltas(request: _Request) -> list[CompletionOutput]:
        deltas = []
        for sequence in request.sequences:
            output = sequence.output
            if output.token_ids or output.text or output.finish_reason is not None:
                sequence.output = CompletionOutput(output.index)
                deltas.append(output)
        return deltas

    @staticmethod
    def _result(
        request: _Request, outputs: list[CompletionOutput], finished: bool
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            metrics=RequestMetrics.combine([s.metrics for s in request.sequences]),
            warning=request.warning,
        )

    def _take(self, sequence: _Sequence, output: TokenOutput) -> None:
        """Adds new tokens to a sequence, up to a stop string if one is completed."""
        text, stop = self._detokenize(sequence, output)
        sequence.metrics = output.metrics
        sequence.parent.warning = output.warning or sequence.parent.warning
        kept = output.token_ids if stop is None else output.token_ids[: stop[0]]
        target = sequence.output
        target.text += text
        target.token_ids += kept
        if output.logprobs is not None:
            reported = output.logprobs[: len(kept)]
            self._add_logprobs(sequence, kept, reported)
        if stop is not None:
            target.finish_reason, target.stop_reason = "stop", stop[1]
            if output.finish_reason is None:
                self._core.finish(sequence.core_id, stop[1])
        else:
            target.finish_reason, target.stop_reason = output.finish_reason, output.stop_reason
        if target.finish_reason is not None:
            del self._sequences[sequence.core_id]
            sequence.parent.unfinished -= 1

    def _detokenize(
        self, sequence: _Sequence, output: TokenOutput
    ) -> tuple[str, tuple[int, str] | None]:
        """New text, and (tokens used, stop string) if a stop string was completed."""
        detokenizer = sequence.detokenizer
        if detokenizer is None:
            return "", None
        params = sequence.parent.params
        ids = output.token_ids
        # The token that ended the sequence is an id, not a word, unless the user wants it shown.
        ended_by_token = output.finish_reason == "stop"
        hide_last = ended_by_token and not params.include_stop_str_in_output
        text = ""
        for used, token_id in enumerate(ids[: len(ids) - hide_last], 1):
            text += detokenizer.push(token_id)
            if detokenizer.stop_reason is not None:
                return text, (used, detokenizer.stop_reason)
        if output.finish_reason is not None:
            text += detokenizer.finish()
        return text, None

    def _add_logprobs(
        self, sequence: _Sequence, tokens: Sequence[int], reported: list[dict[int, Logprob]]
    ) -> None:
        get = self._tokenizer.bytes.get
        exact = self._tokenizer.bytes.exact
        for token, entries in zip(tokens, reported):
            sequence.cumulative_logprob += entries[token].logprob
            for token_id, entry in entries.items():
                if exact:
                    entry.decoded_token = get(token_id).decode("utf-8", "replace")
                else:
                    entry.decoded_token = self._tokenizer.decode([token_id], False)
        target = sequence.output
        target.logprobs = (target.logprobs or []) + reported
        target.cumulative_logprob = sequence.cumulative_logprob


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Of one of n sequences: each draws with a seed of its own."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else params.seed + index
    return dataclasses.replace(params, n=1, seed=seed)
