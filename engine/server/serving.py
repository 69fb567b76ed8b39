"""From a request's body to its answer, for completions and chats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from engine.async_engine import AsyncEngine, RequestStream, merge
from engine.outputs import RequestOutput
from engine.server.errors import ApiError, as_api_error
from engine.server.prepare import Prepared, Preparer
from engine.server.protocol import ChatRequest, CompletionRequest
from engine.server.request_log import RequestLog
from engine.server.responses import Usage
from engine.server.sse import DONE, ClientGone, EventStream, event, until_disconnect

logger = logging.getLogger(__name__)

# Texts up to this many characters are tokenized in the event loop (well under a millisecond).
_SHORT_TEXT = 2000

Prompt = tuple[str | None, list[int]]


class Serving:
    """Answers requests with one engine."""

    def __init__(
        self, engine: AsyncEngine, preparer: Preparer, *, request_log: RequestLog | None = None
    ):
        """Args:
        engine: running.
        preparer: checks requests.
        request_log: gets a line per request.
        """
        self.engine = engine
        self.preparer = preparer
        self._request_log = request_log

    async def answer(
        self, request: CompletionRequest | ChatRequest, receive: Receive, arrival: float
    ) -> Response:
        """Answers one request.

        Args:
          request: parsed body.
          receive: of ASGI, the body having been read.
          arrival: on the clock of time.monotonic.

        Raises:
          Exception: what `as_api_error` turns into an answer.
        """
        prepared = self.preparer.prepare(request)
        prompts = [
            await self._tokenize(prompt, prepared.add_special_tokens) for prompt in prepared.prompts
        ]
        job = _Job(self.engine, prepared, prompts, arrival, self._request_log)
        try:
            await until_disconnect(receive, job.start())
            if request.stream:
                return EventStream(job.events(request), job.close)
            return JSONResponse(await until_disconnect(receive, job.collect()))
        except ClientGone:
            job.close()
            return Response(status_code=499)  # nobody reads it
        except BaseException:
            job.close()
            raise

    async def _tokenize(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if not isinstance(prompt, str):
            return None, prompt
        if len(prompt) <= _SHORT_TEXT:
            return prompt, self.preparer.tokenizer.encode(prompt, add_special_tokens)
        return prompt, await asyncio.to_thread(self.preparer.tokenize, prompt, add_special_tokens)


class _Job:
    """The engine's requests that serve one HTTP request."""

    def __init__(
        self,
        engine: AsyncEngine,
        prepared: Prepared,
        prompts: Sequence[Prompt],
        arrival: float,
        request_log: RequestLog | None,
    ):
        self._engine = engine
        self._prepared = prepared
        self._params = prepared.params
        self._shape = prepared.shape
        self._prompts = prompts
        self._arrival = arrival
        self._log = request_log
        self._streams: list[RequestStream] = []
        self._lengths = [0] * len(prompts)
        self._reasons = ["abort"] * len(prompts)
        self._usage = Usage([len(ids) for _, ids in prompts])
        self._closed = False

    async def start(self) -> None:
        """Hands every prompt to the engine; `close` takes back what was accepted."""
        wake = asyncio.Event()
        prepared = self._prepared
        for i, (text, ids) in enumerate(self._prompts):
            stream = await self._engine.add_request(
                f"{prepared.response_id}-{i}" if len(self._prompts) > 1 else prepared.response_id,
                text,
                ids,
                self._params,
                priority=prepared.priority,
                arrival_time=self._arrival,
                cache_salt=prepared.cache_salt,
                wake=wake,
            )
            self._streams.append(stream)

    def close(self) -> None:
        """Aborts what is unfinished and writes the log."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.close()
        if self._log is not None:
            for i in range(len(self._streams)):
                self._log.write(
                    arrival=self._arrival,
                    prompt_len=len(self._prompts[i][1]),
                    output_len=self._lengths[i],
                    max_tokens=self._params.max_tokens,
                    finish_reason=self._reasons[i],
                )

    def _count(self, prompt: int, output: RequestOutput) -> None:
        new = sum(len(o.token_ids) for o in output.outputs)
        self._usage.add(prompt, new, output.metrics)
        self._lengths[prompt] += new
        if output.finished:
            self._reasons[prompt] = output.outputs[-1].finish_reason or "stop"

    async def collect(self) -> dict[str, Any]:
        """The whole answer."""
        whole: dict[int, RequestOutput] = {}
        try:
            async for i, output in merge(self._streams):
                self._count(i, output)
                if i in whole:
                    whole[i].append(output)
                else:
                    whole[i] = output
        finally:
            self.close()
        outputs = [output for _, output in sorted(whole.items())]
        if any(o.finish_reason in ("abort", "error") for r in outputs for o in r.outputs):
            raise ApiError(500, "the engine ended the request", code="internal_error")
        return self._shape.whole(outputs, self._params.n, self._usage)

    async def events(self, request: CompletionRequest | ChatRequest) -> AsyncIterator[bytes]:
        """The answer as events."""
        shape = self._shape
        usage: dict[str, Any] = {"usage": None} if request.include_usage else {}
        warnings = []
        try:
            for choice in shape.opening(len(self._prompts) * self._params.n):
                yield event(shape.chunk([choice], **usage))
            async for i, output in merge(self._streams):
                self._count(i, output)
                if request.continuous_usage:
                    usage = {"usage": self._usage.body}
                if output.warning is not None and output.finished:
                    warnings.append(output.warning)
                for completion in output.outputs:
                    if completion.text or completion.finished or completion.logprobs:
                        index = i * self._params.n + completion.index
                        yield event(shape.chunk([shape.delta(index, completion)], **usage))
            if request.include_usage:
                more = {"warnings": warnings} if warnings else {}
                yield event(shape.chunk([], usage=self._usage.body, **more))
        except Exception as error:
            problem = as_api_error(error)
            if problem.status == 500:
                logger.exception("A stream failed")
            yield event(problem.body)
        finally:
            self.close()
        yield DONE
