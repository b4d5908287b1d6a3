"""A bus that channels share, in virtual time: a PCIe switch, or the bandwidth of host memory."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import ceil

from kvarts.offload.channel import NS_PER_S, Channel
from kvarts.rates import NEVER_NS, ROUNDING, Job, SharedRates

__all__ = ["Bus", "BusChannel"]

BUS = "bus", -1


class Carried:
    """`num_bytes` that a channel carries for transfer `number`. `job`: None before its latency has passed."""

    __slots__ = ("job", "num_bytes", "number")

    def __init__(self, num_bytes: int) -> None:
        self.number = -1
        self.num_bytes = num_bytes
        self.job: Job | None = None


class Lane:
    """One channel on a bus, at a place among the others. It carries the first in its queue."""

    __slots__ = ("bytes_per_ns", "latency_ns", "place", "queue")

    def __init__(self, place: int, bytes_per_ns: float, latency_ns: int) -> None:
        self.place = place
        self.bytes_per_ns = bytes_per_ns
        self.latency_ns = latency_ns
        self.queue: deque[Carried] = deque()


class LaneEnds:
    """When lanes fall idle, by place, and when transfers end, by number."""

    __slots__ = ("ends_ns", "idle_ns")

    def __init__(self, idle_ns: list[int]) -> None:
        self.idle_ns = idle_ns
        self.ends_ns: dict[int, int] = {}


class Bus:
    """`bytes_per_s` that the channels which carry something share evenly, each up to its own bandwidth.

    Owner of the bytes on their way. A transfer takes its latency, then its share.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_ns = bytes_per_s / NS_PER_S
        self._shared = SharedRates()
        self._lanes: list[Lane] = []
        self._beginning: list[tuple[int, int]] = []
        """As a heap, when the latency of the first transfer of a lane has passed, and the place of the lane."""
        self._unnamed: list[Carried] = []
        self._num_left: dict[int, int] = {}
        """By transfer, how many lanes carry something for it."""
        self._foreseen: LaneEnds | None = None
        """What happens if nothing is submitted; None if it must be computed again."""

    def open(self, name: str, *, latency_us: float, bytes_per_s: int) -> BusChannel:
        """Return a new channel on this bus."""
        lane = Lane(len(self._lanes), bytes_per_s / NS_PER_S, round(latency_us * 1000))
        self._lanes.append(lane)
        return BusChannel(name, self, lane, latency_us=latency_us, bytes_per_s=bytes_per_s)

    def name(self, transfer: int) -> None:
        """Record that the bytes submitted since the last call belong to `transfer`."""
        self._foreseen = None
        for carried in self._unnamed:
            carried.number = transfer
        self._num_left[transfer] = len(self._unnamed)
        self._unnamed.clear()

    def next_ns(self) -> int:
        """Return when the next transfer ends or begins to share, if none is submitted before; NEVER_NS without one."""
        return min(self._beginning[0][0] if self._beginning else NEVER_NS, self._shared.next_ns())

    def take_ended(self, now_ns: int) -> list[tuple[int, int]]:
        """Return the transfers that have ended by `now_ns`, as end and number, in the order of their ends."""
        ended = []
        while (next_ns := self.next_ns()) <= now_ns:
            for job in self._shared.take_ended(next_ns):
                lane = job.owner
                assert isinstance(lane, Lane)
                number = lane.queue.popleft().number
                self._num_left[number] -= 1
                if not self._num_left[number]:
                    del self._num_left[number]
                    ended.append((next_ns, number))
                if lane.queue:
                    self._begin(lane, next_ns)
            while self._beginning and self._beginning[0][0] <= next_ns:
                self._share(self._lanes[heappop(self._beginning)[1]], next_ns)
        return ended

    def submit(self, lane: Lane, num_bytes: int, now_ns: int) -> None:
        """Carry `num_bytes` on `lane`, after those in its queue."""
        self._foreseen = None
        carried = Carried(num_bytes)
        self._unnamed.append(carried)
        lane.queue.append(carried)
        if len(lane.queue) == 1:
            self._begin(lane, now_ns)

    def withdraw(self, lane: Lane, now_ns: int) -> None:
        """Abort the last transfer submitted to `lane`."""
        self._foreseen = None
        carried = lane.queue.pop()
        del self._num_left[carried.number]
        if carried.job is not None:
            self._shared.advance(now_ns)
            self._shared.remove(carried.job)
        elif not lane.queue:
            self._beginning = [each for each in self._beginning if each[1] != lane.place]
            heapify(self._beginning)

    def clear(self, now_ns: int) -> None:
        """Abort all transfers."""
        self._foreseen = None
        self._shared.advance(now_ns)
        for lane in self._lanes:
            while lane.queue:
                carried = lane.queue.pop()
                if carried.job is not None:
                    self._shared.remove(carried.job)
        self._beginning.clear()
        self._num_left.clear()

    def rate(self, lane: Lane) -> float:
        """Return the bytes per nanosecond of the next transfer of `lane`, if nothing else changed."""
        is_moving = bool(lane.queue) and lane.queue[0].job is not None
        num_others = self._shared.num_sharing(BUS) - is_moving
        return min(lane.bytes_per_ns, self._bytes_per_ns / (num_others + 1))

    def left_ns(self, lane: Lane, now_ns: int) -> int:
        """Return how long the queue of `lane` would take if nothing else changed."""
        if not lane.queue:
            return 0
        rate, first = self.rate(lane), lane.queue[0]
        if first.job is not None:
            left_ns = self._shared.left_ns(first.job, now_ns)
        else:
            begin_ns = next(begin_ns for begin_ns, place in self._beginning if place == lane.place)
            left_ns = max(0, begin_ns - now_ns) + ceil(first.num_bytes / rate)
        num_waiting = sum(carried.num_bytes for carried in lane.queue) - first.num_bytes
        return left_ns + (len(lane.queue) - 1) * lane.latency_ns + ceil(num_waiting / rate)

    def idle_ns(self, lane: Lane, now_ns: int) -> int:
        """Return how long `lane` carries something, exactly, if nothing is submitted."""
        return self._foresee().idle_ns[lane.place] - now_ns if lane.queue else 0

    def end_ns(self, transfer: int) -> int:
        """Return when `transfer` ends, exactly, if nothing is submitted; 0 if it has ended."""
        return self._foresee().ends_ns.get(transfer, 0)

    def _foresee(self) -> LaneEnds:
        """Return what happens if nothing is submitted: in every sum, what `take_ended` will compute."""
        if self._foreseen is not None:
            return self._foreseen
        foreseen = self._foreseen = LaneEnds([0] * len(self._lanes))
        moving = [(job.owner, job.num_left) for job in self._shared.jobs]
        left_of = {owner.place: num_left for owner, num_left in moving if isinstance(owner, Lane)}
        queues = [list(lane.queue)[::-1] for lane in self._lanes]
        beginning = self._beginning.copy()
        now_ns = self._shared.now_ns
        while left_of or beginning:
            share = self._bytes_per_ns / max(1, len(left_of))
            rates = {place: min(self._lanes[place].bytes_per_ns, share) for place in left_of}
            next_ns = beginning[0][0] if beginning else NEVER_NS
            for place, num_left in left_of.items():
                next_ns = min(next_ns, now_ns + max(1, ceil(num_left / rates[place])))
            for place, rate in rates.items():
                left_of[place] -= (next_ns - now_ns) * rate
            now_ns = next_ns
            for place in [place for place, num_left in left_of.items() if num_left <= ROUNDING]:
                del left_of[place]
                foreseen.ends_ns[queues[place].pop().number] = foreseen.idle_ns[place] = now_ns
                if queues[place]:
                    heappush(beginning, (now_ns + self._lanes[place].latency_ns, place))
            while beginning and beginning[0][0] <= now_ns:
                place = heappop(beginning)[1]
                left_of[place] = float(queues[place][-1].num_bytes)
        return foreseen

    def _begin(self, lane: Lane, now_ns: int) -> None:
        if lane.latency_ns:
            heappush(self._beginning, (now_ns + lane.latency_ns, lane.place))
        else:
            self._share(lane, now_ns)

    def _share(self, lane: Lane, now_ns: int) -> None:
        first = lane.queue[0]
        ends = ("lane", lane.place), lane.bytes_per_ns
        first.job = Job(lane, first.num_bytes, (ends, (BUS, self._bytes_per_ns)))
        self._shared.begin(first.job, now_ns)


class BusChannel(Channel):
    """A Channel on a bus. Others slow it down, so that ends are not known beforehand."""

    __slots__ = ("_bus", "_lane")

    def __init__(self, name: str, bus: Bus, lane: Lane, *, latency_us: float, bytes_per_s: int) -> None:
        super().__init__(name, latency_us=latency_us, bytes_per_s=bytes_per_s)
        self._bus = bus
        self._lane = lane

    def wait_ns(self, now_ns: int) -> int:
        """Return how long a transfer submitted at `now_ns` would wait if nothing else changed on the bus."""
        return self._bus.left_ns(self._lane, now_ns)

    def busy_ns(self, now_ns: int) -> int:
        """Return how long it carries something if nothing is submitted."""
        return self._bus.idle_ns(self._lane, now_ns)

    def within_ns(self, now_ns: int, num_bytes: int) -> int:
        """Return the time until a transfer of `num_bytes` would end if nothing else changed on the bus."""
        return self.wait_ns(now_ns) + self._latency_ns + ceil(num_bytes / self._bus.rate(self._lane))

    def num_within(self, now_ns: int, bound_ns: int, unit_bytes: int) -> int:
        """Return how many units of `unit_bytes` could be carried within `bound_ns`; at least one if it is idle."""
        wait_ns = self.wait_ns(now_ns)
        left_ns = bound_ns - wait_ns - self._latency_ns
        num_units = int(left_ns * self._bus.rate(self._lane) / unit_bytes) if left_ns > 0 else 0
        return num_units if wait_ns or num_units else 1

    def withdraw(self, now_ns: int, num_bytes: int) -> None:
        """Carry the last transfer submitted no further than it is at `now_ns`."""
        self._bus.withdraw(self._lane, now_ns)

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Carry `num_bytes`; return NEVER_NS: when that ends is not known."""
        self.num_bytes += num_bytes
        self.num_transfers += 1
        self._bus.submit(self._lane, num_bytes, now_ns)
        return NEVER_NS
