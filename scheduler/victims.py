"""Which running request gives its blocks back when another needs to grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from scheduler.request import Request


def choose_victim(
    running: Sequence[Request],
    policy: Literal["fcfs", "priority"],
    max_preemptions: int | None,
    frees_blocks: Callable[[Request], bool],
) -> Request:
    """The request to preempt, possibly the one that needs the blocks.

    "fcfs" takes the most recently admitted; "priority" the one of largest (priority, arrival).
    Requests preempted `max_preemptions` times are passed over, and so are those whose blocks are
    all shared, because preempting them would free nothing. If none is left, the last in order is
    taken. The first in order is never a victim while another runs, so the batch moves on.

    Args:
      running: at least one request, in order of admission.
      policy: the scheduling policy.
      max_preemptions: the cap, None for no cap.
      frees_blocks: whether preempting a request frees any block.
    """
    if policy == "priority":
        order = sorted(running, key=lambda r: (r.priority, r.arrival_time, r.queue_number))
    else:
        order = list(running)
    for request in reversed(order[1:]):
        capped = max_preemptions is not None and request.num_preemptions >= max_preemptions
        if not capped and frees_blocks(request):
            return request
    return order[-1]


__all__ = ["choose_victim"]
