"""Sizes what the user left open - lengths, rows, KV blocks - and says how."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from jax.typing import DTypeLike

from engine.config import EngineConfig
from models.config import ModelConfig
from pallas_kernels import KVCacheSpec, kv_page_bytes

GIB = 2**30
# Room for a step's temporaries beside weights and KV pages, as a share of the device's memory.
_TEMPORARY_SHARE = 0.05


class Device(Protocol):
    """What is asked of a `jax.Device` here."""

    @property
    def platform(self) -> str: ...

    def memory_stats(self) -> dict[str, Any] | None: ...


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The engine's sizes, all decided.

    Attributes:
      num_blocks, block_size: KV pool, the null block included.
      max_model_len, max_num_seqs, max_num_batched_tokens: limits.
      page_bytes: bytes of one block over all layers.
      arithmetic: sentences for the start-up summary.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_bytes: int
    arithmetic: tuple[str, ...]


def decide_sizes(
    config: EngineConfig,
    model: ModelConfig,
    *,
    kv_dtype: DTypeLike,
    implementation: str,
    device: Device,
) -> Sizes:
    """Chooses every size. Raises ValueError where the user's wishes do not fit together.

    Args:
      config: the user's wishes.
      model: the model's shape.
      kv_dtype: of keys and values.
      implementation: of attention; it knows the padding of a page.
      device: where the pool will live; its weights must be loaded already.
    """
    on_cpu = device.platform == "cpu"
    block_size = config.block_size or (64 if device.platform == "tpu" else 16)
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    budget = config.max_num_batched_tokens or max(512 if on_cpu else 4096, max_num_seqs)
    if budget < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={budget} is less than max_num_seqs={max_num_seqs}; raise "
            "--max_num_batched_tokens or lower --max_num_seqs"
        )
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the model's {model.max_position_embeddings} "
            "positions; lower --max_model_len"
        )
    spec = KVCacheSpec(1, block_size, model.num_kv_heads, model.head_dim, kv_dtype)
    page_bytes = model.num_layers * kv_page_bytes(spec, implementation=implementation)
    num_blocks, why = _num_blocks(config, page_bytes, device)
    usable = (num_blocks - 1) * block_size
    notes = [why]
    if max_model_len > usable:
        if config.max_model_len is not None:
            need = -(-max_model_len // block_size) + 1
            raise ValueError(
                f"{num_blocks} KV blocks of {block_size} tokens hold {usable} tokens, fewer than "
                f"one sequence of max_model_len={max_model_len} needs ({need} blocks); raise "
                "--num_kv_blocks or --kv_cache_memory_gib, or lower --max_model_len"
            )
        if usable < 2:
            raise ValueError(
                f"{num_blocks} KV blocks of {block_size} tokens hold no sequence at all; raise "
                "--num_kv_blocks to at least 2"
            )
        notes.append(f"max_model_len lowered from {max_model_len} to the pool's {usable} tokens")
        max_model_len = usable
    if not config.enable_chunked_prefill and budget < max_model_len:
        raise ValueError(
            f"without chunked prefill max_num_batched_tokens={budget} must reach "
            f"max_model_len={max_model_len}; raise --max_num_batched_tokens"
        )
    return Sizes(
        num_blocks, block_size, max_model_len, max_num_seqs, budget, page_bytes, tuple(notes)
    )


def _num_blocks(config: EngineConfig, page_bytes: int, device: Device) -> tuple[int, str]:
    if config.num_kv_blocks is not None:
        size = config.num_kv_blocks * page_bytes / GIB
        return config.num_kv_blocks, (
            f"KV pool: {config.num_kv_blocks} blocks as asked for, {size:.2f} GiB"
        )
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats is None:
        room = int(config.kv_cache_memory_gib * GIB)
        why = f"{config.kv_cache_memory_gib:g} GiB (--kv_cache_memory_gib)"
    else:
        limit, used = stats["bytes_limit"], stats["bytes_in_use"]
        temporary = int(_TEMPORARY_SHARE * limit)
        room = int(config.device_memory_utilization * limit) - used - temporary
        why = (
            f"{limit / GIB:.2f} GiB x {config.device_memory_utilization:g} - {used / GIB:.2f} GiB "
            f"in use - {temporary / GIB:.2f} GiB for temporaries = {room / GIB:.2f} GiB"
        )
    blocks = room // page_bytes
    if blocks < 2:
        raise ValueError(
            f"{room / GIB:.2f} GiB hold fewer than two KV blocks of {page_bytes / 2**20:.1f} MiB; "
            "raise --kv_cache_memory_gib or --device_memory_utilization"
        )
    return blocks, f"KV pool: {why} / {page_bytes / 2**10:.0f} KiB a block = {blocks} blocks"
