"""Load on an OpenAI server: requests, closed or open loop, and the usual figures.

Terms as in public serving benchmarks: TTFT is the time from sending a request to its first token,
ITL the time between streamed chunks, TPOT the mean time per output token after the first, E2E the
time to the last. In a closed loop `max_concurrency` requests are kept under way; in an open loop
they are sent at random times at `request_rate` (a Poisson process), whatever the server does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.http_stream import HttpError, post_events

PERCENTILES = (90, 99)
MAX_REQUESTS = 100_000
MAX_CONNECTIONS = 1024


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """One request: a prompt (text or token ids) or a conversation, and how long the answer is."""

    prompt: str | list[int] | None
    output_len: int
    messages: list[dict[str, str]] | None = None

    @property
    def path(self) -> str:
        """Endpoint."""
        return "/v1/chat/completions" if self.messages else "/v1/completions"

    def body(self, model: str | None, *, ignore_eos: bool, temperature: float) -> dict[str, Any]:
        """JSON body, streaming with usage."""
        body: dict[str, Any] = {
            "max_tokens": self.output_len,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model:
            body["model"] = model
        if ignore_eos:
            body["ignore_eos"] = True
        return body | ({"messages": self.messages} if self.messages else {"prompt": self.prompt})


@dataclasses.dataclass
class Outcome:
    """What became of a request. Times in seconds."""

    started: float = 0.0
    ttft: float = math.nan
    e2e: float = math.nan
    itl: list[float] = dataclasses.field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def random_requests(
    count: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    vocab_size: int = 32000,
    seed: int = 0,
) -> list[LoadRequest]:
    """Random ids; lengths are uniform within +-`range_ratio` of those given.

    Raises ValueError for numbers out of range.
    """
    if not 1 <= count <= MAX_REQUESTS:
        raise ValueError(f"num_prompts={count} is not between 1 and {MAX_REQUESTS}")
    if input_len < 1 or output_len < 1:
        raise ValueError(f"input_len={input_len} and output_len={output_len} must be at least 1")
    if not 0.0 <= range_ratio < 1.0:
        raise ValueError(f"range_ratio={range_ratio} is not in [0, 1)")
    if vocab_size < 200:
        raise ValueError(f"vocab_size={vocab_size} must be at least 200")
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> list[int]:
        low, high = max(1, round(mean * (1 - range_ratio))), round(mean * (1 + range_ratio))
        return rng.integers(low, max(low, high) + 1, count).tolist()

    # The first ids are often special tokens.
    return [
        LoadRequest(rng.integers(100, vocab_size, prompt).tolist(), output)
        for prompt, output in zip(lengths(input_len), lengths(output_len))
    ]


def file_requests(path: pathlib.Path, count: int, output_len: int) -> list[LoadRequest]:
    """The first `count` lines of a JSON lines file, from the start again where it is shorter.

    A line has "prompt" (text or ids) or "messages", and may have "output_len". Raises ValueError
    naming the line, OSError.
    """
    found: list[LoadRequest] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt, messages = value.get("prompt"), value.get("messages")
            length = value.get("output_len", output_len)
        except (json.JSONDecodeError, AttributeError) as error:
            raise ValueError(f"{path} line {number} is not a JSON object") from error
        if bool(prompt) == bool(messages) or not isinstance(prompt or "", (str, list)):
            raise ValueError(f'{path} line {number} needs either "prompt" or "messages"')
        if not isinstance(length, int) or length < 1:
            raise ValueError(
                f"{path} line {number}: output_len={length!r} is not a positive number"
            )
        found.append(LoadRequest(prompt, length, messages))
    if not found:
        raise ValueError(f"{path} holds no request")
    return [found[i % len(found)] for i in range(count)]


async def _send(
    base_url: str,
    request: LoadRequest,
    body: dict[str, Any],
    headers: dict[str, str],
    timeout_s: float,
) -> Outcome:
    outcome = Outcome(started=time.perf_counter())
    chunks, last = 0, outcome.started
    try:
        async with asyncio.timeout(timeout_s):
            async for event in post_events(base_url, request.path, body, headers):
                now = time.perf_counter()
                if usage := event.get("usage"):
                    outcome.input_tokens = usage.get("prompt_tokens", 0)
                    outcome.output_tokens = usage.get("completion_tokens", 0)
                if not event.get("choices"):
                    continue
                choice = event["choices"][0]
                delta = choice.get("delta", {})
                if not (choice.get("text") or delta.get("content")):
                    # A chat's opening chunk brings a role, a text's last chunk only the reason; a
                    # token whose text is held back is part of the next.
                    continue
                chunks += 1
                if chunks == 1:
                    outcome.ttft = now - outcome.started
                else:
                    outcome.itl.append(now - last)
                last = now
        outcome.e2e = last - outcome.started
        outcome.output_tokens = outcome.output_tokens or chunks
        if not chunks:
            outcome.error = "no token came"
    except TimeoutError:
        outcome.error = f"no end within {timeout_s:g} s"
    except (HttpError, OSError, ValueError, asyncio.IncompleteReadError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def run_load(
    base_url: str,
    requests: Sequence[LoadRequest],
    *,
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
    seed: int = 0,
    model: str | None = None,
    api_key: str | None = None,
    ignore_eos: bool = True,
    temperature: float = 0.0,
    timeout_s: float = 600.0,
    on_done: Callable[[Outcome], object] | None = None,
) -> tuple[list[Outcome], float]:
    """Sends the requests; (outcomes in their order, seconds from first send to last token).

    Args:
      max_concurrency: requests under way at most; None leaves it to `request_rate`.
      request_rate: per second, as a Poisson process; infinity sends at once.
      timeout_s: for each request.
      on_done: called after each.

    Raises ValueError for numbers out of range.
    """
    if max_concurrency is not None and not 1 <= max_concurrency <= MAX_CONNECTIONS:
        raise ValueError(
            f"max_concurrency={max_concurrency} is not between 1 and {MAX_CONNECTIONS}"
        )
    if not request_rate > 0:
        raise ValueError(f"request_rate={request_rate} must be positive")
    if max_concurrency is None and math.isinf(request_rate) and len(requests) > MAX_CONNECTIONS:
        raise ValueError(
            f"{len(requests)} requests at once are more than {MAX_CONNECTIONS}; set "
            "--max_concurrency or --request_rate"
        )
    slots = asyncio.Semaphore(max_concurrency or MAX_CONNECTIONS)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    gaps = (
        np.zeros(len(requests))
        if math.isinf(request_rate)
        else np.random.default_rng(seed).exponential(1.0 / request_rate, len(requests))
    )

    async def one(request: LoadRequest, due: float) -> Outcome:
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        async with slots:
            body = request.body(model, ignore_eos=ignore_eos, temperature=temperature)
            outcome = await _send(base_url, request, body, headers, timeout_s)
        if on_done is not None:
            on_done(outcome)
        return outcome

    begun = time.perf_counter()
    outcomes = await asyncio.gather(
        *(one(request, due) for request, due in zip(requests, np.cumsum(gaps)))
    )
    return outcomes, time.perf_counter() - begun


def summarize(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """The figures, under the names that public serving benchmarks give them; times in ms.

    What failed counts in `failed` and in nothing else.
    """
    good = [o for o in outcomes if o.error is None]
    output = sum(o.output_tokens for o in good)
    total = output + sum(o.input_tokens for o in good)
    report: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "duration": duration,
        "total_input_tokens": total - output,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": total / duration,
    }
    series = {
        "ttft": [o.ttft for o in good],
        "tpot": [(o.e2e - o.ttft) / (o.output_tokens - 1) for o in good if o.output_tokens > 1],
        "itl": [gap for o in good for gap in o.itl],
        "e2el": [o.e2e for o in good],
    }
    for name, values in series.items():
        array = 1e3 * np.asarray(values)
        report[f"mean_{name}_ms"] = float(array.mean()) if len(array) else None
        report[f"median_{name}_ms"] = float(np.median(array)) if len(array) else None
        for p in PERCENTILES:
            report[f"p{p}_{name}_ms"] = float(np.percentile(array, p)) if len(array) else None
    return report
