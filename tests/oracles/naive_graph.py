"""Requests that wait for each other, with a given duration each: when they arrive, found by looking again and again."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.sim.traffic.trace import TraceRequest

Edges = dict[int, list[tuple[int, int, bool]]]
"""By row: what it waits for (row, delay, whether it counts from the arrival)."""


def naive_edges(requests: Sequence[TraceRequest]) -> Edges:
    """What each request waits for: its `after`, or the turn before it."""
    edges: Edges = {}
    before: dict[str, int] = {}
    for request in requests:
        waits = [(each.row, each.delay_ns, each.of_arrival) for each in request.after]
        if not waits and request.session_id in before:
            waits = [(before[request.session_id], request.delay_ns or 0, False)]
        if request.session_id is not None:
            before[request.session_id] = request.row
        edges[request.row] = waits
    return edges


def ready_ns(request: TraceRequest, edges: Edges, arrivals: dict[int, int], ends: dict[int, int]) -> int | None:
    """When nothing that `request` waits for holds it any more; None if that is not known yet."""
    times = []
    for row, delay_ns, of_arrival in edges[request.row]:
        known = arrivals if of_arrival else ends
        if row not in known:
            return None
        times.append(known[row] + delay_ns)
    return max(times, default=0)


def naive_open_loop(requests: Sequence[TraceRequest], durations: dict[int, int]) -> dict[int, int]:
    """Arrivals by row if every request takes its duration, whatever else runs."""
    edges = naive_edges(requests)
    arrivals: dict[int, int] = {}
    ends: dict[int, int] = {}
    while len(arrivals) < len(requests):
        for request in requests:
            ready = ready_ns(request, edges, arrivals, ends)
            if request.row in arrivals or ready is None:
                continue
            own_ns = request.arrival_ns if not edges[request.row] or request.delay_ns is None else 0
            arrivals[request.row] = max(ready, own_ns)
            ends[request.row] = arrivals[request.row] + durations[request.row]
    return arrivals


def naive_closed_loop(requests: Sequence[TraceRequest], durations: dict[int, int], concurrency: int) -> dict[int, int]:
    """The same where so many plays are open at a time, each of them all requests that hang together."""
    edges = naive_edges(requests)
    plays = naive_plays(requests, edges)
    arrivals: dict[int, int] = {}
    free = [0] * concurrency  # when each place is free
    for play in plays:
        begin_ns = min(free)
        roots = [request for request in play if not edges[request.row]]
        first_ns = roots[0].arrival_ns
        ends: dict[int, int] = {}
        left = list(play)
        while left:
            for request in list(left):
                ready = ready_ns(request, edges, arrivals, ends)
                if ready is None:
                    continue
                has_own_time = not edges[request.row] or (request.delay_ns is None and request.after)
                own_ns = begin_ns + request.arrival_ns - first_ns if has_own_time else 0
                arrivals[request.row] = max(ready, own_ns)
                ends[request.row] = arrivals[request.row] + durations[request.row]
                left.remove(request)
        free[free.index(begin_ns)] = max(ends.values())
    return arrivals


def naive_plays(requests: Sequence[TraceRequest], edges: Edges) -> list[list[TraceRequest]]:
    """Requests that hang together, or are of one session, in order of the first that waits for nothing."""
    pairs = [(row, other) for row, waits in edges.items() for other, _, _ in waits]
    pairs += [
        (a.row, b.row) for a in requests for b in requests if a.session_id is not None and a.session_id == b.session_id
    ]
    groups = [{request.row} for request in requests]
    for a_row, b_row in pairs:
        mine = next(group for group in groups if a_row in group)
        its = next(group for group in groups if b_row in group)
        if mine is not its:
            mine |= its
            groups.remove(its)
    plays = [[request for request in requests if request.row in group] for group in groups]
    place = {request.row: place for place, request in enumerate(requests)}
    return sorted(plays, key=lambda play: min(place[each.row] for each in play if not edges[each.row]))
