"""Block sizes: whatever the shape, they fit the kernels' own constraints and VMEM."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from pallas_kernels import tpu_tables
from pallas_kernels.attention_types import KVCacheSpec
from pallas_kernels.tpu_layout import head_groups, layout_of

HEADS = [(32, 8), (8, 1), (9, 3), (14, 2), (32, 32), (64, 8), (16, 1), (128, 8)]


@pytest.fixture(autouse=True)
def fresh_table():
    tpu_tables._tuned.cache_clear()
    yield
    tpu_tables._tuned.cache_clear()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "7x"])
@pytest.mark.parametrize("operands", ["bf16", "f32"])
def test_sizes_are_whole_and_fit(heads, page_size, head_dim, chip, operands) -> None:
    q_heads, kv_heads = heads
    itemsize = 2 if operands == "bf16" else 4
    dtype = jnp.bfloat16 if operands == "bf16" else jnp.float32
    layout = layout_of(KVCacheSpec(64, page_size, kv_heads, head_dim, dtype))
    blocks, groups = tpu_tables.blocks_for(chip, operands), head_groups(q_heads, kv_heads)
    pages = tpu_tables.decode_pages(blocks, layout)
    assert pages * page_size % max(128, page_size) == 0
    sizes = tpu_tables.prefill_blocks(blocks, layout, num_tokens=8192, q_per_kv=groups.q_per_kv)
    assert sizes.step_tokens * groups.q_per_kv % 16 == 0
    assert sizes.tile_tokens % sizes.step_tokens == 0
    assert sizes.step_keys % page_size == 0
    assert sizes.pages_per_block * page_size % sizes.step_keys == 0
    assert kv_heads % sizes.heads == 0
    limit = tpu_tables.vmem_limit(chip)
    decode = tpu_tables.decode_vmem_bytes(blocks, layout, groups, rows=256, q_itemsize=itemsize)
    prefill = tpu_tables.prefill_vmem_bytes(
        sizes, layout, q_per_kv=groups.q_per_kv, q_itemsize=itemsize
    )
    assert decode < limit
    assert prefill < limit


def test_a_short_step_takes_a_small_tile() -> None:
    layout = layout_of(KVCacheSpec(64, 16, 8, 128, jnp.bfloat16))
    sizes = tpu_tables.prefill_blocks(tpu_tables.Blocks(), layout, num_tokens=70, q_per_kv=4)
    assert sizes.tile_tokens == 128


@pytest.mark.parametrize(
    ("heads", "expected"),
    [((32, 8), (4, 2, 4)), ((8, 1), (8, 1, 1)), ((9, 3), (4, 1, 3)), ((32, 32), (1, 8, 4))],
)
def test_query_heads_fill_registers(heads, expected) -> None:
    groups = head_groups(*heads)
    assert (groups.q_per_kv, groups.heads, groups.count) == expected


def test_a_tuned_entry_takes_precedence_for_its_shape(monkeypatch, tmp_path) -> None:
    tuned = tpu_tables.Blocks(decode_keys=1024)
    path = tmp_path / "blocks.json"
    entry = {"chip": "v6e", "shape": "mine", "blocks": dataclasses.asdict(tuned)}
    path.write_text(json.dumps([entry]))
    monkeypatch.setattr(tpu_tables, "TABLE_FILE", path)
    assert tpu_tables.blocks_for("v6e", "bf16", "mine") == tuned
    assert tpu_tables.blocks_for("v6e", "bf16", "other") != tuned
    assert tpu_tables.blocks_for("v5e", "bf16", "mine") != tuned


def test_an_override_holds_only_inside() -> None:
    mine = tpu_tables.Blocks(decode_keys=256)
    with tpu_tables.use_blocks(mine):
        assert tpu_tables.blocks_for("v6e", "bf16") is mine
    assert tpu_tables.blocks_for("v6e", "bf16") is not mine


def test_an_unknown_device_takes_the_default_chip() -> None:
    assert tpu_tables.current_chip() == tpu_tables.DEFAULT_CHIP
