"""vLLM's CPU build, in this process."""

# The engine is installed in another environment only.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


class Engine:
    """`vllm.LLM` without a tokenizer, prefix caching or a second process."""

    def __init__(self, settings: dict[str, Any]):
        # Read at import. The pool's size is a whole number of GiB.
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=str(max(1, round(settings["kv_gib"]))),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            HF_HUB_OFFLINE="1",
        )
        import vllm

        self._version = vllm.__version__
        self._llm = vllm.LLM(
            model=settings["hf"],
            dtype=settings["dtype"],
            max_model_len=settings["max_len"],
            max_num_seqs=settings["max_rows"],
            enforce_eager=settings.get("eager", False),
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        import vllm

        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def info(self) -> dict[str, Any]:
        return {"version": f"vllm {self._version}"}


load = Engine
