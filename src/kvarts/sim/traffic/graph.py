"""Graphs of requests: connected components, and dependencies inferred from recorded times.

A request cannot have waited for a request that had not ended when it was sent. So a sub-agent is taken to begin after
the latest request of its parent sent before it, and the parent's first request after the sub-agent's end waits for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvarts.sim.traffic.trace_request import After, TraceRequest

__all__ = ["NO_OUTPUT", "RecordedTimes", "components", "linked", "with_output"]

NO_OUTPUT = "without output tokens"
"""The reason why such requests are left out, which counts them."""


class RecordedTimes(msgspec.Struct, frozen=True):
    """Times at which a request was sent and ended, in nanoseconds of the recording. The end is None if unknown.

    `wait_ns`: delay by the client after the previous request, if the recording contains it explicitly.
    """

    row: int
    start_ns: int
    end_ns: int | None
    wait_ns: int | None = None

    @property
    def known_end_ns(self) -> int:
        """The end, or if unknown the start, which is a lower bound."""
        return self.start_ns if self.end_ns is None else self.end_ns


def linked(main: Sequence[RecordedTimes], children: Iterable[Sequence[RecordedTimes]]) -> dict[int, tuple[After, ...]]:
    """Return the dependencies of each request, by row, inferred from recorded times. First requests may have none.

    `main` and each of `children` are requests that were sent one after the other. The first request of a child waits
    for the latest request of `main` that was sent before it: for its end, or for its arrival if it had not ended. A
    request of `main` waits for all children that began after the request before it and ended before it was sent. It is
    sent as long after the last of these ends as in the recording.
    """
    after: dict[int, tuple[After, ...]] = {}
    starts = [request.start_ns for request in main]
    joined: dict[int, list[RecordedTimes]] = {}
    for child in children:
        parent = bisect_right(starts, child[0].start_ns) - 1
        if parent >= 0:
            after[child[0].row] = (_after(main[parent], child[0]),)
        _chain(child, {}, after)
        last = max(child, key=lambda request: request.known_end_ns)
        join = bisect_right(starts, last.known_end_ns - 1, lo=max(parent + 1, 0))
        if join < len(main) and join > 0:
            joined.setdefault(join, []).append(last)
    _chain(main, joined, after)
    return after


def _after(before: RecordedTimes, request: RecordedTimes) -> After:
    """Return the dependency of `request` on `before`: on its end if that was earlier, else on its arrival."""
    if before.known_end_ns <= request.start_ns:
        return After(before.row, request.start_ns - before.known_end_ns)
    return After(before.row, request.start_ns - before.start_ns, of_arrival=True)


def _chain(
    requests: Sequence[RecordedTimes], joined: dict[int, list[RecordedTimes]], after: dict[int, tuple[After, ...]]
) -> None:
    """Make each request wait for the one before it, and for the requests in `joined` at its index."""
    for place in range(1, len(requests)):
        before, request = requests[place - 1], requests[place]
        others = joined.get(place, [])
        if not others:
            known = None if request.wait_ns is None else After(before.row, request.wait_ns)
            after[request.row] = (known or _after(before, request),)
            continue
        ended = [other for other in (before, *others) if other.known_end_ns <= request.start_ns]
        delay_ns = request.start_ns - max(other.known_end_ns for other in ended)
        waits = [After(other.row, delay_ns) for other in ended]
        after[request.row] = tuple(waits if before in ended else (*waits, _after(before, request)))


def with_output(requests: list[TraceRequest], left_out: Counter[str]) -> list[TraceRequest]:
    """Return the requests that have output tokens, the first at 0, and count the others in `left_out`.

    `requests` must be in order of arrival. A request that waits for one that is left out waits for what that waits for,
    then for both delays.
    """
    if all(request.num_output_tokens for request in requests):
        return requests
    waits: dict[int, _Wait] = {}
    before: dict[str, TraceRequest] = {}
    for request in requests:
        after = request.after
        if not after and request.session_id in before:
            after = (After(before[request.session_id].row, request.delay_ns or 0),)
        not_before_ns = None if after and request.delay_ns is not None else request.arrival_ns
        waits[request.row] = _Wait(after, not_before_ns, bool(request.num_output_tokens))
        if request.session_id is not None:
            before[request.session_id] = request
    before.clear()
    kept = []
    for request in requests:
        if not request.num_output_tokens:
            left_out[NO_OUTPUT] += 1
            continue
        if any(not waits[each.row].is_kept for each in waits[request.row].after):
            kept.append(_relinked(request, waits, before.get(request.session_id or "")))
        else:
            kept.append(request)
        if request.session_id is not None:
            before[request.session_id] = request
    kept.sort(key=lambda request: request.arrival_ns)
    first_ns = kept[0].arrival_ns if kept else 0
    return [msgspec.structs.replace(request, arrival_ns=request.arrival_ns - first_ns) for request in kept]


class _Wait(msgspec.Struct, frozen=True):
    """What a request waits for, and whether it has output tokens."""

    after: tuple[After, ...]
    not_before_ns: int | None
    is_kept: bool


def _relinked(request: TraceRequest, waits: Mapping[int, _Wait], before: TraceRequest | None) -> TraceRequest:
    """Return a request that waits for kept ones only. `before`: the kept turn before it in its session."""
    after: dict[After, None] = {}
    not_before_ns = waits[request.row].not_before_ns
    open_ = list(waits[request.row].after)
    while open_:
        each = open_.pop()
        wait = waits[each.row]
        if wait.is_kept:
            after[each] = None
            continue
        if wait.not_before_ns is not None:
            not_before_ns = max(not_before_ns or 0, wait.not_before_ns + each.delay_ns)
        open_ += [After(other.row, other.delay_ns + each.delay_ns, other.of_arrival) for other in wait.after]
    if not after and before is not None:
        after[After(before.row, of_arrival=True)] = None  # without any, it would wait for that turn's end
    if not_before_ns is not None:
        return msgspec.structs.replace(request, arrival_ns=not_before_ns, delay_ns=None, after=tuple(after))
    only = next(iter(after))
    if len(after) == 1 and before is not None and only.row == before.row and not only.of_arrival:
        return msgspec.structs.replace(request, delay_ns=only.delay_ns, after=())
    return msgspec.structs.replace(request, delay_ns=0, after=tuple(after))


def components(requests: Sequence[TraceRequest], *, by_name: bool = False) -> list[int]:
    """Return the number of each request's play: a connected component of dependencies, numbered by first request.

    Requests of one session are connected. `by_name`: so are sessions with the same name before a slash.
    """
    parents = list(range(len(requests)))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = parents[parents[place]]
            place = parents[place]
        return place

    def join(a: int, b: int) -> None:
        first, second = root(a), root(b)
        parents[max(first, second)] = min(first, second)

    place_of_row = {request.row: place for place, request in enumerate(requests)}
    first_of: dict[str, int] = {}
    for place, request in enumerate(requests):
        for each in request.after:
            join(place, place_of_row[each.row])
        if request.session_id is not None:
            name = request.session_id.partition("/")[0] if by_name else request.session_id
            join(place, first_of.setdefault(name, place))
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(place), len(numbers)) for place in range(len(requests))]
