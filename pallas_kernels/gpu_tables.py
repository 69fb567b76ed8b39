"""Tile sizes, warps and pipeline stages of the GPU kernels, by compute capability.

The entries were chosen so that no kernel spills registers and at least two decode programs fit on
a multiprocessor (checked by compiling for each target, docs/kernels.md); `python -m
benchmarks.gpu_tune` measures alternatives on a GPU and prints entries in this form.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import jax

Kind = Literal["decode", "prefill"]

# The oldest GPU the Triton lowering has tensor-core dots for in bf16, and the first with fp8.
MIN_COMPUTE_CAPABILITY = 80
FP8_COMPUTE_CAPABILITY = 89


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How one kernel is cut.

    Attributes:
      block_m: rows of a query tile (tokens times query heads of one KV head).
      block_n: context tokens per step of the inner loop.
      num_warps, num_stages: warps of a program, depth of the load pipeline.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (kind, bytes per number in the dots, padded head size) -> tiles, for each generation.
Table = dict[tuple[Kind, int, int], Tiles]

_AMPERE: Table = {
    ("decode", 2, 64): Tiles(16, 128, 4, 3),
    ("decode", 2, 128): Tiles(16, 64, 4, 3),
    ("decode", 2, 256): Tiles(16, 32, 4, 3),
    ("decode", 4, 64): Tiles(16, 32, 4, 2),
    ("decode", 4, 128): Tiles(16, 16, 4, 2),
    ("decode", 4, 256): Tiles(16, 16, 4, 2),
    ("prefill", 2, 64): Tiles(128, 32, 4, 3),
    ("prefill", 2, 128): Tiles(128, 32, 8, 3),
    ("prefill", 2, 256): Tiles(64, 32, 8, 2),
    ("prefill", 4, 64): Tiles(32, 32, 8, 2),
    ("prefill", 4, 128): Tiles(32, 32, 8, 2),
    ("prefill", 4, 256): Tiles(16, 16, 8, 2),
}
_HOPPER: Table = {
    **_AMPERE,
    ("prefill", 2, 64): Tiles(128, 128, 8, 3),
    ("prefill", 2, 128): Tiles(128, 64, 8, 3),
    ("prefill", 2, 256): Tiles(64, 64, 8, 2),
    ("prefill", 4, 64): Tiles(32, 16, 8, 2),
    ("prefill", 4, 128): Tiles(32, 16, 8, 2),
}
_BLACKWELL: Table = _HOPPER

_TABLES: dict[int, Table] = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL}
_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}

_target: contextvars.ContextVar[int | None] = contextvars.ContextVar("gpu_target", default=None)
_tiles: contextvars.ContextVar[dict[Kind, Tiles] | None] = contextvars.ContextVar(
    "gpu_tiles", default=None
)


@contextlib.contextmanager
def target(compute_capability: int) -> Iterator[None]:
    """Kernels traced inside are cut for this compute capability (90 is Hopper).

    For compiling without a device, and for tests.
    """
    token = _target.set(compute_capability)
    try:
        yield
    finally:
        _target.reset(token)


@contextlib.contextmanager
def override(**tiles: Tiles) -> Iterator[None]:
    """Kernels traced inside use these tiles: `override(decode=Tiles(...))`. For the tuner."""
    token = _tiles.set(dict(tiles))  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        _tiles.reset(token)


def _gpu() -> Any:
    if jax.default_backend() != "gpu":
        return None
    return jax.local_devices(backend="gpu")[0]


def compute_capability() -> int:
    """Ten times the device's compute capability; 90 where there is no GPU and no `target`."""
    forced = _target.get()
    if forced is not None:
        return forced
    device = _gpu()
    return 90 if device is None else parse_capability(str(device.compute_capability))


def parse_capability(text: str) -> int:
    """ "8.0" -> 80, "12.1" -> 121."""
    major, _, minor = text.partition(".")
    return 10 * int(major) + int(minor or 0)


def multiprocessors() -> int:
    """Multiprocessors of the device, or of the generation's largest part."""
    device = None if _target.get() is not None else _gpu()
    count = getattr(device, "core_count", None)
    return int(count) if count else _MULTIPROCESSORS[_generation(compute_capability())]


def _generation(capability: int) -> int:
    """The newest table not newer than the device. Consumer Blackwell (120) has sm_80's dots."""
    if capability >= 120:
        return 80
    return max([key for key in _TABLES if key <= capability], default=80)


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least 16, that a head's numbers are padded to in registers."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles(kind: Kind, itemsize: int, head_dim: int) -> Tiles:
    """Tiles for dots of `itemsize` bytes per number and this head size (64 covers smaller ones)."""
    forced = (_tiles.get() or {}).get(kind)
    if forced is not None:
        return forced
    table = _TABLES[_generation(compute_capability())]
    return table[kind, itemsize, max(64, padded_head_dim(head_dim))]


def fit_group(tiles: Tiles, group_pad: int) -> Tiles:
    """The same tiles with room for at least one token's whole group of query heads."""
    return dataclasses.replace(tiles, block_m=max(tiles.block_m, group_pad))


# A split of a row's context is at least this long: shorter ones cost more in the merge than they
# win. And no program should walk more than MAX_SPLIT tokens where rows of very different length
# meet, or the longest row's program finishes alone.
MIN_SPLIT = 512
MAX_SPLIT = 8192
MAX_SPLITS = 64
# Programs per multiprocessor that hide each other's latencies.
PROGRAMS_PER_MULTIPROCESSOR = 4


def num_splits(rows: int, num_kv_heads: int, max_context: int) -> int:
    """Splits of each row's context in a decode step (flash-decoding), from static shapes.

    Enough programs to fill the device, a power of two so that few variants are compiled. A row
    uses only as many of them as its own context is worth (`kv_lens` decides on the device).
    """
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors() // (rows * num_kv_heads))
    wanted = max(wanted, -(-max_context // MAX_SPLIT))
    useful = max(1, max_context // MIN_SPLIT)
    splits = max(1, min(wanted, useful, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


__all__ = [
    "FP8_COMPUTE_CAPABILITY",
    "MIN_COMPUTE_CAPABILITY",
    "MIN_SPLIT",
    "Kind",
    "Tiles",
    "compute_capability",
    "fit_group",
    "multiprocessors",
    "num_splits",
    "override",
    "padded_head_dim",
    "parse_capability",
    "target",
    "tiles",
]
