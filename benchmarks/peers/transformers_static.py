"""Hugging Face transformers, one static batch: all rows start and end together."""

# The engine is installed in another environment only.
# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def load_model(settings: dict[str, Any], **options: Any) -> Any:
    """The model in evaluation mode with torch's threads set."""
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["hf"], dtype=getattr(torch, settings["dtype"]), local_files_only=True, **options
    )
    return model.eval()


def versions() -> dict[str, Any]:
    """What is installed."""
    import torch
    import transformers

    return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}


class Engine:
    """`generate` on a rectangular batch."""

    def __init__(self, settings: dict[str, Any]):
        self._model = load_model(settings)

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        import torch
        import transformers

        # No end of sequence: rows go on to their full length, as the other engines' do.
        generation = transformers.GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batch = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                generation_config=generation,
            )
        return output[:, batch.shape[1] :].tolist()

    def info(self) -> dict[str, Any]:
        return versions()


load = Engine
