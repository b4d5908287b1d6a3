"""Who is admitted first and who is preempted first: total orders over what waits and what runs.

Larger priorities are more important. Among equals, who waits is admitted in arrival order, a preempted request
before all others; who runs is preempted in reverse admission order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvarts.request import Request

__all__ = ["RunningSet", "WaitingQueue"]


class WaitingQueue:
    """Requests that wait, by priority, then preempted before new, then arrival."""

    __slots__ = ("_by_priority", "_top", "num_waiting", "num_waiting_tokens")

    def __init__(self) -> None:
        self._by_priority: dict[int, deque[Request]] = {}
        self._top: deque[Request] | None = None
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        """Tokens known of all that wait."""

    def push(self, request: Request) -> None:
        """Behind its equals."""
        self._queue(request.priority).append(request)
        self.num_waiting += 1
        self.num_waiting_tokens += request.num_known

    def push_front(self, request: Request) -> None:
        """Before its equals: a preempted request."""
        self._queue(request.priority).appendleft(request)
        self.num_waiting += 1
        self.num_waiting_tokens += request.num_known

    def head(self) -> Request:
        """Who is next; somebody waits."""
        assert self._top is not None
        return self._top[0]

    def pop(self) -> Request:
        """Takes the head out."""
        top = self._top
        assert top
        request = top.popleft()
        self._took(request, top)
        return request

    def remove(self, request: Request) -> None:
        """Takes out a request from anywhere: it was cancelled. Costs the length of its queue."""
        queue = self._by_priority[request.priority]
        queue.remove(request)
        self._took(request, queue)

    def num_ahead(self, request: Request) -> int:
        """How many wait that go before `request`, which waits and came last."""
        return sum(len(queue) for priority, queue in self._by_priority.items() if priority >= request.priority) - 1

    def _took(self, request: Request, queue: deque[Request]) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= request.num_known
        if not queue:
            del self._by_priority[request.priority]
            self._top = self._by_priority[max(self._by_priority)] if self._by_priority else None

    def _queue(self, priority: int) -> deque[Request]:
        queue = self._by_priority.get(priority)
        if queue is None:
            queue = self._by_priority[priority] = deque()
            self._top = self._by_priority[max(self._by_priority)]
        return queue

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._by_priority, reverse=True):
            yield from self._by_priority[priority]


class RunningSet:
    """Requests that run, by priority, then admission."""

    __slots__ = ("_by_priority", "num_running")

    def __init__(self) -> None:
        self._by_priority: dict[int, dict[int, Request]] = {}
        self.num_running = 0

    def add(self, request: Request) -> None:
        """`request.admission` is larger than all before."""
        same = self._by_priority.get(request.priority)
        if same is None:
            same = self._by_priority[request.priority] = {}
        same[request.admission] = request
        self.num_running += 1

    def remove(self, request: Request) -> None:
        """Takes out a request that ended or was preempted."""
        same = self._by_priority[request.priority]
        del same[request.admission]
        if not same:
            del self._by_priority[request.priority]
        self.num_running -= 1

    def victim(self) -> Request:
        """Who loses its pages when one is missing: of the lowest priority, the last admitted.

        Whoever asks is among the candidates, so a victim is never more important than the asker, and of its equals
        only those admitted after it go before it.
        """
        lowest = self._by_priority[min(self._by_priority)]
        return lowest[next(reversed(lowest))]

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._by_priority):
            yield from self._by_priority[priority].values()
