"""From a checked body to what the engine is asked for, and the shape of the answer."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence

from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError
from engine.server.protocol import ChatRequest, CompletionRequest
from engine.server.responses import AnswerFormat, ChatFormat, CompletionFormat
from engine.tokenizer import Tokenizer

# Sequences that one HTTP request may ask for, prompts times n.
MAX_SEQUENCES = 1024
# Normalisation may shorten a text before it is cut into tokens.
_NORMALISATION = 4


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A request that can be tokenized and run.

    Attributes:
      response_id: of the answer.
      prompts: texts or token ids.
      add_special_tokens: how to tokenize the texts.
      params: for each prompt.
      shape: writes the answer.
      priority, cache_salt: for the engine.
    """

    response_id: str
    prompts: Sequence[str | list[int]]
    add_special_tokens: bool
    params: SamplingParams
    shape: AnswerFormat
    priority: int
    cache_salt: str | None


class Preparer:
    """Checks requests against one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model_names: Sequence[str],
        max_model_len: int,
        priorities: bool = False,
        chat_template: str | None = None,
    ):
        """Args:
        tokenizer: of the model.
        model_names: names that requests may use; the first one is the model's.
        max_model_len: longest sequence in tokens.
        priorities: the scheduler looks at priorities.
        chat_template: Jinja text to use instead of the model's.
        """
        self.tokenizer = tokenizer
        self.model_names = tuple(model_names)
        self.max_model_len = max_model_len
        self._priorities = priorities
        self._chat_template = chat_template

    def prepare(self, request: CompletionRequest | ChatRequest) -> Prepared:
        """Checks a request; tokenizes nothing.

        Raises:
          ApiError, ValueError: it is refused; one sentence.
        """
        if isinstance(request, ChatRequest):
            return self._chat(request)
        return self._completion(request)

    def _completion(self, request: CompletionRequest) -> Prepared:
        model = self._check_model(request.model)
        prompts = request.prompts
        if not prompts:
            raise ApiError(400, "prompt is an empty list", param="prompt")
        params = self._check_params(request, len(prompts))
        echoed = {}
        if request.echo:
            for i, prompt in enumerate(prompts):
                text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
                echoed |= {i * params.n + j: text for j in range(params.n)}
        response_id = f"cmpl-{uuid.uuid4().hex}"
        shape = CompletionFormat(response_id, model, self.tokenizer, echoed=echoed)
        special = request.add_special_tokens is not False
        return self._prepared(request, response_id, prompts, special, params, shape)

    def _chat(self, request: ChatRequest) -> Prepared:
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
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        shape = ChatFormat(
            response_id, model, self.tokenizer, top_logprobs=request.top_logprobs or 0
        )
        special = bool(request.add_special_tokens)
        return self._prepared(request, response_id, [text], special, params, shape)

    @staticmethod
    def _prepared(
        request: CompletionRequest | ChatRequest,
        response_id: str,
        prompts: Sequence[str | list[int]],
        special: bool,
        params: SamplingParams,
        shape: AnswerFormat,
    ) -> Prepared:
        priority, salt = request.priority or 0, request.cache_salt
        return Prepared(response_id, prompts, special, params, shape, priority, salt)

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

    def check_length(self, text: str) -> None:
        """Refuses a text that is certainly too long, without the time that tokenizing it takes.

        Raises:
          ApiError: with status 400.
        """
        least = len(text) // (self.tokenizer.max_token_chars * _NORMALISATION)
        if least >= self.max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(text)} characters, which are more than {least} tokens; "
                f"with max_model_len={self.max_model_len} at most {self.max_model_len - 1} leave "
                "room for one token of output",
                param="prompt",
                code="context_length_exceeded",
            )

    def tokenize(self, prompt: str | list[int], add_special_tokens: bool) -> list[int]:
        """A prompt's tokens. Raises ApiError, ValueError."""
        if not isinstance(prompt, str):
            return prompt
        self.check_length(prompt)
        return self.tokenizer.encode_aside(prompt, add_special_tokens)
