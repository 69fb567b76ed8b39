"""Requests that wait to run, in the order in which they will."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterator
from typing import Literal

from scheduler.request import Request, RequestStatus


class QueueFullError(RuntimeError):
    """More requests wait than `max_num_queued_reqs` allows; try again later."""


class WaitingQueue:
    """Waiting and preempted requests under one policy.

    "fcfs": preempted requests first, by arrival, then fresh ones by arrival. "priority": by
    priority (lower first), then preempted before fresh, then by arrival. A request that ended
    while it waited is dropped when it is met, so that removal costs nothing.
    """

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._by_priority = policy == "priority"
        self._fresh: deque[Request] = deque()
        self._preempted: list[Request] = []
        self._heap: list[tuple[int, bool, float, int, Request]] = []
        self._num_fresh = 0
        self._num_preempted = 0

    def __len__(self) -> int:
        return self._num_fresh + self._num_preempted

    @property
    def num_fresh(self) -> int:
        """Requests that have never run."""
        return self._num_fresh

    def push(self, request: Request) -> None:
        """Adds a request of status WAITING or PREEMPTED; its queue_number orders equals."""
        preempted = request.status == RequestStatus.PREEMPTED
        if preempted:
            self._num_preempted += 1
        else:
            self._num_fresh += 1
        if self._by_priority:
            assert request.arrival_time is not None
            key = (request.priority, not preempted, request.arrival_time, request.queue_number)
            heapq.heappush(self._heap, (*key, request))
        elif preempted:
            bisect.insort(self._preempted, request, key=lambda r: r.queue_number)
        elif self._fresh and request.queue_number < self._fresh[0].queue_number:
            # It had left the queue for a KV load and comes back to its place.
            self._fresh.appendleft(request)
        else:
            self._fresh.append(request)

    def peek(self) -> Request | None:
        """The request to be admitted next, None if none waits."""
        if self._by_priority:
            while self._heap and self._heap[0][-1].status.finished:
                heapq.heappop(self._heap)
            return self._heap[0][-1] if self._heap else None
        while self._preempted and self._preempted[0].status.finished:
            self._preempted.pop(0)
        if self._preempted:
            return self._preempted[0]
        while self._fresh and self._fresh[0].status.finished:
            self._fresh.popleft()
        return self._fresh[0] if self._fresh else None

    def pop(self) -> Request:
        """Removes and returns what `peek` shows."""
        request = self.peek()
        assert request is not None
        if self._by_priority:
            heapq.heappop(self._heap)
        elif self._preempted:
            self._preempted.pop(0)
        else:
            self._fresh.popleft()
        self._count_out(request.status)
        return request

    def discard(self, status: RequestStatus) -> None:
        """Counts out a queued request that has just ended; `status` is what it was before."""
        self._count_out(status)

    def _count_out(self, status: RequestStatus) -> None:
        if status == RequestStatus.PREEMPTED:
            self._num_preempted -= 1
        else:
            self._num_fresh -= 1

    def __iter__(self) -> Iterator[Request]:
        """Requests in order of admission."""
        if self._by_priority:
            queue = [entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:-1])]
        else:
            queue = [*self._preempted, *self._fresh]
        return (request for request in queue if not request.status.finished)


__all__ = ["QueueFullError", "WaitingQueue"]
