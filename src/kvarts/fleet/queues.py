"""In which order a worker that takes over requests admits those that wait: admission policies."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from kvarts.request import Request, RequestState
from kvarts.sched.policy import NEVER_NS

__all__ = ["ByAge", "ByReservation"]


def age(request: Request) -> tuple[int, int, int]:
    """Return what requests are sorted by: priority, then arrival at the fleet."""
    return -request.priority, request.arrival_ns, request.index


class ByAge:
    """Larger priorities first, among equals those that arrived at the fleet first, wherever they came from.

    So a request that was preempted waits for no request that came after it.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    def push(self, request: Request) -> None:
        """Add `request`."""
        insort(self._waiting, request, key=age)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        self._waiting.remove(request)

    def head(self, now_ns: int) -> Request:
        """Return the oldest request."""
        return self._waiting[0]

    def holds_until_ns(self, now_ns: int) -> int:
        """Return NEVER_NS: the order does not change with time."""
        return NEVER_NS

    def num_ahead(self, request: Request) -> int:
        """Return how many requests go before `request`."""
        return self._waiting.index(request)

    def lets_reserve(self, request: Request) -> bool:
        """Return whether no request that needs memory here is before `request`, which wants pages for its prompt."""
        return not any(other.state is not RequestState.LOADED and age(other) < age(request) for other in self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


class ByReservation:
    """As Dynamo's mocker: a preempted request first; others before the first that got its pages after them.

    While it `is_gated`, no preempted request is the head if another waits.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self.is_gated = False
        self.orders: dict[int, int] = {}
        """The place in the order of reservations of each request that has one here, by index."""

    def push(self, request: Request) -> None:
        """Add `request`."""
        if request.state is RequestState.PREEMPTED:
            self._waiting.insert(0, request)
            return
        order = self.orders.get(request.index, NEVER_NS)
        for place, other in enumerate(self._waiting):
            if self.orders.get(other.index, NEVER_NS) > order:
                self._waiting.insert(place, request)
                return
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        self._waiting.remove(request)

    def head(self, now_ns: int) -> Request:
        """Return the first request; while gated, the first that has its pages, if there is one."""
        if self.is_gated:
            for request in self._waiting:
                if request.state is RequestState.LOADED:
                    return request
        return self._waiting[0]

    def holds_until_ns(self, now_ns: int) -> int:
        """Return NEVER_NS: the order does not change with time."""
        return NEVER_NS

    def num_ahead(self, request: Request) -> int:
        """Return how many requests go before `request`."""
        return self._waiting.index(request)

    def lets_reserve(self, request: Request) -> bool:
        """Return True: preempted requests wait for all that want pages."""
        return True

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)
