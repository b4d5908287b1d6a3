"""The order in which waiting requests are admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from mypy_extensions import mypyc_attr

from kvarts.base.user_code import added_state, set_state
from kvarts.core.request import Request, RequestState

__all__ = ["NEVER_NS", "AdmissionPolicy", "ArrivalPolicy", "PriorityPolicy", "QueuePolicy", "WaitingQueue"]

NEVER_NS: Final = (1 << 62) - 1


class AdmissionPolicy(Protocol):
    """The order in which waiting requests are admitted, and how long its head stays certain.

    Promises: the same calls give the same answers, in any process. While requests wait there is a head. The head
    changes only when a request is pushed or removed, or at a time that `holds_until_ns` has returned: identical steps
    are done at once up to that time, with the same outcome as one by one.
    """

    def push(self, request: Request) -> None:
        """Add `request`, which is WAITING, or PREEMPTED if it ran before. One that `goes_first` was the head before."""

    def remove(self, request: Request) -> None:
        """Remove `request`, which was admitted or cancelled."""

    def head(self, now_ns: int) -> Request:
        """Return the request to admit next. At least one request waits."""

    def holds_until_ns(self, now_ns: int) -> int:
        """Return the first time after `now_ns` at which the head may change; NEVER_NS if time does not change it."""

    def num_ahead(self, request: Request) -> int:
        """Return the number of requests ahead of `request`, which was just pushed."""

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests, in a fixed order."""


PREEMPTED: Final = RequestState.PREEMPTED


@mypyc_attr(allow_interpreted_subclasses=True)
class PriorityPolicy:
    """Larger priorities first; within a priority former heads, the last returned first; then in order of arrival.

    Former heads were preempted, or waited for another request's load.
    """

    __slots__ = ("_by_priority", "_top")

    def __init__(self) -> None:
        self._by_priority: dict[int, deque[Request]] = {}
        """No queue is empty, unless it is the only one: requests of one priority may come and go one by one."""
        self._top: deque[Request] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a subclass adds: a copy has no requests, which belong to one engine."""
        return added_state(self, ("_by_priority", "_top"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy, which has no requests."""
        PriorityPolicy.__init__(self)
        set_state(self, state)

    def push(self, request: Request) -> None:
        """Add `request` after those of its priority; a former head before them."""
        queue = self._by_priority.get(request.priority)
        if queue is None:
            if not self._top:
                self._by_priority.clear()
            queue = self._by_priority[request.priority] = deque()
            self._top = self._by_priority[max(self._by_priority)]
        if request.goes_first or request.state is PREEMPTED:
            queue.appendleft(request)
        else:
            queue.append(request)

    def remove(self, request: Request) -> None:
        """Remove `request`. Takes time linear in the length of its queue, unless it is the head."""
        queue = self._by_priority[request.priority]
        if queue[0] is request:
            queue.popleft()
        else:
            queue.remove(request)
        if not queue and len(self._by_priority) > 1:
            del self._by_priority[request.priority]
            self._top = self._by_priority[max(self._by_priority)]

    def head(self, now_ns: int) -> Request:
        """Return the first request of the highest priority."""
        assert self._top is not None
        return self._top[0]

    def holds_until_ns(self, now_ns: int) -> int:
        """Return NEVER_NS: the order does not change with time."""
        return NEVER_NS

    def num_ahead(self, request: Request) -> int:
        """Return the number of requests ahead of `request`, which was just pushed and is new."""
        return sum(len(queue) for priority, queue in self._by_priority.items() if priority >= request.priority) - 1

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._by_priority, reverse=True):
            yield from self._by_priority[priority]


@mypyc_attr(allow_interpreted_subclasses=True)
class ArrivalPolicy:
    """Larger priorities first, then earlier arrivals, then ids in the order of their text: vLLM's policy `priority`.

    A preempted request returns to its place in this order. The number of a request without an id serves as its id.
    """

    __slots__ = ("_keys", "_requests")

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, str, int]] = []
        self._requests: dict[int, Request] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a subclass adds: a copy has no requests, which belong to one engine."""
        return added_state(self, ("_keys", "_requests"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the attributes of a copy, which has no requests."""
        ArrivalPolicy.__init__(self)
        set_state(self, state)

    def push(self, request: Request) -> None:
        """Add `request` in its place."""
        insort(self._keys, _arrival_key(request))
        self._requests[request.index] = request

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        del self._keys[bisect_left(self._keys, _arrival_key(request))]
        del self._requests[request.index]

    def head(self, now_ns: int) -> Request:
        """Return the first request."""
        return self._requests[self._keys[0][-1]]

    def holds_until_ns(self, now_ns: int) -> int:
        """Return NEVER_NS: the order does not change with time."""
        return NEVER_NS

    def num_ahead(self, request: Request) -> int:
        """Return the number of requests ahead of `request`."""
        return bisect_left(self._keys, _arrival_key(request))

    def __iter__(self) -> Iterator[Request]:
        for *_, index in self._keys:
            yield self._requests[index]


class QueuePolicy:
    """First come, first served; a request that is preempted comes again. As SGLang's queue, which may be arranged.

    `num_skipped`: the first so many requests are not looked at in the step being planned.
    """

    __slots__ = ("_queue", "num_skipped")

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()
        self.num_skipped = 0

    def push(self, request: Request) -> None:
        """Add `request` at the end."""
        self._queue.append(request)

    def remove(self, request: Request) -> None:
        """Remove `request`. Takes time linear in its place."""
        if self._queue[0] is request:
            self._queue.popleft()
        else:
            self._queue.remove(request)

    def head(self, now_ns: int) -> Request:
        """Return the first request that is not skipped. There is one."""
        return self._queue[self.num_skipped]

    def holds_until_ns(self, now_ns: int) -> int:
        """Return NEVER_NS: the order does not change with time."""
        return NEVER_NS

    def num_ahead(self, request: Request) -> int:
        """Return the number of requests ahead of `request`, which was just pushed."""
        return len(self._queue) - 1

    def arrange(self, requests: Iterable[Request]) -> None:
        """Put the waiting requests in this order; requests that come are last."""
        self._queue = deque(requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


def _arrival_key(request: Request) -> tuple[int, int, str, int]:
    text = str(request.index) if request.request_id is None else request.request_id
    return -request.priority, request.arrival_ns, text, request.index


class WaitingQueue:
    """Requests that wait to be admitted, in the order of `policy`. Owner of their number.

    `blocks_of`: returns the blocks that a request with a given number of known tokens needs; set if other models use
    the sum.
    """

    __slots__ = (
        "_blocks_of",
        "head",
        "holds_until_ns",
        "num_ahead",
        "num_waiting",
        "num_waiting_blocks",
        "num_waiting_tokens",
        "policy",
    )

    def __init__(self, policy: AdmissionPolicy, blocks_of: Callable[[int], int] | None = None) -> None:
        self.policy = policy
        self.head = policy.head
        self.holds_until_ns = policy.holds_until_ns
        self.num_ahead = policy.num_ahead
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        """Known tokens of all waiting requests."""
        self.num_waiting_blocks = 0
        """The sum of the blocks that each of these requests needs; 0 without `blocks_of`."""
        self._blocks_of = blocks_of

    def push(self, request: Request) -> None:
        """Add `request`."""
        self.policy.push(request)
        self.num_waiting += 1
        num_known = request.num_prompt_tokens + request.num_output_tokens
        self.num_waiting_tokens += num_known
        if self._blocks_of is not None:
            self.num_waiting_blocks += self._blocks_of(num_known)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        self.policy.remove(request)
        self.num_waiting -= 1
        num_known = request.num_prompt_tokens + request.num_output_tokens
        self.num_waiting_tokens -= num_known
        if self._blocks_of is not None:
            self.num_waiting_blocks -= self._blocks_of(num_known)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.policy)
