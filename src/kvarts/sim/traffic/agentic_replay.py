"""Agentic load as AIPerf runs it: plays of agents, on lanes, from a point inside each play, for a fixed time.

The settings, and the rules, are those of AIPerf 0.13's timing mode `agentic_replay` and of its scenario
`inferencex-agentx-mvp`; `warmup_requests_per_lane` and the cap on idle time of a play are those of 0.14 and of the
harness with which AgentX' results are published.

- Each of `concurrency` lanes replays one play at a time: a session and its sub-agents. Plays are taken in the order of
  the trace, and again from its first one after its last: the seed does not choose them.
- The first play of a lane starts at t*, an instant that is uniform over the time between its first and its last
  request. What was sent before is history. Later plays of a lane are replayed from their beginning.
- Warm-up: the last request before t* of each session that goes on after it is sent with one output token. If all of
  these have ended, `warmup_requests_per_lane` further requests per lane are, without their delays.
- Then the measurement begins. A session goes on with its first request that is left, and waits its recorded delay.
  Requests wait for each other as the trace says. After `benchmark_duration` no request is sent.
- If nothing of a play is in flight for `trace_idle_gap_cap_seconds`, or nothing at all for
  `system_idle_gap_cap_seconds`, what waits is sent that much sooner, at unchanged distances.
- A play that is replayed again has other contents (`cache_bust`): its prefixes are found within it only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.limits import LATEST_NS, MOST_COUNT, MOST_SEED, TooLateError, check_number, check_whole
from kvarts.sim.traffic.graph import components
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell
from kvarts.sim.traffic.trace_request import Units

__all__ = ["AgenticReplay"]

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
SHORTEST_S = 900.0
"""The shortest measurement that the scenario accepts."""
MOST_LANES = 1 << 16
MOST_UNSORTED = 1 << 24
"""Ids that are kept before they are sorted."""


class AgenticReplay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an agentic replay, with AIPerf's names and the defaults of its scenario; times in seconds."""

    concurrency: int
    trajectory_start_min_ratio: float = 0.0
    trajectory_start_max_ratio: float = 1.0
    warmup_requests_per_lane: int = 0
    trace_idle_gap_cap_seconds: float | None = None
    system_idle_gap_cap_seconds: float | None = 10.0
    benchmark_duration: float = 1800.0
    cache_bust: Literal["none", "first_turn_prefix"] = "first_turn_prefix"
    random_seed: int = 0

    def __post_init__(self) -> None:
        check_whole(self.concurrency, "concurrency", most=MOST_LANES)
        check_whole(self.warmup_requests_per_lane, "warmup_requests_per_lane", least=0, most=MOST_COUNT)
        check_whole(self.random_seed, "random_seed", least=0, most=MOST_SEED)
        for name in ("trajectory_start_min_ratio", "trajectory_start_max_ratio"):
            check_number(getattr(self, name), name, most=1.0)
        if self.trajectory_start_min_ratio > self.trajectory_start_max_ratio:
            what = f"must be at most trajectory_start_max_ratio, {self.trajectory_start_max_ratio}"
            raise ConfigError(f"{what}, got {self.trajectory_start_min_ratio}", field="trajectory_start_min_ratio")
        for name in ("trace_idle_gap_cap_seconds", "system_idle_gap_cap_seconds", "benchmark_duration"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), name, most=LATEST_NS / NS_PER_S)
        if self.benchmark_duration < SHORTEST_S:
            what = f"must be at least {SHORTEST_S:g}, got {self.benchmark_duration:g}"
            raise ConfigError(what, field="benchmark_duration")

    def of(self, trace: Trace) -> Trace:
        """Return the trace as this load. Raise InputError for a stream."""
        if trace.requests is None:
            raise InputError("must be known as a whole", path=trace.name)
        facts = {name: getattr(trace, name) for name in ("unit_tokens", "has_output_tokens", "knows_prefixes", "name")}
        load = Trace(list(trace), left_out=trace.left_out, warnings=trace.warnings, **facts)
        load.concurrency = self.concurrency
        load.source_of = partial(AgenticLoop, scenario=self)
        return load

    def start_ms(self, play: str, lane: int, first_ms: float, last_ms: float) -> float:
        """Return t* of `play` on `lane`, in milliseconds, as AIPerf draws it."""
        digest = sha256(f"{self.random_seed}:{play}:{lane}".encode()).digest()
        low = first_ms + self.trajectory_start_min_ratio * (last_ms - first_ms)
        high = max(low, first_ms + self.trajectory_start_max_ratio * (last_ms - first_ms))
        if high == low:
            return low
        return float(np.random.default_rng(int.from_bytes(digest[:8], "big")).uniform(low, high))


class _Wait(NamedTuple):
    """An edge from a request to a later one of its play, by their places. `delay_ns` is None: at its own time."""

    place: int
    delay_ns: int | None


class _Play:
    """A play of the trace: its requests in order of time, and the edges between them."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self.requests = requests
        self.name = (requests[0].session_id or str(requests[0].row)).partition("/")[0]
        places = {request.row: place for place, request in enumerate(requests)}
        self.num_waits = [0] * len(requests)
        self.on_end: list[list[_Wait]] = [[] for _ in requests]
        self.on_arrival: list[list[_Wait]] = [[] for _ in requests]
        self.last_of_session: dict[str | None, int] = {}
        for place, request in enumerate(requests):
            before = self.last_of_session.get(request.session_id)
            for each in request.after:
                edges = self.on_arrival if each.of_arrival else self.on_end
                edges[places[each.row]].append(_Wait(place, each.delay_ns))
            if not request.after and before is not None:
                self.on_end[before].append(_Wait(place, request.delay_ns))
            self.num_waits[place] = len(request.after) or int(before is not None)
            if request.session_id is not None:
                self.last_of_session[request.session_id] = place


class _Lane:
    """A play that runs. Owner of what its requests still wait for, and of when they are due."""

    def __init__(self, play: _Play, number: int, copy: int) -> None:
        self.play = play
        self.number = number
        """Counts the plays that were begun."""
        self.copy = copy
        """How often its play was begun before."""
        self.zero_ns = 0
        """Time of the replay at which the play's time is 0."""
        self.num_left = len(play.requests)
        self.num_waits = list(play.num_waits)
        self.ready_ns = [0] * len(play.requests)
        self.due_ns: dict[int, int] = {}
        """By place: when a request is sent, of those that wait for no other."""
        self.held_ns: dict[int, int] = {}
        """By place: delays of requests that are not sent before the measurement begins."""
        self.num_in_flight = 0
        self.budget = 0
        """Further requests of the warm-up."""


class AgenticLoop:
    """Source of an agentic replay. Requests of the warm-up are not measured."""

    is_reactive = True

    def __init__(self, trace: Trace, *, scenario: AgenticReplay) -> None:
        requests = list(trace)
        of_play: dict[int, list[TraceRequest]] = {}
        for request, play in zip(requests, components(requests, by_name=True), strict=True):
            of_play.setdefault(play, []).append(request)
        self._plays = [_Play(play) for play in of_play.values()]
        self._scenario = scenario
        self._ids = None if scenario.cache_bust == "none" else _Ids(requests)
        self._trace_cap_ns = _ns(scenario.trace_idle_gap_cap_seconds)
        self._system_cap_ns = _ns(scenario.system_idle_gap_cap_seconds)
        self._queue: list[tuple[int, int, _Lane, int]] = []
        """(due, number, lane, place); one whose time has changed is in it twice, and is dropped at its old time."""
        self._num_queued = 0
        self._in_flight: dict[int, tuple[_Lane, int]] = {}
        """By row."""
        self._num_sent = 0
        self._num_begun = 0
        self._stage_ns = 0
        """Begin of the stage."""
        self._end_ns: int | None = None
        """End of the measurement, once it has begun."""
        self._lanes = [self._begun(0) for _ in range(scenario.concurrency)]
        self._starts_ms = [self._start_inside(lane, place) for place, lane in enumerate(self._lanes)]
        self._prime()

    # What the driver asks ---------------------------------------------------------------------------------

    def next_ns(self) -> int | None:
        """Return the time of the next arrival; None if none is known, or the time is over."""
        queue = self._queue
        while queue and queue[0][2].due_ns.get(queue[0][3]) != queue[0][0]:
            heappop(queue)
        if not queue or (self._end_ns is not None and queue[0][0] >= self._end_ns):
            return None
        return queue[0][0]

    def pop(self) -> TraceRequest:
        """Remove and return the request that arrives next."""
        now_ns = self.next_ns()
        assert now_ns is not None
        _, _, lane, place = heappop(self._queue)
        del lane.due_ns[place]
        row = self._num_sent
        self._num_sent += 1
        self._in_flight[row] = lane, place
        lane.num_in_flight += 1
        is_primer = place < 0
        if not is_primer:
            self._release(lane, lane.play.on_arrival[place], now_ns)
        return self._made(lane, ~place if is_primer else place, row, now_ns)

    def done(self, request: TraceRequest, now_ns: int) -> None:
        """Schedule what waited for `request`; begin the lane's next play, or the measurement, if it was the last."""
        lane, place = self._in_flight.pop(request.row)
        lane.num_in_flight -= 1
        if place >= 0:
            lane.num_left -= 1
            self._release(lane, lane.play.on_end[place], now_ns)
            if not lane.num_left:
                number = self._lanes.index(lane)
                lane = self._lanes[number] = self._begun(now_ns, lane.budget)
        if self._end_ns is None and not self._in_flight and not any(lane.due_ns for lane in self._lanes):
            self._next_stage(now_ns)
        self._cap([lane], now_ns)

    def again(self, request: TraceRequest, now_ns: int) -> bool:
        """Return False: an abandoned request is not sent again."""
        return False

    def has_turns_after(self, request: TraceRequest) -> bool:
        """Return whether a later turn of its session waits for `request`."""
        lane, place = self._in_flight[request.row]
        name = lane.play.requests[place].session_id
        return place < 0 or (name is not None and lane.play.last_of_session[name] > place)

    # Stages -----------------------------------------------------------------------------------------------

    def _begun(self, now_ns: int, budget: int = 0) -> _Lane:
        """Begin the next play of the trace; its first request is due at once, unless it starts inside."""
        number = self._num_begun
        self._num_begun += 1
        copy, place = divmod(number, len(self._plays))
        play = self._plays[place]
        lane = _Lane(play, number, copy)
        lane.budget = budget
        first_ns = play.requests[0].arrival_ns
        lane.zero_ns = now_ns - first_ns
        if number >= self._scenario.concurrency:
            for root, waits in enumerate(play.num_waits):
                if not waits:
                    self._ready(lane, root, lane.zero_ns + play.requests[root].arrival_ns, now_ns)
        return lane

    def _start_inside(self, lane: _Lane, number: int) -> float:
        """Make what `lane` sent before t* history; return t*, in milliseconds of the play."""
        requests = lane.play.requests
        times_ms = [request.arrival_ns / NS_PER_MS for request in requests]
        start_ms = self._scenario.start_ms(lane.play.name, number, min(times_ms), max(times_ms))
        lane.num_left = 0
        for place, time_ms in enumerate(times_ms):
            if time_ms >= start_ms:
                lane.num_left += 1
                continue
            for wait in (*lane.play.on_end[place], *lane.play.on_arrival[place]):
                lane.num_waits[wait.place] -= 1
        return start_ms

    def _prime(self) -> None:
        """Schedule the last request before t* of each session that goes on, at equal distances from its t*."""
        leads: list[tuple[_Lane, int, float]] = []
        for lane, start_ms in zip(self._lanes, self._starts_ms, strict=True):
            last: dict[str | None, int] = {}
            for place, request in enumerate(lane.play.requests):
                is_history = request.arrival_ns / NS_PER_MS < start_ms
                if is_history:
                    last[request.session_id] = place
                elif request.session_id in last:
                    before = last.pop(request.session_id)
                    leads.append((lane, before, start_ms - lane.play.requests[before].arrival_ns / NS_PER_MS))
        cap_ms = LATEST_NS if self._trace_cap_ns is None else self._trace_cap_ns / NS_PER_MS
        longest_ms = max((min(lead_ms, cap_ms) for _, _, lead_ms in leads), default=0.0)
        for lane, place, lead_ms in leads:
            self._due(lane, ~place, round((longest_ms - min(lead_ms, cap_ms)) * NS_PER_MS))
        if not leads:
            self._next_stage(0)

    def _next_stage(self, now_ns: int) -> None:
        """Begin the second part of the warm-up, if there is one and it has not been, else the measurement."""
        starts_ms, self._starts_ms = self._starts_ms, []
        budget = self._scenario.warmup_requests_per_lane if starts_ms else 0
        if not budget:
            self._end_ns = now_ns + round(self._scenario.benchmark_duration * NS_PER_S)
        for lane, start_ms in zip(self._lanes, starts_ms, strict=False):
            lane.budget = budget
            start_ns = round(start_ms * NS_PER_MS)
            lane.zero_ns = now_ns - start_ns
            for place, request in enumerate(lane.play.requests):
                if request.arrival_ns / NS_PER_MS >= start_ms and not lane.num_waits[place]:
                    self._ready(lane, place, now_ns + max(0, request.arrival_ns - start_ns), now_ns)
        if self._end_ns is None:
            self._stage_ns = now_ns
            if not any(lane.due_ns for lane in self._lanes):
                self._next_stage(now_ns)
            return
        for lane in self._lanes:
            lane.zero_ns += 0 if starts_ms else now_ns - self._stage_ns
            held, lane.held_ns = lane.held_ns, {}
            for place, delay_ns in held.items():
                self._due(lane, place, now_ns + delay_ns)
        self._cap(self._lanes, now_ns)

    # Times ------------------------------------------------------------------------------------------------

    def _release(self, lane: _Lane, waits: Sequence[_Wait], now_ns: int) -> None:
        """Record for those that wait that one request less is left; schedule those that wait for none."""
        for wait in waits:
            request = lane.play.requests[wait.place]
            if wait.delay_ns is None or (request.after and request.delay_ns is None):
                own_ns = lane.zero_ns + request.arrival_ns
                lane.ready_ns[wait.place] = max(lane.ready_ns[wait.place], own_ns)
            ready_ns = max(lane.ready_ns[wait.place], now_ns + (wait.delay_ns or 0))
            lane.ready_ns[wait.place] = ready_ns
            lane.num_waits[wait.place] -= 1
            if not lane.num_waits[wait.place]:
                self._ready(lane, wait.place, ready_ns, now_ns)

    def _ready(self, lane: _Lane, place: int, ready_ns: int, now_ns: int) -> None:
        """Schedule a request that waits for no other; in the warm-up at once, or not before the measurement."""
        if self._end_ns is not None:
            self._due(lane, place, ready_ns)
        elif lane.budget:
            lane.budget -= 1
            self._due(lane, place, now_ns)
        else:
            lane.held_ns[place] = ready_ns - now_ns

    def _due(self, lane: _Lane, place: int, due_ns: int) -> None:
        if due_ns > LATEST_NS:
            raise TooLateError
        lane.due_ns[place] = due_ns
        self._num_queued += 1
        heappush(self._queue, (due_ns, self._num_queued, lane, place))

    def _cap(self, changed: Sequence[_Lane], now_ns: int) -> None:
        """Move what is due later than the idle times allow: of each play in lanes that have changed, then of all."""
        if self._end_ns is None:
            return
        if self._trace_cap_ns is not None:
            for lane in changed:
                if lane.due_ns and not lane.num_in_flight:
                    self._move([lane], now_ns + self._trace_cap_ns)
        if self._system_cap_ns is not None and not self._in_flight:
            self._move(self._lanes, now_ns + self._system_cap_ns)

    def _move(self, lanes: Sequence[_Lane], latest_ns: int) -> None:
        """Make what is due first in `lanes` due at `latest_ns` or sooner, and all else that much sooner."""
        first_ns = min((min(lane.due_ns.values()) for lane in lanes if lane.due_ns), default=latest_ns)
        if first_ns <= latest_ns:
            return
        for lane in lanes:
            for place, due_ns in sorted(lane.due_ns.items()):
                self._due(lane, place, due_ns - (first_ns - latest_ns))

    def _made(self, lane: _Lane, place: int, row: int, now_ns: int) -> TraceRequest:
        """Return the request that is sent: of the measurement, or of the warm-up with one output token."""
        request = lane.play.requests[place]
        is_measured = self._end_ns is not None
        answered = request.answered_units if is_measured else None
        output = request.output_units if is_measured else None
        return msgspec.structs.replace(
            request,
            row=row,
            arrival_ns=now_ns,
            units=self._own(request.units, lane.copy),
            answered_units=None if answered is None else spell(self._own(answered, lane.copy)),
            output_units=None if output is None else self._own(output, lane.copy),
            num_output_tokens=request.num_output_tokens if is_measured else 1,
            session_id=None if request.session_id is None else f"{lane.number}:{request.session_id}",
            request_id=None,
            delay_ns=None,
            after=(),
            is_measured=is_measured,
        )

    def _own(self, units: Units, copy: int) -> Units:
        return units if self._ids is None else self._ids.of_copy(units, copy)


class _Ids:
    """The ids of a trace, for copies of its requests that share none with each other."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        several = [
            units
            for each in requests
            for units in (each.units, each.answered_units, each.output_units)
            if units is not None
        ]
        self._sorted: npt.NDArray[np.uint64] | None = None
        self._num = 0
        """Ids of a copy: those of the first are below it."""
        if any(isinstance(units, bytes) for units in several):
            self._sorted = _sorted(several)
            self._num = len(self._sorted)
        else:
            self._num = max((ids.stop for units in several for ids in units if isinstance(ids, range)), default=0)

    def of_copy(self, units: Units, copy: int) -> Units:
        """Return the ids that copy number `copy`, from 0, has for `units`."""
        first_id = copy * self._num
        if self._sorted is not None:
            places = np.searchsorted(self._sorted, np.frombuffer(spell(units), np.uint64)).astype(np.uint64)
            return (places + np.uint64(first_id)).tobytes()
        return tuple(range(ids.start + first_id, ids.stop + first_id) for ids in units if isinstance(ids, range))


def _sorted(several: Iterable[Units]) -> npt.NDArray[np.uint64]:
    """Return all ids once."""
    found = np.array([], np.uint64)
    parts: list[npt.NDArray[np.uint64]] = []
    num_parts = 0
    for units in several:
        parts.append(np.frombuffer(spell(units), np.uint64))
        num_parts += len(parts[-1])
        if num_parts >= MOST_UNSORTED:
            found, parts, num_parts = np.unique(np.concatenate([found, *parts])), [], 0
    return np.unique(np.concatenate([found, *parts]))


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * NS_PER_S)
