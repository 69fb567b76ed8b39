"""llama.cpp through the C interface of llama-cpp-python: a batched greedy loop, a row a sequence.

As its own batched benchmark does, every decode call takes one token of each sequence.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

_UBATCH = 512


class Engine:
    """A context with room for all sequences."""

    def __init__(self, settings: dict[str, Any]):
        # Installed in another environment only; all names of its C interface are at the top.
        self._api: Any = importlib.import_module("llama_cpp")
        api = self._api
        api.llama_backend_init()
        path = settings["gguf"].encode()
        self._model = api.llama_model_load_from_file(path, api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['gguf']}")
        rows = settings["max_rows"]
        self._batch_tokens = 2048
        params = api.llama_context_default_params()
        params.n_ctx = settings["max_len"] * rows
        params.n_batch, params.n_ubatch, params.n_seq_max = self._batch_tokens, _UBATCH, rows
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.kv_unified = settings.get("kv_unified", False)
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(self._batch_tokens, 0, 1)
        self._sampler = api.llama_sampler_init_greedy()

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        # Prompts in batches of whole prompts; only the last token of each needs logits.
        tokens: list[list[int]] = []
        per_call = max(1, self._batch_tokens // max(map(len, prompts)))
        for first in range(0, len(prompts), per_call):
            chunk = prompts[first : first + per_call]
            entries = [
                (token, position, first + row, position == len(prompt) - 1)
                for row, prompt in enumerate(chunk)
                for position, token in enumerate(prompt)
            ]
            tokens += [[token] for token in self._decode(entries)]
        for step in range(1, output_len):
            entries = [
                (row[-1], len(prompts[sequence]) + step - 1, sequence, True)
                for sequence, row in enumerate(tokens)
            ]
            for row, token in zip(tokens, self._decode(entries)):
                row.append(token)
        return tokens

    def _decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Runs (token, position, sequence, wants logits) rows; the greedy token of each that does."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        code = self._api.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        sample = self._api.llama_sampler_sample
        return [
            sample(self._sampler, self._context, i) for i, entry in enumerate(entries) if entry[3]
        ]

    def info(self) -> dict[str, Any]:
        info = self._api.llama_print_system_info()
        return {
            "version": f"llama-cpp-python {self._api.__version__}",
            "features": info.decode(errors="replace"),
        }


load = Engine
