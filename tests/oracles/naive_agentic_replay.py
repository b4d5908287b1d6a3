"""An agentic replay as its rules state it: one event at a time, every list searched, no queue.

Shares no code with kvarts.sim.traffic.agentic_replay but for the instant at which a play is entered, which is a draw
from numpy's generator; tests/sim/traffic/test_agentic_replay.py holds that one to a published log of AIPerf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvarts.sim.traffic.agentic_replay import AgenticReplay
from kvarts.sim.traffic.trace import TraceRequest

Sent = tuple[int, str, int, int, bool]
"""Time, session, place in its play, number of the play, and whether it is measured."""


@dataclass
class _Lane:
    play: list[TraceRequest]
    number: int
    done: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    due: dict[int, int] = field(default_factory=dict)
    ended_ns: dict[int, int] = field(default_factory=dict)
    sent_ns: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    budget: int = 0


def waits_of(play: Sequence[TraceRequest], place: int) -> list[tuple[int, int, bool]]:
    """Return what a request waits for: place, delay, and whether for the arrival."""
    request = play[place]
    rows = [each.row for each in play]
    if request.after:
        return [(rows.index(each.row), each.delay_ns, each.of_arrival) for each in request.after]
    before = [other for other in range(place) if play[other].session_id == request.session_id]
    return [(before[-1], request.delay_ns or 0, False)] if before else []


def naive_agentic_replay(
    plays: Sequence[list[TraceRequest]], load: AgenticReplay, duration_of: Callable[[int, int], int]
) -> list[Sent]:
    """Return all that is sent. `duration_of`: time in flight of a place of the play with a number."""
    sent: list[Sent] = []
    flying: list[tuple[int, _Lane, int, bool]] = []
    count = 0
    stage = "primers"
    end_ns = 0
    trace_cap = None if load.trace_idle_gap_cap_seconds is None else round(load.trace_idle_gap_cap_seconds * 1e9)
    system_cap = None if load.system_idle_gap_cap_seconds is None else round(load.system_idle_gap_cap_seconds * 1e9)
    primers: list[tuple[int, _Lane, int]] = []
    starts: list[float] = []
    lanes: list[_Lane] = []
    leads = []
    for number in range(load.concurrency):
        lane = _Lane(plays[number % len(plays)], number)
        lanes.append(lane)
        times = [request.arrival_ns / 1e6 for request in lane.play]
        name = (lane.play[0].session_id or "").split("/")[0]
        start = load.start_ms(name, number, min(times), max(times))
        starts.append(start)
        lane.done = {place for place, time in enumerate(times) if time < start}
        for session in {request.session_id for request in lane.play}:
            own = [place for place, request in enumerate(lane.play) if request.session_id == session]
            past = [place for place in own if place in lane.done]
            if past and len(past) < len(own):
                leads.append((lane, past[-1], start - times[past[-1]]))
    cap_ms = float("inf") if trace_cap is None else trace_cap / 1e6
    longest = max((min(lead, cap_ms) for _, _, lead in leads), default=0.0)
    primers = [(round((longest - min(lead, cap_ms)) * 1e6), lane, place) for lane, place, lead in leads]
    count = load.concurrency

    def schedule(lane: _Lane, place: int, ready_ns: int, now_ns: int) -> None:
        if stage == "measured":
            lane.due[place] = ready_ns
        elif lane.budget:
            lane.budget -= 1
            lane.due[place] = now_ns
        else:
            lane.held[place] = ready_ns - now_ns

    def known(lane: _Lane, place: int) -> bool:
        return place in lane.due or place in lane.held or place in lane.sent or place in lane.done

    def released(lane: _Lane, now_ns: int) -> None:
        for place in range(len(lane.play)):
            if known(lane, place):
                continue
            waits = waits_of(lane.play, place)
            if not all(
                other in (lane.sent | lane.done) if of_arrival else other in lane.done for other, _, of_arrival in waits
            ):
                continue
            times = lane.sent_ns, lane.ended_ns
            ready = [times[not of_arrival][other] + delay for other, delay, of_arrival in waits
                     if other in times[not of_arrival]]  # fmt: skip
            schedule(lane, place, max(ready, default=now_ns), now_ns)

    def next_stage(now_ns: int) -> None:
        nonlocal stage, end_ns, starts
        stage = "warm-up" if stage == "primers" and load.warmup_requests_per_lane else "measured"
        end_ns = now_ns + round(load.benchmark_duration * 1e9)
        for lane, start in zip(lanes, starts, strict=False):
            if stage == "warm-up":
                lane.budget = load.warmup_requests_per_lane
            for place, request in enumerate(lane.play):
                if not known(lane, place) and all(other in lane.done for other, _, _ in waits_of(lane.play, place)):
                    schedule(lane, place, now_ns + max(0, request.arrival_ns - round(start * 1e6)), now_ns)
        starts = []
        if stage == "measured":
            for lane in lanes:
                for place, delay in lane.held.items():
                    lane.due[place] = now_ns + delay
                lane.held = {}
            cap(now_ns)
        elif not any(lane.due for lane in lanes):
            next_stage(now_ns)

    def cap(now_ns: int) -> None:
        if stage != "measured":
            return
        groups = [[lane] for lane in lanes if not any(each[1] is lane for each in flying)]
        for group, most in [(each, trace_cap) for each in groups] + ([] if flying else [(lanes, system_cap)]):
            due = [time for lane in group for time in lane.due.values()]
            if most is not None and due and min(due) > now_ns + most:
                early = min(due) - now_ns - most
                for lane in group:
                    lane.due = {place: time - early for place, time in lane.due.items()}

    if not primers:
        next_stage(0)
    while True:
        ends = sorted(((end, index) for index, (end, *_) in enumerate(flying)))
        due = [(time, lane, place, True) for time, lane, place in primers]
        due += [(time, lane, place, False) for lane in lanes for place, time in lane.due.items()]
        due = [each for each in due if stage != "measured" or each[0] < end_ns]
        first = min(due, key=lambda each: each[0], default=None)
        if ends and (first is None or ends[0][0] <= first[0]):
            now_ns, lane, place, is_primer = flying.pop(ends[0][1])
            if not is_primer:
                lane.done.add(place)
                lane.ended_ns[place] = now_ns
                released(lane, now_ns)
                if len(lane.done) == len(lane.play):
                    fresh = _Lane(plays[count % len(plays)], count, budget=lane.budget)
                    count += 1
                    lanes[lanes.index(lane)] = fresh
                    for root in range(len(fresh.play)):
                        if not waits_of(fresh.play, root):
                            late = fresh.play[root].arrival_ns - fresh.play[0].arrival_ns
                            schedule(fresh, root, now_ns + late, now_ns)
            if stage != "measured" and not flying and not primers and not any(each.due for each in lanes):
                next_stage(now_ns)
            cap(now_ns)
        elif first is not None:
            now_ns, lane, place, is_primer = first
            if is_primer:
                primers.remove((now_ns, lane, place))
            else:
                del lane.due[place]
                lane.sent.add(place)
                lane.sent_ns[place] = now_ns
            flying.append((now_ns + duration_of(lane.number, place), lane, place, is_primer))
            if not is_primer:
                released(lane, now_ns)
            sent.append((now_ns, lane.play[place].session_id or "", place, lane.number, stage == "measured"))
        else:
            return sent
