"""PyTorch's scaled_dot_product_attention on the same shapes, over keys and values gathered once.

The gather from pages is timed apart: an engine built this way would pay both in each step.
"""

# torch and transformers are installed on the GPU machine only.
# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_check.attention import prefill_flop
from benchmarks.gpu_check.section import Section, run, share
from benchmarks.gpu_check.shapes import AttentionShape, attention_shape


def measure(section: Section) -> int | None:
    if importlib.util.find_spec("torch") is None:
        return section.skip("torch is not installed")
    import torch

    if not (torch.cuda.is_available() or section.rehearse):
        return section.skip("torch sees no GPU")
    section.put("torch", torch.__version__)
    shape = attention_shape(section.rehearse)
    section.attempt("prefill", lambda: _prefill(section, shape))
    section.attempt("decode", lambda: _decode(section, shape))
    return None


def _time(call: Callable[[], Any], repeats: int) -> float:
    """Seconds per call, the median of five rounds of calls queued without waiting."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    wait()
    rounds = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        rounds.append((time.perf_counter() - begun) / repeats)
    return statistics.median(rounds)


def _random(*dims: int) -> Any:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(dims, dtype=torch.bfloat16, device=device)


def _prefill(section: Section, shape: AttentionShape) -> dict[str, Any]:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    q = _random(1, shape.num_q_heads, shape.prompt, shape.head_dim)
    k, v = (_random(1, shape.num_kv_heads, shape.prompt, shape.head_dim) for _ in "kv")
    seconds = _time(lambda: attend(q, k, v, is_causal=True, enable_gqa=True), shape.repeats)
    rate = prefill_flop(shape) / seconds / 1e12
    return {
        "us": round(1e6 * seconds, 1),
        "tflop_per_s": round(rate, 2),
        "share_of_matmul": share(rate, section.ceiling("bf16_tflop_per_s")),
    }


def _decode(section: Section, shape: AttentionShape) -> dict[str, Any]:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    per_row = -(-shape.context // shape.page_size)
    pages = shape.rows * per_row
    cache = _random(2, pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    table = torch.randperm(pages, device=cache.device).reshape(shape.rows, per_row)

    def gather() -> Any:
        kv = cache[:, table].flatten(2, 3)[:, :, : shape.context]
        return kv.transpose(2, 3).contiguous()

    k, v = gather()
    q = _random(shape.rows, shape.num_q_heads, 1, shape.head_dim)
    seconds = _time(lambda: attend(q, k, v, enable_gqa=True), shape.repeats)
    gathering = _time(gather, max(1, shape.repeats // 3))
    rate = 2 * k.numel() * 2 / seconds / 1e9
    return {
        "us": round(1e6 * seconds, 1),
        "gather_us": round(1e6 * gathering, 1),
        "gb_per_s": round(rate, 1),
        "share_of_copy": share(rate, section.ceiling("copy_gb_per_s")),
    }


if __name__ == "__main__":
    run(measure)
