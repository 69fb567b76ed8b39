"""How often each part of the TPU attention kernels runs, from the rows and the block sizes.

The order of the segments is that of the compiled code (tpu_bundles.Program); a test checks the
number of page copies in the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.tpu_pages import UNROLL


def _page_loops(pages: int) -> tuple[int, int]:
    """Turns of the unrolled loop that starts page copies, and of the one over what is left."""
    return pages // UNROLL, pages % UNROLL


def _later_page_loops(runs: dict[str, int]) -> tuple[int, int]:
    """As _page_loops, summed over all blocks but the first."""
    groups, rest = _page_loops(runs["first_pages"])
    return runs["page_groups"] - groups, runs["page_rest"] - rest


def decode_runs(kv_lens: Sequence[int], page_size: int, pages_per_block: int) -> dict[str, int]:
    """How often each part of the decode kernel runs, without a sliding window."""
    names = "rows blocks pages first_pages page_groups page_rest partial partial_pages whole chunks"
    runs: dict[str, int] = dict.fromkeys(names.split(), 0)
    block_tokens = page_size * pages_per_block
    chunk = max(128, page_size)
    for kv_len in (n for n in kv_lens if n):
        runs["rows"] += 1
        pages = -(-kv_len // page_size)
        for first in range(0, pages, pages_per_block):
            held = min(pages - first, pages_per_block)
            runs["first_pages"] = runs["first_pages"] or held
            tokens = kv_len - first * page_size
            runs["blocks"] += 1
            runs["pages"] += held
            runs["page_groups"] += held // UNROLL
            runs["page_rest"] += held % UNROLL
            if held < pages_per_block:
                runs["partial"] += 1
                runs["partial_pages"] += held
            if tokens >= block_tokens:
                runs["whole"] += 1
            else:
                runs["chunks"] += -(-tokens // chunk)
    return runs


def decode_segments(runs: dict[str, int]) -> list[float]:
    """Runs of the decode kernel's segments, in order of address, for one grid step."""
    return [
        1,
        1,  # first block: branch, then its loops over pages
        *_page_loops(runs["first_pages"]),
        runs["rows"],
        runs["rows"],
        runs["blocks"],
        runs["blocks"] - 1,  # start of the next block, then its loops over pages
        *_later_page_loops(runs),
        runs["partial"],  # waits page by page
        runs["partial_pages"],
        runs["whole"],
        runs["blocks"] - runs["whole"],
        runs["chunks"],
    ]


def prefill_runs(
    rows: Sequence[tuple[int, int]],
    page_size: int,
    pages_per_block: int,
    tile_tokens: int,
    step_tokens: int,
    step_keys: int,
    head_blocks: int,
) -> dict[str, int]:
    """How often each part of the prefill kernel runs, without a sliding window."""
    names = "items blocks pages page_groups page_rest partial partial_pages key_steps plain masked"
    runs: dict[str, int] = dict.fromkeys(names.split(), 0)
    tokens = sum(q_len for q_len, _ in rows)
    tiles = -(-tokens // tile_tokens)
    block_tokens, end, first_pages = page_size * pages_per_block, 0, 0
    for q_len, kv_len in rows:
        start, end = end, end + q_len
        shift = kv_len - end
        for tile in range(start // tile_tokens, -(-end // tile_tokens)):
            low, high = max(start, tile * tile_tokens), min(end, (tile + 1) * tile_tokens)
            pages = -(-(high + shift) // page_size)
            runs["items"] += 1
            for first in range(0, pages, pages_per_block):
                held = min(pages - first, pages_per_block)
                first_pages = first_pages or held
                runs["blocks"] += 1
                runs["pages"] += held
                runs["page_groups"] += held // UNROLL
                runs["page_rest"] += held % UNROLL
                if held < pages_per_block:
                    runs["partial"] += 1
                    runs["partial_pages"] += held
                base = first * page_size
                stop = min(high + shift, base + block_tokens)
                for key in range(base, stop, step_keys):
                    runs["key_steps"] += 1
                    first_token = max(low, key - shift)
                    step = (first_token - tile * tile_tokens) // step_tokens
                    while tile * tile_tokens + step * step_tokens < high:
                        begin = tile * tile_tokens + step * step_tokens
                        plain = begin >= low and begin + step_tokens <= high
                        plain = plain and begin + shift >= key + step_keys - 1
                        runs["plain" if plain else "masked"] += 1
                        step += 1
    runs = {name: count * head_blocks for name, count in runs.items()}
    steps = tile_tokens // step_tokens
    return runs | {
        "grid": tiles * head_blocks,
        "tile_steps": tiles * head_blocks * steps,
        "first_pages": first_pages,
    }


def prefill_segments(runs: dict[str, int]) -> list[float]:
    """Runs of the prefill kernel's segments, in order of address."""
    # With one grid step the compiler drops the grid's loop and the test for the first step.
    outer = [] if runs["grid"] == 1 else [runs["grid"], 1, 1]
    return [
        1,
        *outer,
        1,  # first block, then the loops over its pages
        *_page_loops(runs["first_pages"]),
        runs["tile_steps"],  # reset
        runs["items"],
        runs["items"],
        runs["blocks"],
        runs["blocks"] - 1,  # start of the next block, then its loops over pages
        *_later_page_loops(runs),
        runs["partial"],
        runs["partial_pages"],
        runs["key_steps"],
        runs["plain"] + runs["masked"],
        runs["plain"],
        runs["masked"],
        runs["tile_steps"],  # finish
    ]
