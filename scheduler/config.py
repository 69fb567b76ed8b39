"""Limits and policies of the scheduler, checked once."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Watermark = float | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler may use and how it decides. Lengths are in tokens, the pool in blocks.

    Attributes:
      num_blocks: blocks of the KV pool, the null block (block 0) included.
      block_size: tokens per block.
      max_num_seqs: rows that may run at once; the number of slots.
      max_num_batched_tokens: token budget of one step.
      max_model_len: longest sequence, prompt and output together.
      watermark: fraction of `num_blocks` kept free when admitting, in [0, 1), or "auto".
      reserve_full_sequence: an admission must fit its whole known sequence, not only its chunk.
      enable_chunked_prefill: a prompt may be computed over several steps.
      enable_prefix_caching: full blocks are found again by a chain hash of their tokens.
      scheduling_policy: order of admission and choice of victims.
      long_prefill_token_threshold: most tokens of one prompt per step when others wait or run;
        0 is no limit.
      max_num_queued_reqs: waiting requests above which `Scheduler.add` refuses; None is no limit.
      max_preemptions_per_request: a request preempted this often is passed over as a victim;
        None is no limit.
      overlap_depth: steps that may be scheduled before the result of an earlier one is known
        (0: each step's tokens are read before the next is scheduled).
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    watermark: Watermark = 0.0
    reserve_full_sequence: bool = True
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    max_preemptions_per_request: int | None = None
    overlap_depth: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_blocks", 2),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_model_len", 2),
            ("long_prefill_token_threshold", 0),
            ("overlap_depth", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}; change --{name}")
        for name, least in (("max_num_queued_reqs", 0), ("max_preemptions_per_request", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}; change --{name}")
        object.__setattr__(self, "watermark", check_watermark(self.watermark))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}, so that not every sequence could decode in a "
                "step; raise --max_num_batched_tokens or lower --max_num_seqs"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_model_len={self.max_model_len}, so that the longest prompt could not be "
                "computed without chunked prefill; raise --max_num_batched_tokens, lower "
                "--max_model_len or leave --enable_chunked_prefill on"
            )
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(
                f"scheduling_policy={self.scheduling_policy!r} is neither 'fcfs' nor 'priority'; "
                "change --scheduling_policy"
            )

    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free at admission by a fixed watermark; 0 under "auto"."""
        if self.watermark == "auto":
            return 0
        return int(self.watermark * self.num_blocks)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block-table row."""
        return -(-self.max_model_len // self.block_size)


def check_watermark(watermark: Watermark | str) -> Watermark:
    """Parses and checks a watermark: a number in [0, 1) or "auto". Raises ValueError."""
    if watermark == "auto":
        return "auto"
    try:
        value = float(watermark)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or not 0.0 <= value < 1.0:
        raise ValueError(
            f"watermark={watermark} is not a fraction in [0, 1) or 'auto'; change --watermark"
        )
    return value
