"""transformers' continuous batching on random weights of Qwen3-0.6B's shape.

The weights are left in the output folder: the next section serves the same ones.
"""

# torch and transformers are installed on the GPU machine only.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_check.section import Section, run
from benchmarks.gpu_check.shapes import model_fields, serve_loads, write_model_folder


def prompts(rehearse: bool, vocabulary: int) -> tuple[list[list[int]], int]:
    """(prompts, output length) that both engines serve."""
    load = serve_loads(rehearse)[0]
    rng = np.random.default_rng(11)
    ids = rng.integers(1, vocabulary, (load.concurrency, load.prompt_len))
    return ids.tolist(), load.output_len


def model_folder() -> Path:
    """Where the shared weights lie."""
    return Path(os.environ.get("GPU_CHECK_OUT", ".")) / "shared_model"


def measure(section: Section) -> int | None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return section.skip(f"{name} is not installed")
    import torch
    import transformers

    on_gpu = torch.cuda.is_available()
    if not (on_gpu or section.rehearse):
        return section.skip("torch sees no GPU")
    section.put("transformers", transformers.__version__)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    fields = model_fields("qwen3", section.rehearse)
    folder = write_model_folder(model_folder(), "qwen3", section.rehearse)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{k: v for k, v in fields.items() if k != "architectures"})
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model: Any = transformers.Qwen3ForCausalLM(config)
    model = model.eval()
    begun = time.monotonic()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    section.put("save_s", round(time.monotonic() - begun, 1))

    ids, output_len = prompts(section.rehearse, config.vocab_size)
    section.put("concurrency", len(ids))
    generation = transformers.GenerationConfig(
        max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    settings: dict[str, Any] = {}
    if section.rehearse:  # left alone, it takes the cache's size from the machine's memory
        settings["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
            num_blocks=32, max_batch_tokens=64
        )

    def serve(requests: list[list[int]]) -> tuple[float, list[list[int]]]:
        begun = time.perf_counter()
        outputs = model.generate_batch(
            inputs=requests, generation_config=generation, progress_bar=False, **settings
        )
        seconds = time.perf_counter() - begun
        return seconds, [list(output.generated_tokens) for output in outputs.values()]

    def continuous() -> dict[str, Any]:
        serve(ids[:2])
        seconds, tokens = serve(ids)
        produced = sum(len(row) for row in tokens)
        return {"output_tok_per_s": round(produced / seconds, 1), "seconds": round(seconds, 2)}

    def static() -> dict[str, Any]:
        batch = torch.tensor(ids, device=device)
        lengths = {"max_new_tokens": output_len, "min_new_tokens": output_len}
        with torch.inference_mode():
            model.generate(batch[:1], max_new_tokens=2, do_sample=False)
            begun = time.perf_counter()
            out = model.generate(batch, do_sample=False, **lengths)
            seconds = time.perf_counter() - begun
        np.save(folder / "greedy.npy", out[:, batch.shape[1] :].cpu().numpy())
        return {"output_tok_per_s": round(len(ids) * output_len / seconds, 1)}

    section.attempt("static_batch", static)
    section.attempt("continuous_batching", continuous)
    return None


if __name__ == "__main__":
    run(measure)
