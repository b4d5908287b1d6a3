"""Transfer times of a prompt's KV between workers."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import ceil
from typing import Protocol

from kvarts.fleet.handoff import Handoff
from kvarts.sched.policy import NEVER_NS

__all__ = ["FixedRate", "Links", "SharedByWorkers"]

ROUNDING = 1e-6
"""Bytes that may remain of a finished transfer because of rounding in the sums."""


class Links(Protocol):
    """Transfers between workers. Promises: every transfer that was begun and not cancelled ends exactly once."""

    def begin(self, handoff: Handoff, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it has already ended because it takes no time."""

    def cancel(self, handoff: Handoff, now_ns: int) -> None:
        """Abort a transfer that is under way; its KV never arrives."""

    def slow_down(self, worker: int, factor: int, now_ns: int) -> None:
        """Make everything that `worker` sends and receives take `factor` times its usual time from now on."""

    def under_way(self) -> list[Handoff]:
        """Return the transfers under way."""

    def next_ns(self) -> int:
        """Return when the next transfer ends if none begins before; NEVER_NS if none is under way."""

    def take_ended(self, now_ns: int) -> list[Handoff]:
        """Return the transfers that end now, in the order in which they began."""


class FixedRate:
    """Each transfer runs at `bytes_per_s`, independent of the others, plus `latency_ns`; None: latency only."""

    def __init__(self, bytes_per_s: float | None, latency_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self._ends: list[tuple[int, int, Handoff]] = []
        self._num_begun = 0
        self._factors: dict[int, int] = {}

    def begin(self, handoff: Handoff, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it takes no time."""
        duration_ns = self._latency_ns
        if self._bytes_per_s is not None:
            duration_ns += ceil(num_bytes / self._bytes_per_s * 1e9)
        if not duration_ns:
            return True
        if self._factors:
            duration_ns *= slower_of(self._factors, handoff)
        heappush(self._ends, (now_ns + duration_ns, self._num_begun, handoff))
        self._num_begun += 1
        return False

    def cancel(self, handoff: Handoff, now_ns: int) -> None:
        """Abort a transfer that is under way."""
        self._ends = [each for each in self._ends if each[2] is not handoff]
        heapify(self._ends)

    def slow_down(self, worker: int, factor: int, now_ns: int) -> None:
        """Make the rest of each transfer of `worker`, its latency included, take `factor` times its usual time."""
        before = [slower_of(self._factors, handoff) for _, _, handoff in self._ends]
        self._factors[worker] = factor
        self._ends = [
            (now_ns - (now_ns - end_ns) * slower_of(self._factors, handoff) // factor_before, number, handoff)
            for (end_ns, number, handoff), factor_before in zip(self._ends, before, strict=True)
        ]
        heapify(self._ends)

    def under_way(self) -> list[Handoff]:
        """Return the transfers under way."""
        return [handoff for _, _, handoff in self._ends]

    def next_ns(self) -> int:
        """Return when the next transfer ends."""
        return self._ends[0][0] if self._ends else NEVER_NS

    def take_ended(self, now_ns: int) -> list[Handoff]:
        """Return the transfers that end now."""
        ended = []
        while self._ends and self._ends[0][0] <= now_ns:
            ended.append(heappop(self._ends)[2])
        return ended


def slower_of(factors: dict[int, int], handoff: Handoff) -> int:
    """Return the slowdown of a transfer: that of its slower end."""
    return max(factors.get(handoff.source, 1), factors.get(handoff.target, 1))


class _Job:
    """A transfer under way. `num_left`: bytes still to transfer."""

    __slots__ = ("handoff", "num_left")

    def __init__(self, handoff: Handoff, num_left: float) -> None:
        self.handoff = handoff
        self.num_left = num_left


class SharedByWorkers:
    """Each worker sends and receives at `bytes_per_s`, shared evenly by its transfers; `latency_ns` follows each.

    At any time, a transfer runs at the rate of the slower of its two ends.
    """

    def __init__(self, bytes_per_s: float, latency_ns: int) -> None:
        self._bytes_per_ns = bytes_per_s / 1e9
        self._latency = FixedRate(None, latency_ns)
        self._jobs: list[_Job] = []
        self._now_ns = 0
        self._factors: dict[int, int] = {}
        self._num_sending: dict[int, int] = {}
        self._num_receiving: dict[int, int] = {}

    def begin(self, handoff: Handoff, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it takes no time."""
        if not num_bytes:
            return self._latency.begin(handoff, 0, now_ns)
        self._advance(now_ns)
        self._count(handoff, 1)
        self._jobs.append(_Job(handoff, float(num_bytes)))
        return False

    def cancel(self, handoff: Handoff, now_ns: int) -> None:
        """Abort a transfer that is under way; the others get its share of the rate from now on."""
        self._advance(now_ns)
        for job in self._jobs:
            if job.handoff is handoff:
                self._jobs.remove(job)
                self._count(handoff, -1)
                return
        self._latency.cancel(handoff, now_ns)

    def slow_down(self, worker: int, factor: int, now_ns: int) -> None:
        """Make the rest of each transfer of `worker` take `factor` times its usual time."""
        self._advance(now_ns)
        self._factors[worker] = factor
        self._latency.slow_down(worker, factor, now_ns)

    def under_way(self) -> list[Handoff]:
        """Return the transfers under way."""
        return [*(job.handoff for job in self._jobs), *self._latency.under_way()]

    def next_ns(self) -> int:
        """Return when the next transfer ends, if none begins before."""
        next_ns = self._latency.next_ns()
        for job in self._jobs:
            next_ns = min(next_ns, self._now_ns + max(1, ceil(job.num_left / self._rate(job.handoff))))
        return next_ns

    def take_ended(self, now_ns: int) -> list[Handoff]:
        """Return the transfers that end now."""
        if now_ns < self.next_ns():
            return []  # keep the sums independent of times at which nothing happens
        self._advance(now_ns)
        done = [job for job in self._jobs if job.num_left <= ROUNDING]
        ended = []
        for job in done:
            self._jobs.remove(job)
            self._count(job.handoff, -1)
            if self._latency.begin(job.handoff, 0, now_ns):
                ended.append(job.handoff)
        return ended + self._latency.take_ended(now_ns)

    def _rate(self, handoff: Handoff) -> float:
        """Return the current rate of a transfer, in bytes per nanosecond."""
        num_sharing = max(self._num_sending[handoff.source], self._num_receiving[handoff.target])
        return self._bytes_per_ns / num_sharing / slower_of(self._factors, handoff)

    def _advance(self, now_ns: int) -> None:
        elapsed_ns = now_ns - self._now_ns
        if elapsed_ns:
            for job in self._jobs:
                job.num_left -= elapsed_ns * self._rate(job.handoff)
            self._now_ns = now_ns

    def _count(self, handoff: Handoff, change: int) -> None:
        for counts, worker in ((self._num_sending, handoff.source), (self._num_receiving, handoff.target)):
            counts[worker] = counts.get(worker, 0) + change
