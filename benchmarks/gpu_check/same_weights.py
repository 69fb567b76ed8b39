"""Our engine on the weights and prompts that transformers served in the section before."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.gpu_check import engine_run
from benchmarks.gpu_check.section import Section, run
from benchmarks.gpu_check.transformers_batching import model_folder, prompts


def measure(section: Section) -> None:
    llm = engine_run.make_llm(model_folder(), rehearse=section.rehearse, load_format="auto")
    engine = engine_run.TimedEngine(llm.core)
    ids, output_len = prompts(section.rehearse, llm.core.vocab_size)
    for prompt in ids:
        engine.add(prompt, 4)
    engine.drain()
    for prompt in ids:
        engine.add(prompt, output_len)
    tokens: dict[str, list[int]] = {}
    begun = time.perf_counter()
    engine.drain(lambda output: tokens.setdefault(output.request_id, []).extend(output.token_ids))
    seconds = time.perf_counter() - begun
    produced = sum(len(row) for row in tokens.values())
    section.put("output_tok_per_s", round(produced / seconds, 1))
    section.put("concurrency", len(ids))
    expected = model_folder() / "greedy.npy"
    if expected.exists():
        want = np.load(expected)
        ordered = sorted(tokens, key=lambda name: int(name.rpartition("-")[2]))
        got = np.asarray([tokens[name] for name in ordered])
        # Random weights give flat logits: near ties part ways in bf16, and stay apart.
        agree = np.cumprod(got == want, axis=1).sum(axis=1)
        section.put("first_tokens_equal", round(float((got[:, 0] == want[:, 0]).mean()), 3))
        section.put("equal_tokens_before_parting_median", float(np.median(agree)))


if __name__ == "__main__":
    run(measure)
