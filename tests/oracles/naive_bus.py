"""A bus in exact numbers, from event to event: lanes that carry one transfer after the other, and share evenly."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

__all__ = ["NaiveLane", "naive_bus_ends"]


@dataclass
class NaiveLane:
    """`bytes_per_s`, after `latency_ns`. `queue`: what it carries, each with its number and the bytes left."""

    bytes_per_s: int
    latency_ns: int
    queue: list[list[Fraction]] = field(default_factory=list)
    begins_ns: Fraction = Fraction(0)


def naive_bus_ends(
    bytes_per_s: int, lanes: list[NaiveLane], submitted: list[tuple[int, int, int]]
) -> dict[int, Fraction]:
    """When each of `submitted` ends: (time in ns, lane, bytes), in the order of their times."""
    now = Fraction(0)
    ends: dict[int, Fraction] = {}
    coming = list(enumerate(submitted))
    while coming or any(lane.queue for lane in lanes):
        moving = [lane for lane in lanes if lane.queue and lane.begins_ns <= now]
        rates = {id(lane): min(Fraction(lane.bytes_per_s), Fraction(bytes_per_s, len(moving))) for lane in moving}
        times = [Fraction(coming[0][1][0])] if coming else []
        times += [lane.begins_ns for lane in lanes if lane.queue and lane.begins_ns > now]
        times += [now + lane.queue[0][1] * 10**9 / rates[id(lane)] for lane in moving]
        then = min(times)
        for lane in moving:
            lane.queue[0][1] -= (then - now) * rates[id(lane)] / 10**9
            if lane.queue[0][1] == 0:
                ends[int(lane.queue.pop(0)[0])] = then
                lane.begins_ns = then + lane.latency_ns
        now = then
        while coming and coming[0][1][0] <= now:
            number, (_, place, num_bytes) = coming.pop(0)
            lane = lanes[place]
            if not lane.queue:
                lane.begins_ns = now + lane.latency_ns
            lane.queue.append([Fraction(number), Fraction(num_bytes)])
    return ends
