"""Static shapes of the step: pure functions of the limits, the same on every host."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from engine.device_state import StepShape


def decode_row_buckets(max_num_seqs: int, smallest: int = 8) -> tuple[int, ...]:
    """Padded row counts of decode steps: 1, then powers of two from `smallest` to the limit."""
    sizes = {1, max_num_seqs}
    size = smallest
    while size < max_num_seqs:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def mixed_token_buckets(max_num_batched_tokens: int, smallest: int = 16) -> tuple[int, ...]:
    """Padded token counts of mixed steps: powers of four, then of two from 256, to the limit."""
    sizes = {max_num_batched_tokens}
    size = smallest
    while size < max_num_batched_tokens:
        sizes.add(size)
        size *= 4 if size < 256 else 2
    return tuple(sorted(sizes))


class Buckets:
    """The compiled shapes, and which of them a step takes."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, *, least: int = 1):
        """Args:
        max_num_seqs, max_num_batched_tokens: the limits.
        least: rows and tokens that every step is padded to.
        """
        rows = {max(least, n) for n in decode_row_buckets(max_num_seqs)}
        tokens = {max(least, n) for n in mixed_token_buckets(max_num_batched_tokens)}
        self.decode = tuple(StepShape(n, n, decode=True) for n in sorted(rows))
        self.mixed = tuple(
            StepShape(n, max(least, min(n, max_num_seqs)), decode=False) for n in sorted(tokens)
        )

    @property
    def all(self) -> Sequence[StepShape]:
        """Every shape, the largest first: it takes longest to compile."""
        return tuple(reversed(self.mixed)) + tuple(reversed(self.decode))

    def select(self, *, num_rows: int, num_tokens: int, num_decodes: int) -> StepShape:
        """Smallest shape that holds the step. Raises ValueError over the largest one."""
        if num_rows == num_decodes == num_tokens:
            i = bisect.bisect_left(self.decode, num_rows, key=lambda s: s.num_rows)
            if i < len(self.decode):
                return self.decode[i]
            raise ValueError(
                f"a step of {num_rows} rows exceeds the largest compiled one of "
                f"{self.decode[-1].num_rows}; raise --max_num_seqs"
            )
        i = bisect.bisect_left(self.mixed, num_tokens, key=lambda s: s.num_tokens)
        if i < len(self.mixed) and num_rows <= self.mixed[i].num_rows:
            return self.mixed[i]
        raise ValueError(
            f"a step of {num_tokens} tokens in {num_rows} rows exceeds the largest compiled one "
            f"of {self.mixed[-1].num_tokens}; raise --max_num_batched_tokens"
        )
