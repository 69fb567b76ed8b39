"""What comes out of the engine: tokens of a step, and the text of a request."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What it took to serve a sequence. Times in seconds, None while not known.

    Attributes:
      num_preemptions: how often the sequence lost its KV blocks.
      num_recomputed_tokens: tokens computed again because of that.
      num_cached_tokens: prompt tokens found in the prefix cache at first admission.
      queue_s: from arrival to the first admission.
      ttft_s: from arrival to the first token.
    """

    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None

    @staticmethod
    def combine(parts: list[RequestMetrics]) -> RequestMetrics:
        """Of several sequences of one prompt: counts add up, the first token is the earliest."""
        if len(parts) == 1:
            return parts[0]
        queued = [p.queue_s for p in parts if p.queue_s is not None]
        first = [p.ttft_s for p in parts if p.ttft_s is not None]
        return RequestMetrics(
            num_preemptions=sum(p.num_preemptions for p in parts),
            num_recomputed_tokens=sum(p.num_recomputed_tokens for p in parts),
            num_cached_tokens=max((p.num_cached_tokens for p in parts), default=0),
            queue_s=min(queued, default=None),
            ttft_s=min(first, default=None),
        )


@dataclasses.dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one step.

    Attributes:
      logprob: natural logarithm, before temperature and penalties.
      rank: 1 is the likeliest; None where it was not determined.
      decoded_token: the token's text, None until somebody needs it.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)  # frozen would double the cost of making one
class TokenOutput:
    """New tokens of one sequence, straight from a step.

    Attributes:
      request_id: of the sequence.
      token_ids: new tokens in order; empty where it ended without one.
      logprobs: per new token, the likeliest ids and the drawn one; None unless asked for.
      finish_reason: "stop", "length", "abort", "error", or None while it runs.
      stop_reason: the stop id or stop string that ended it, None for end-of-sequence.
      metrics: so far.
      warning: a sentence for the user, or None.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    metrics: RequestMetrics
    warning: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated sequence: all of it, or what is new (a delta).

    Attributes:
      index: which of the request's n sequences.
      text: without the stop string or stop token, unless asked for.
      token_ids: including the token that ended it.
      cumulative_logprob: sum over the whole sequence so far; None unless logprobs were asked for.
      logprobs: one entry per token of token_ids, or None.
      finish_reason, stop_reason: see `TokenOutput`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, later: CompletionOutput) -> None:
        """Adds a later delta of the same sequence to this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """State of a request, or what changed since the last one.

    Attributes:
      request_id: as given.
      prompt: its text, None where token ids were given.
      prompt_token_ids: its tokens.
      outputs: its sequences by index; in a delta only those that changed.
      finished: all n sequences have ended.
      metrics: over all sequences.
      warning: a sentence for the user, or None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    warning: str | None = None

    def append(self, later: RequestOutput) -> None:
        """Adds a later delta of the same request to this one."""
        mine = {output.index: output for output in self.outputs}
        for output in later.outputs:
            if output.index in mine:
                mine[output.index].append(output)
            else:
                self.outputs.append(output)
        self.finished = later.finished
        self.metrics = later.metrics
        self.warning = later.warning or self.warning
