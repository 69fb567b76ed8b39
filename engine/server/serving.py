"""From a request's body to its answer, for completions and chats."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from engine.async_engine import AsyncEngine, RequestStream, merge
from engine.output_processor import Core
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError, as_api_error
from engine.server.protocol import ChatRequest, CompletionRequest
from engine.server.request_log import RequestLog
from engine.server.responses import ChatFormat, CompletionFormat, Usage, _Format
from engine.server.sse import DONE, ClientGone, EventStream, event, until_disconnect

logger = logging.getLogger(__name__)

# Sequences that one HTTP request may ask for, prompts times n.
MAX_SEQUENCES = 1024
# Texts up to this many characters are tokenized in the event loop (well under a millisecond).
_SHORT_TEXT = 2000
# Normalisation may shorten a text before it is cut into tokens.
_NORMALISATION = 4

Prompt = tuple[str | None, list[int]]


class Serving:
    """Answers requests with one engine."""

    def __init__(
        self,
        engine: AsyncEngine,
        core: Core,
        *,
        model_names: Sequence[str],
        max_model_len: int,
        priorities: bool = False,
        chat_template: str | None = None,
        request_log: RequestLog | None = None,
    ):
        """Args:
        engine: running.
        core: the engine under it; only its tokenizer is used.
        model_names: names that requests may use; the first one is the model's.
        max_model_len: longest sequence in tokens.
        priorities: the scheduler looks at priorities.
        chat_template: Jinja text to use instead of the model's.
        request_log: gets a line per request.
        """
        self.engine = engine
        self.tokenizer = core.tokenizer
        self.model_names = tuple(model_names)
        self.max_model_len = max_model_len
        self._priorities = priorities
        self._chat_template = chat_template
        self._request_log = request_log

    # Endpoints --------------------------------------------------------------------------------

    async def completions(
        self, request: CompletionRequest, receive: Receive, arrival: float
    ) -> Response:
        """/v1/completions. Raises what `as_api_error` understands."""
        model = self._check_model(request.model)
        params = self._check_params(request, len(request.prompts))
        special = True if request.add_special_tokens is None else request.add_special_tokens
        prompts = [await self._tokenize(p, special) for p in request.prompts]
        if not prompts:
            raise ApiError(400, "prompt is an empty list", param="prompt")
        echoed = {}
        if request.echo:
            for i, (text, ids) in enumerate(prompts):
                text = self.tokenizer.decode(ids) if text is None else text
                echoed |= {i * params.n + j: text for j in range(params.n)}
        response_id = f"cmpl-{uuid.uuid4().hex}"
        shape = CompletionFormat(response_id, model, self.tokenizer, echoed=echoed)
        return await self._answer(response_id, request, prompts, params, shape, receive, arrival)

    async def chat(self, request: ChatRequest, receive: Receive, arrival: float) -> Response:
        """/v1/chat/completions. Raises what `as_api_error` understands."""
        model = self._check_model(request.model)
        params = self._check_params(request, 1)
        if not request.messages:
            raise ApiError(400, "messages is an empty list", param="messages")
        messages = [m.for_template() for m in request.messages]
        variables = dict(request.chat_template_kwargs or {})
        for name in ("messages", "chat_template", "add_generation_prompt"):
            if name in variables:
                raise ApiError(
                    400, f"chat_template_kwargs must not set {name}", param="chat_template_kwargs"
                )
        text = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            chat_template=self._chat_template,
            **variables,
        )
        prompt = await self._tokenize(text, bool(request.add_special_tokens))
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        shape = ChatFormat(
            response_id, model, self.tokenizer, top_logprobs=request.top_logprobs or 0
        )
        return await self._answer(response_id, request, [prompt], params, shape, receive, arrival)

    # Checks -----------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> str:
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; this server has "
                + ", ".join(map(repr, self.model_names)),
                param="model",
                code="model_not_found",
            )
        return name

    def _check_params(
        self, request: CompletionRequest | ChatRequest, num_prompts: int
    ) -> SamplingParams:
        params = request.sampling_params()
        if params.n * num_prompts > MAX_SEQUENCES:
            raise ApiError(
                400,
                f"{num_prompts} prompts times n={params.n} are {params.n * num_prompts} "
                f"sequences; the limit is {MAX_SEQUENCES} per request",
                param="n",
            )
        if request.priority and not self._priorities:
            raise ApiError(
                400,
                f"priority={request.priority} needs a server with --scheduling_policy=priority",
                param="priority",
            )
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        return params

    async def _tokenize(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if not isinstance(prompt, str):
            return None, prompt
        # A text that is certainly too long is not worth minutes of tokenizing.
        least = len(prompt) // (self.tokenizer.max_token_chars * _NORMALISATION)
        if least >= self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} characters, which are more than {least} tokens; "
                f"with max_model_len={self.max_model_len} at most {self.max_model_len - 1} leave "
                "room for one token of output",
                param="prompt",
                code="context_length_exceeded",
            )
        if len(prompt) <= _SHORT_TEXT:
            return prompt, self.tokenizer.encode(prompt, add_special_tokens)
        encode = self.tokenizer.encode_aside
        return prompt, await asyncio.to_thread(encode, prompt, add_special_tokens)

    # Answers ----------------------------------------------------------------------------------

    async def _answer(
        self,
        response_id: str,
        request: CompletionRequest | ChatRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        shape: _Format,
        receive: Receive,
        arrival: float,
    ) -> Response:
        job = _Job(self.engine, response_id, prompts, params, arrival, self._request_log)
        try:
            await until_disconnect(receive, job.start(request.priority or 0, request.cache_salt))
            if request.stream:
                return EventStream(job.events(shape, request), job.close)
            body = await until_disconnect(receive, job.collect(shape))
        except ClientGone:
            job.close()
            return Response(status_code=499)  # nobody reads it
        except BaseException:
            job.close()
            raise
        return JSONResponse(body)


class _Job:
    """The engine's requests that serve one HTTP request."""

    def __init__(
        self,
        engine: AsyncEngine,
        response_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        arrival: float,
        request_log: RequestLog | None,
    ):
        self._engine = engine
        self._id = response_id
        self._prompts = prompts
        self._params = params
        self._arrival = arrival
        self._log = request_log
        self._streams: list[RequestStream] = []
        self._lengths = [0] * len(prompts)
        self._reasons = ["abort"] * len(prompts)
        self._usage = Usage([len(ids) for _, ids in prompts])
        self._closed = False

    async def start(self, priority: int, cache_salt: str | None) -> None:
        """Hands every prompt to the engine; `close` takes back what was accepted."""
        wake = asyncio.Event()
        for i, (text, ids) in enumerate(self._prompts):
            stream = await self._engine.add_request(
                self._id if len(self._prompts) == 1 else f"{self._id}-{i}",
                text,
                ids,
                self._params,
                priority=priority,
                arrival_time=self._arrival,
                cache_salt=cache_salt,
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

    async def collect(self, shape: _Format) -> dict[str, Any]:
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
        choices = [
            shape.choice(i * self._params.n + completion.index, completion)
            for i, output in sorted(whole.items())
            for completion in sorted(output.outputs, key=lambda o: o.index)
        ]
        for choice in choices:
            if choice["finish_reason"] in ("abort", "error"):
                raise ApiError(500, "the engine ended the request", code="internal_error")
        warnings = [w for _, o in sorted(whole.items()) if (w := o.warning) is not None]
        return shape.whole(choices, self._usage, warnings)

    async def events(
        self, shape: _Format, request: CompletionRequest | ChatRequest
    ) -> AsyncIterator[bytes]:
        """The answer as events."""
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
