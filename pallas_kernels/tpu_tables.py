"""Block sizes of the TPU kernels, by chip generation and shape class.

`python -m benchmarks.kernels --tune` times candidates on a TPU and writes TABLE_FILE, which then
takes precedence over what is built in here. The built-in sizes were chosen on instruction bundles
of compiled kernels, not on hardware (docs/kernels.md).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_layout import LANES, HeadGroups, Layout
from pallas_kernels.tpu_prefill import PrefillBlocks

MIB = 2**20
TABLE_FILE = Path(__file__).with_name("tpu_blocks.json")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes, in units that do not depend on the page size.

    Attributes:
      decode_bytes: bytes of one of the two page buffers of the decode kernel.
      decode_keys: most tokens of such a buffer.
      tile_rows: query rows (tokens times query heads of a KV head) of a prefill tile, at 128
        lanes; wider heads take proportionally fewer.
      step_rows, step_keys: size of one product of the prefill kernel.
      prefill_keys: tokens of one page buffer of the prefill kernel.
      prefill_heads: KV heads per grid step of the prefill kernel.
    """

    decode_bytes: int = 2 * MIB
    decode_keys: int = 512
    tile_rows: int = 4096
    step_rows: int = 256
    step_keys: int = 512
    prefill_keys: int = 1024
    prefill_heads: int = 1


# VMEM of one core, from which the kernels' limit follows; the names are JAX's chip versions.
_VMEM_BYTES = {"v5e": 128 * MIB, "v5p": 64 * MIB, "v6e": 128 * MIB, "7x": 64 * MIB}
DEFAULT_CHIP = "v5p"  # the least VMEM of those known
SMEM_BYTES = MIB
_DECODE_ROWS = 128

# (chip, "bf16" or "f32" operands) -> sizes. Float32 operands take several passes of the MXU and
# twice the registers.
_BUILT_IN: dict[tuple[str, str], Blocks] = {
    # A tile of 16384 rows and its state take 40 MiB of VMEM, one of 8192 half of that.
    ("v5e", "bf16"): Blocks(tile_rows=16384),
    ("v5p", "bf16"): Blocks(tile_rows=8192),
    ("v6e", "bf16"): Blocks(tile_rows=16384),
    ("7x", "bf16"): Blocks(tile_rows=8192),
}
_DEFAULT = {"bf16": Blocks(), "f32": Blocks(step_rows=128, step_keys=128, decode_keys=128)}

_override: contextvars.ContextVar[Blocks | None] = contextvars.ContextVar(
    "tpu_blocks", default=None
)


@contextlib.contextmanager
def use_blocks(blocks: Blocks) -> Iterator[None]:
    """Kernels traced inside take these sizes. For tuning and tests."""
    token = _override.set(blocks)
    try:
        yield
    finally:
        _override.reset(token)


def current_chip() -> str:
    """Generation the kernel is traced for: "v5e", "v5p", "v6e", "7x"; DEFAULT_CHIP if unknown.

    Follows the abstract mesh when compiling ahead of time, else the default device.
    """
    try:
        info = pltpu.get_tpu_info()
    except (ValueError, AttributeError, NotImplementedError):
        return DEFAULT_CHIP  # the interpreter, on a CPU
    name = str(getattr(info.chip_version, "value", info.chip_version))
    return name if name in _VMEM_BYTES else DEFAULT_CHIP


def vmem_limit(chip: str) -> int:
    """Bytes of VMEM a kernel may use; the rest is for XLA's own buffers."""
    return max(_VMEM_BYTES[chip] // 2, 48 * MIB)


@functools.cache
def _tuned() -> dict[tuple[str, str], Blocks]:
    if not TABLE_FILE.exists():
        return {}
    entries = json.loads(TABLE_FILE.read_text())
    return {(e["chip"], e["shape"]): Blocks(**e["blocks"]) for e in entries}


def blocks_for(chip: str, operands: str, shape: str = "") -> Blocks:
    """Sizes for a chip, operand type ("bf16" or "f32") and, if tuned, a shape class."""
    chosen = _override.get()
    if chosen is not None:
        return chosen
    tuned = _tuned().get((chip, shape))
    return tuned or _BUILT_IN.get((chip, operands)) or _DEFAULT[operands]


def shape_class(layout: Layout, num_q_heads: int, q_dtype: jax.typing.DTypeLike) -> str:
    """Key of a tuned entry: everything the best sizes may depend on but the batch."""
    spec = layout.spec
    return (
        f"q{num_q_heads}_kv{spec.num_kv_heads}_d{spec.head_dim}_page{spec.page_size}"
        f"_{np.dtype(q_dtype).name}_{np.dtype(spec.dtype).name}"
    )


def decode_pages(blocks: Blocks, layout: Layout) -> int:
    """Pages per buffer of the decode kernel: whole chunks of 128 tokens (or of one page)."""
    spec = layout.spec
    chunk = max(LANES, spec.page_size)
    token = spec.num_kv_heads * layout.parts * layout.lanes * np.dtype(spec.dtype).itemsize
    tokens = min(blocks.decode_bytes // token, blocks.decode_keys)
    return max(tokens // chunk, 1) * chunk // spec.page_size


def decode_rows(layout: Layout, groups: HeadGroups, *, rows: int, q_itemsize: int) -> int:
    """Rows whose queries and outputs are in VMEM at once, two of each: at most 8 MiB."""
    row = 4 * groups.count * groups.rows * layout.lanes * q_itemsize
    most = max(min(_DECODE_ROWS, 8 * MIB // row), 1)
    steps = max(-(-rows // most), 1)
    return max(-(-rows // steps), 1)  # even steps: few rows are padding


def table_rows(width: int) -> int:
    """Rows whose page tables, `width` int32 each, fit scalar memory; 0 where not one does."""
    return SMEM_BYTES * 3 // 4 // (4 * width)


def prefill_blocks(
    blocks: Blocks, layout: Layout, *, num_tokens: int, q_per_kv: int
) -> PrefillBlocks:
    """Sizes of the prefill kernel for a step of `num_tokens` query tokens."""
    spec = layout.spec
    # Rows of one product must be whole tiles of 16 (two bfloat16 share a word).
    step_tokens = max(blocks.step_rows // q_per_kv, 1)
    while step_tokens * q_per_kv % 16:
        step_tokens += 1
    step_keys = max(blocks.step_keys, spec.page_size)
    keys = max(blocks.prefill_keys // step_keys, 1) * step_keys
    heads = blocks.prefill_heads
    while spec.num_kv_heads % heads:
        heads -= 1
    tile_rows = blocks.tile_rows * LANES // layout.lanes
    steps = max(tile_rows // (step_tokens * q_per_kv), 1)
    steps = min(steps, -(-num_tokens // step_tokens))
    return PrefillBlocks(
        tile_tokens=steps * step_tokens,
        step_tokens=step_tokens,
        step_keys=step_keys,
        pages_per_block=keys // spec.page_size,
        heads=heads,
    )


def decode_vmem_bytes(
    blocks: Blocks, layout: Layout, groups: HeadGroups, *, rows: int, q_itemsize: int
) -> int:
    """VMEM of the decode kernel: two page buffers, queries and outputs (two each), softmax state."""
    spec, lanes = layout.spec, layout.lanes
    page = spec.num_kv_heads * layout.parts * spec.page_size * lanes * np.dtype(spec.dtype).itemsize
    heads = groups.count * groups.rows
    rows = decode_rows(layout, groups, rows=rows, q_itemsize=q_itemsize)
    activations = 4 * rows * heads * lanes * q_itemsize
    return 2 * decode_pages(blocks, layout) * page + activations + heads * (2 * LANES + lanes) * 4


def prefill_vmem_bytes(
    sizes: PrefillBlocks, layout: Layout, *, q_per_kv: int, q_itemsize: int
) -> int:
    """VMEM of the prefill kernel: two page buffers, queries and outputs (two each), softmax state."""
    spec, lanes = layout.spec, layout.lanes
    page = sizes.heads * layout.parts * spec.page_size * lanes * np.dtype(spec.dtype).itemsize
    rows = sizes.heads * sizes.tile_tokens * q_per_kv
    activations = 4 * rows * lanes * q_itemsize
    return 2 * sizes.pages_per_block * page + activations + rows * (2 * LANES + lanes) * 4
