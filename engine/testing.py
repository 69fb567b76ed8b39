"""An engine without a device, for tests and measurements of what lies above it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.chat_template import ChatTemplate
from engine.outputs import Logprob, RequestMetrics, TokenOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from scheduler import Request, RequestStatus, Scheduler, SchedulerConfig

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte: id 0 ends a sequence, 1 begins one, 2 + b is the byte b."""
    alphabet = _byte_chars()
    vocab = {"<eos>": 0, "<bos>": 1, **{c: 2 + b for b, c in enumerate(alphabet)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = level  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<eos>", "<bos>"])
    return Tokenizer(
        backend,
        eos_token_ids=(0,),
        bos_token_id=1,
        chat_template=ChatTemplate(TEMPLATE, {"eos_token": "<eos>", "bos_token": "<bos>"}),
    )


def _byte_chars() -> list[str]:
    """The byte-level alphabet in byte order (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [table[b] for b in range(256)]


def repeat_prompt(tokens: Sequence[int], prompt_len: int) -> int:
    """The prompt over and over, then end-of-sequence after the third time."""
    generated = len(tokens) - prompt_len
    return 0 if generated >= 3 * prompt_len else tokens[generated % prompt_len]


class FakeCore:
    """`EngineCore` with the real scheduler and a rule in place of the model.

    Attributes:
      fail: raised by the next step, if set.
      step_seconds: how long a step takes.
    """

    def __init__(
        self,
        *,
        rule: Callable[[Sequence[int], int], int] = repeat_prompt,
        step_seconds: float = 0.0,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ):
        """Args:
        rule: (all tokens so far, prompt length) -> next token.
        step_seconds: time that every step takes.
        tokenizer: None is `byte_tokenizer`.
        **settings: of scheduler.SchedulerConfig.
        """
        settings = {
            "num_blocks": 512, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64,
            "max_model_len": 512, **settings,
        }  # fmt: skip
        self.scheduler = Scheduler(SchedulerConfig(**settings))
        self.tokenizer = tokenizer or byte_tokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.model_name = "fake"
        self.rule = rule
        self.step_seconds = step_seconds
        self.fail: BaseException | None = None
        self.num_steps = 0
        self._active: dict[str, tuple[Request, SamplingParams]] = {}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """As the real one."""
        if not len(prompt_token_ids):
            raise ValueError("the prompt is empty: it needs at least one token")
        params.check_vocabulary(self.vocab_size)
        limit = self.scheduler.config.max_model_len
        if len(prompt_token_ids) > limit - 1:
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens; with max_model_len={limit} at "
                f"most {limit - 1} leave room for one token of output"
            )
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= self.vocab_size:
            raise ValueError(
                f"prompt token id {max(prompt_token_ids)} is outside the vocabulary of "
                f"{self.vocab_size} tokens"
            )
        stops = () if params.ignore_eos else self.tokenizer.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=np.asarray(prompt_token_ids, np.int32),
            max_tokens=params.max_tokens or limit - len(prompt_token_ids),
            stop_token_ids=(*stops, *(params.stop_token_ids or ())),
            ignore_eos=params.ignore_eos,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request)
        self._active[request_id] = (request, params)

    def abort(self, request_id: str) -> bool:
        """As the real one."""
        self._active.pop(request_id, None)
        return self.scheduler.abort(request_id)

    def finish(self, request_id: str, stop_reason: str) -> None:
        """As the real one."""
        if self._active.pop(request_id, None) is not None:
            self.scheduler.finish(
                request_id, RequestStatus.FINISHED_STOPPED, stop_reason=stop_reason
            )

    def has_unfinished(self) -> bool:
        """As the real one."""
        return self.scheduler.has_unfinished()

    def check_integrity(self) -> None:
        """As the real one."""
        self.scheduler.check_integrity()

    def summary(self) -> str:
        """As the real one."""
        return "An engine without a device"

    def step(self) -> list[TokenOutput]:
        """One step of every scheduled request."""
        if self.fail is not None:
            raise self.fail
        self.num_steps += 1
        if self.step_seconds:
            time.sleep(self.step_seconds)
        plan = self.scheduler.schedule()
        tokens = np.zeros(len(plan.slots), np.int32)
        for row, slot in enumerate(plan.slots):
            request = self.scheduler.slot_requests[int(slot)]
            if plan.samples[row] and request is not None:
                tokens[row] = self.rule(request.all_token_ids.tolist(), request.prompt_len)
        ended = [r for r in plan.ended_requests if r.request_id in self._active]
        result = self.scheduler.update(plan, tokens)
        outputs = [self._output(r, None) for r in ended]
        outputs += [
            self._output(request, int(token))
            for request, token in zip(result.requests, result.tokens)
            if request.request_id in self._active
        ]
        return outputs

    def _output(self, request: Request, token: int | None) -> TokenOutput:
        _, params = self._active[request.request_id]
        finished = request.status.finished
        if finished:
            del self._active[request.request_id]
        logprobs = None
        if params.logprobs is not None and token is not None:
            logprobs = [_logprobs(token, params.logprobs, self.vocab_size)]
        stop = request.stop_reason if finished else None
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[] if token is None else [token],
            logprobs=logprobs,
            finish_reason=request.status.finish_reason if finished else None,
            stop_reason=None if stop in self.tokenizer.eos_token_ids else stop,
            metrics=RequestMetrics(
                request.num_preemptions, request.num_recomputed_tokens, request.num_cached_tokens,
                0.0, 0.0,
            ),
            warning=request.warning,
        )  # fmt: skip


def _logprobs(token: int, most: int, vocab_size: int) -> dict[int, Logprob]:
    """The token with log-probability -0.5, its successors in the vocabulary one less each."""
    return {(token + i) % vocab_size: Logprob(-0.5 - i, i + 1, None) for i in range(max(1, most))}
