"""Requests that wait, best first.

One queue serves both policies: under "fcfs" every priority is 0, so that the order is that of arrival; under "priority"
the number given to a request already holds its ageing (`Scheduler._rank`), so that nothing moves while it waits. A preempted
request comes back with its old arrival number and so stands before everything that came after it.
"""

import heapq
from collections.abc import Iterator

from octavo.scheduler.request import Request

_MIN_DEAD_ENTRIES = 32


class RequestQueue:
    """A heap by `Request.order`; removal from the middle marks the entry dead, and dead entries are swept in bulk."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._members: set[int] = set()  # arrival numbers: unique for life, unlike request ids
        self.num_prompt_tokens = 0  # of all that wait

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in no particular order."""
        return (request for _, arrival, request in self._heap if arrival in self._members)

    def push(self, request: Request) -> None:
        assert request.arrival not in self._members
        if len(self._heap) != len(self._members):
            # An entry left behind by `remove` must not come to life again beside the new one.
            self._sweep()
        heapq.heappush(self._heap, (request.priority, request.arrival, request))
        self._members.add(request.arrival)
        self.num_prompt_tokens += request.num_input_tokens

    def peek(self) -> Request:
        """The request to run next; the queue must not be empty."""
        while self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        self._forget(request)
        return request

    def remove(self, request: Request) -> None:
        """Take out a waiting request, wherever it stands."""
        self._forget(request)
        num_dead = len(self._heap) - len(self._members)
        if num_dead > _MIN_DEAD_ENTRIES and num_dead > len(self._members):
            self._sweep()

    def _forget(self, request: Request) -> None:
        self._members.remove(request.arrival)
        self.num_prompt_tokens -= request.num_input_tokens

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if entry[1] in self._members]
        heapq.heapify(self._heap)
