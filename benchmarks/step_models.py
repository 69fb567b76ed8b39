"""Step-time models for the simulator: a preset, a file, or a fit to a running server.

A server's `/metrics` holds the learnt terms where the engine publishes them
(`tidegate:step_time_seconds{term=...}`). Where it does not, the counters are read once a second
while the server is under load, and the terms are fitted to their differences.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from scheduler.step_time import PRESETS, StepTimeModel, fit_interval_times

_TERMS = {
    "base": "base",
    "prefill_token": "per_prefill_token",
    "decode_seq": "per_decode_seq",
    "context_token": "per_context_token",
}
_WATCHED = (
    "tidegate:steps_total",
    "tidegate:scheduled_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "tidegate:kv_blocks",
)
_MIN_INTERVALS = 8
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def step_model_from(spec: str) -> StepTimeModel:
    """A preset's name or a JSON file with the four terms in seconds. Raises ValueError."""
    if spec in PRESETS:
        return PRESETS[spec]
    path = pathlib.Path(spec)
    if not path.is_file():
        raise ValueError(
            f"step model {spec!r} is neither a file nor one of {', '.join(PRESETS)}; "
            "change --step_model"
        )
    fields = [field.name for field in dataclasses.fields(StepTimeModel)]
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        terms = {name: float(values[name]) for name in fields}
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"step model {path} is not a JSON object with the numbers {', '.join(fields)}"
        ) from error
    return StepTimeModel(**terms)


def save_step_model(model: StepTimeModel, path: str | pathlib.Path) -> None:
    """Writes a model where `step_model_from` finds it."""
    text = json.dumps(dataclasses.asdict(model), indent=2)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def fit_from_metrics(source: str, seconds: float = 60.0, interval: float = 1.0) -> StepTimeModel:
    """The step model of a running engine.

    Args:
      source: a file with the text of /metrics, or its URL on this machine.
      seconds: how long to watch a URL whose engine does not publish the terms.
      interval: seconds between scrapes while watching.

    Raises:
      ValueError: the source cannot be read, or does not tell.
    """
    if not source.startswith(("http://", "https://")):
        try:
            text = pathlib.Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--fit_from_metrics={source} cannot be read: {error}") from error
        model = _published_terms(_samples(text))
        if model is None:
            raise ValueError(
                f"{source} has no tidegate:step_time_seconds samples, and one scrape does not tell "
                "the terms apart; give the server's /metrics URL while it is under load"
            )
        return model
    host = urllib.parse.urlsplit(source).hostname
    if host not in _LOOPBACK:
        raise ValueError(
            f"--fit_from_metrics={source}: only a server on this machine is read "
            f"({', '.join(_LOOPBACK)}); save its /metrics to a file instead"
        )
    first = _scrape(source)
    model = _published_terms(first)
    return model if model is not None else _watch(source, first, seconds, interval)


def _scrape(url: str) -> dict[str, float]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return _samples(response.read().decode())
    except (urllib.error.URLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--fit_from_metrics={url} cannot be read: {error}") from error


def _samples(text: str) -> dict[str, float]:
    """Sample values by name, over labels summed; those with a `term` by `name/term`."""
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                term = sample.labels.get("term")
                name = f"{sample.name}/{term}" if term else sample.name
                found[name] = found.get(name, 0.0) + sample.value
                if "block_size" in sample.labels:
                    found["block_size"] = float(sample.labels["block_size"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"this is not the text of a /metrics page: {error}") from error
    return found


def _published_terms(samples: dict[str, float]) -> StepTimeModel | None:
    values = {
        field: samples[f"tidegate:step_time_seconds/{term}"]
        for term, field in _TERMS.items()
        if f"tidegate:step_time_seconds/{term}" in samples
    }
    return StepTimeModel(**values) if len(values) == len(_TERMS) else None


def _watch(url: str, before: dict[str, float], seconds: float, interval: float) -> StepTimeModel:
    """Fits the terms to differences of counters, over intervals in which the engine was busy."""
    steps, scheduled, generated, running, usage, blocks = _WATCHED
    missing = [name for name in _WATCHED if name not in before]
    if missing:
        raise ValueError(f"{url} has no {missing[0]}; is it the /metrics of a Tidegate server?")
    rows: list[tuple[float, ...]] = []
    at = time.monotonic()
    for _ in tqdm(range(max(1, round(seconds / interval))), desc="watching", disable=None):
        time.sleep(interval)
        after, now = _scrape(url), time.monotonic()
        num_steps = after[steps] - before[steps]
        if num_steps > 0 and before[running] > 0 and after[running] > 0:
            decodes = after[generated] - before[generated]
            prefill = max(after[scheduled] - before[scheduled] - decodes, 0.0)
            held = 0.5 * (before[usage] + after[usage]) * after[blocks]
            context = held * after.get("block_size", 16.0) * num_steps
            rows.append((now - at, num_steps, prefill, decodes, context))
        before, at = after, now
    if len(rows) < _MIN_INTERVALS:
        raise ValueError(
            f"the engine behind {url} was busy in only {len(rows)} of the intervals watched; put "
            "it under load of changing size, and raise --fit_seconds"
        )
    return fit_interval_times(np.array(rows))


__all__ = ["fit_from_metrics", "save_step_model", "step_model_from"]
