"""The engine's settings: every default lives here, and every check that needs no device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from scheduler.config import SchedulerConfig, check_watermark

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = (None, "int8")
LOAD_FORMATS = ("auto", "dummy")
IMPLEMENTATIONS = (None, "cpu", "xla", "tpu", "gpu")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine, with the names vLLM users know.

    None means: chosen at start-up from the model and the machine; the start-up summary says what
    was chosen and why.

    Attributes:
      model: Hugging Face directory, hub name, .gguf file or Orbax checkpoint; None is the small
        default model.
      tokenizer: directory or file to take the tokenizer from instead of `model`.
      dtype: of weights and activations; "auto" takes float32 on CPU and bfloat16 elsewhere.
      kv_cache_dtype: of keys and values; "auto" follows the platform's fast path.
      quantization: None or "int8" (weights per output channel).
      load_format: "auto", or "dummy" for random weights of the model's shape.
      seed: of random weights and of requests that bring no seed.
      max_model_len: longest sequence in tokens, prompt and output together.
      max_num_seqs: requests running at once.
      max_num_batched_tokens: tokens of one step.
      block_size: tokens per KV block.
      num_kv_blocks: KV blocks in the pool, the null block included.
      device_memory_utilization: share of the accelerator's memory the engine may use.
      kv_cache_memory_gib: memory for the KV pool where the platform has no fixed size (CPU).
      watermark, reserve_full_sequence, enable_chunked_prefill, enable_prefix_caching,
      scheduling_policy, long_prefill_token_threshold, max_num_queued_reqs,
      max_preemptions_per_request: see scheduler.SchedulerConfig.
      async_scheduling: dispatch a step before the last one's tokens are read.
      max_decode_steps: most decode steps in one dispatch when nothing waits; the engine takes
        fewer where they would take longer than 20 ms.
      batch_invariant: logits do not depend on batch mates, chunking or preemption, bit by bit.
      attention_implementation: name of the kernel; None chooses by platform.
      cpu_kernels: on CPU, "native" are C++ kernels compiled on first use, "xla" is plain JAX,
        "auto" takes the native ones where a compiler is at hand.
      compile_cache_dir: folder of compiled programs; None is the user's cache folder, "" is off.
      aot_bundle: file of compiled steps: read if it exists, else written. Trusted input only.
      warmup: compile every bucket at start-up.
    """

    model: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: Literal["int8"] | None = None
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None
    device_memory_utilization: float = 0.9
    kv_cache_memory_gib: float = 1.0
    watermark: float | str = 0.0
    reserve_full_sequence: bool = True
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    max_preemptions_per_request: int | None = None
    async_scheduling: bool = True
    max_decode_steps: int = 8
    batch_invariant: bool = False
    attention_implementation: str | None = None
    cpu_kernels: Literal["auto", "xla", "native"] = "auto"
    compile_cache_dir: str | None = None
    aot_bundle: str | None = None
    warmup: bool = True

    def validate(self) -> EngineConfig:
        """Returns self with the watermark parsed. Raises ValueError with one sentence."""
        watermark = check_watermark(self.watermark)
        self._one_of("dtype", DTYPES)
        self._one_of("kv_cache_dtype", KV_DTYPES)
        self._one_of("quantization", QUANTIZATIONS)
        self._one_of("load_format", LOAD_FORMATS)
        self._one_of("attention_implementation", IMPLEMENTATIONS)
        self._one_of("cpu_kernels", ("auto", "xla", "native"))
        self._one_of("scheduling_policy", ("fcfs", "priority"))
        for name, least in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 1),
            ("num_kv_blocks", 2),
            ("max_num_queued_reqs", 0),
            ("max_preemptions_per_request", 0),
            ("long_prefill_token_threshold", 0),
            ("max_decode_steps", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name}={value} is not an integer of at least {least}")
        if not 0.0 < self.device_memory_utilization <= 1.0:
            raise ValueError(
                f"device_memory_utilization={self.device_memory_utilization} is not in (0, 1]"
            )
        if not (math.isfinite(self.kv_cache_memory_gib) and self.kv_cache_memory_gib > 0):
            raise ValueError(f"kv_cache_memory_gib={self.kv_cache_memory_gib} is not positive")
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size={self.block_size} is not a power of two")
        budget, rows = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and rows is not None and budget < rows:
            raise ValueError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={rows}, so that one "
                "step could not decode every running request; raise --max_num_batched_tokens"
            )
        if not self.enable_chunked_prefill and budget is not None:
            longest = self.max_model_len
            if longest is not None and budget < longest:
                raise ValueError(
                    f"without chunked prefill max_num_batched_tokens={budget} must reach "
                    f"max_model_len={longest}; raise --max_num_batched_tokens"
                )
        return dataclasses.replace(self, watermark=watermark)

    def _one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        if getattr(self, name) not in allowed:
            names = ", ".join(str(a) for a in allowed)
            raise ValueError(f"{name}={getattr(self, name)} is not one of: {names}")

    def scheduler_config(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> SchedulerConfig:
        """The scheduler's part, with everything sized."""
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            watermark=check_watermark(self.watermark),
            reserve_full_sequence=self.reserve_full_sequence,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_prefix_caching=self.enable_prefix_caching,
            scheduling_policy="priority" if self.scheduling_policy == "priority" else "fcfs",
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_queued_reqs=self.max_num_queued_reqs,
            max_preemptions_per_request=self.max_preemptions_per_request,
            overlap_depth=1 if self.async_scheduling else 0,
        )
