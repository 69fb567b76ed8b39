"""Hugging Face transformers with its continuous batching over a paged cache."""

# The engine is installed in another environment only.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers import transformers_static


class Engine:
    """`generate_batch`; the cache is sized for the rows of this benchmark."""

    def __init__(self, settings: dict[str, Any]):
        import transformers

        self._model = transformers_static.load_model(settings)
        page = 64
        blocks = -(-settings["max_len"] // page) * settings["max_rows"] + 8
        self._batching = transformers.ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_batch_tokens=2048, allow_block_sharing=False
        )

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        import transformers

        generation = transformers.GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = self._model.generate_batch(
            inputs=[list(prompt) for prompt in prompts],
            generation_config=generation,
            continuous_batching_config=self._batching,
            progress_bar=False,
        )
        ordered = sorted(outputs.items(), key=lambda item: _number(item[0]))
        return [list(output.generated_tokens) for _, output in ordered]

    def info(self) -> dict[str, Any]:
        return transformers_static.versions()


def _number(request_id: str) -> int:
    """Requests are numbered in the order of the inputs."""
    return int("".join(filter(str.isdigit, request_id)) or 0)


load = Engine
