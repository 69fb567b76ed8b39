"""Offline generation: `LLM(model).generate(prompts, sampling_params)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams

Prompt = str | Mapping[str, Sequence[int]]


class LLM:
    """A model and its engine in this process, for scripts and notebooks."""

    def __init__(self, model: str | None = None, *, progress: bool = True, **settings: Any):
        """Loads the model and compiles its steps.

        Args:
          model: see `EngineConfig.model`; None is the small default model.
          progress: show progress bars while starting.
          **settings: any other field of `EngineConfig`.

        Raises:
          TypeError: a setting has no such name.
          ValueError: a setting is wrong; one sentence.
        """
        self.core = EngineCore(EngineConfig(model=model, **settings), progress=progress)
        self._processor = OutputProcessor(self.core)
        self._count = 0

    @property
    def tokenizer(self):
        """The model's tokenizer."""
        return self.core.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for every prompt; results come in the prompts' order.

        Args:
          prompts: strings, or {"prompt_token_ids": [...]}; one or a sequence of them.
          sampling_params: one for all, or one for each prompt.
          use_tqdm: show a progress bar.

        Raises:
          ValueError: a prompt or its parameters are wrong. Nothing is generated then.
        """
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        tokenized = [self._tokenize(prompt) for prompt in prompts]
        return self._run(tokenized, self._params(sampling_params, len(tokenized)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation (a list of messages) or a list of them.

        A message is {"role": "system" | "user" | "assistant", "content": text}.
        """
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]
        tokenized = []
        for conversation in messages:
            text = self.tokenizer.apply_chat_template(list(conversation))
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            tokenized.append((text, ids))
        return self._run(tokenized, self._params(sampling_params, len(tokenized)), use_tqdm)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        if "prompt_token_ids" not in prompt:
            raise ValueError('a prompt is a string or {"prompt_token_ids": [...]}')
        return None, list(prompt["prompt_token_ids"])

    @staticmethod
    def _params(
        given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = SamplingParams()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise ValueError(f"{len(given)} sampling_params for {count} prompts")
        return list(given)

    def _run(
        self,
        tokenized: Sequence[tuple[str | None, Sequence[int]]],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        ids = []
        try:
            for (text, token_ids), each in zip(tokenized, params):
                request_id = f"llm-{self._count}"
                self._count += 1
                self._processor.add_request(request_id, text, token_ids, each)
                ids.append(request_id)
            return self._drain(ids, use_tqdm)
        except BaseException:
            for request_id in ids:
                self._processor.abort(request_id)
            raise

    def _drain(self, ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            while len(done) < len(ids):
                for output in self._processor.process(self.core.step()):
                    if output.finished:
                        done[output.request_id] = output
                        bar.update()
        return [done[request_id] for request_id in ids]
