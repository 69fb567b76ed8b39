"""Our engine, driven through `EngineCore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Engine:
    """Requests in, ids out."""

    def __init__(self, settings: dict[str, Any]):
        from engine import LLM

        quantized = settings["dtype"] == "int8"
        self._core = LLM(
            settings["gguf"],
            progress=False,
            dtype="float32" if quantized else settings["dtype"],
            quantization="int8" if quantized else None,
            max_num_seqs=settings["max_rows"],
            max_model_len=settings["max_len"],
            kv_cache_memory_gib=settings["kv_gib"],
            enable_prefix_caching=False,  # prompts come again: each run is to compute them
            **settings.get("engine_settings", {}),
        ).core
        self._count = 0

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        from engine import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        tokens: dict[str, list[int]] = {}
        for prompt in prompts:
            name = f"r{self._count}"
            self._count += 1
            tokens[name] = []
            self._core.add_request(name, prompt, params)
        while self._core.has_unfinished():
            for output in self._core.step():
                tokens[output.request_id].extend(map(int, output.token_ids))
        return list(tokens.values())

    def info(self) -> dict[str, Any]:
        import jax

        sizes = self._core.sizes
        return {
            "version": f"jax {jax.__version__}",
            "kv_pool_bytes": sizes.num_blocks * sizes.page_bytes,
        }


load = Engine
