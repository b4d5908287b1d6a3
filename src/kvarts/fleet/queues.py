"""Admission policies of a worker that takes over requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from kvarts.request import Request, RequestState
from kvarts.sched.policy import NEVER_NS

__all__ = ["ByAge", "ByReservation"]


def age(request: Request) -> tuple[int, int, int]:
    """Return the sort key of a request: priority, then arrival at the fleet."""
    return -request.priority, request.arrival_ns, request.index


class ByAge:
    """Larger priorities first; among equals, earlier arrival at the fleet, whichever worker the request was on before.

    A preempted request therefore never waits for one that arrived after it.
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
        """Return the number of requests ahead of `request`."""
        return self._waiting.index(request)

    def lets_reserve(self, request: Request) -> bool:
        """Return whether no older request here needs memory, so that `request` may reserve pages for its prompt."""
        return not any(other.state is not RequestState.LOADED and age(other) < age(request) for other in self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


class ByReservation:
    """The order of Dynamo's mocker: preempted requests at the head, the others by order of reservation.

    While `is_gated`, a request that has its pages is admitted before preempted ones.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self.is_gated = False
        self.orders: dict[int, int] = {}
        """Place of each request in the order of reservations, by index."""

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
        """Return the first request; while gated, the first whose pages are loaded, if there is one."""
        if self.is_gated:
            for request in self._waiting:
                if request.state is RequestState.LOADED:
                    return request
        return self._waiting[0]

    def holds_until_ns(self, now_ns: int) -> int:
        """Return NEVER_NS: the order does not change with time."""
        return NEVER_NS

    def num_ahead(self, request: Request) -> int:
        """Return the number of requests ahead of `request`."""
        return self._waiting.index(request)

    def lets_reserve(self, request: Request) -> bool:
        """Return True: preempted requests wait behind all reservations."""
        return True

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)
