"""How long the KV of a prompt takes from one worker to another."""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil
from typing import Protocol

from kvarts.fleet.handoff import Handoff
from kvarts.sched.policy import NEVER_NS

__all__ = ["FixedRate", "Links"]


class Links(Protocol):
    """Transfers between workers. Promises: a transfer that was begun ends once."""

    def begin(self, handoff: Handoff, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it has ended already, since it takes no time."""

    def next_ns(self) -> int:
        """Return when the next transfer ends, if none begins before; NEVER_NS if none is under way."""

    def take_ended(self, now_ns: int) -> list[Handoff]:
        """Return the transfers that end now, in the order in which they began."""


class FixedRate:
    """Every transfer has `bytes_per_s` for itself, after `latency_ns`; None: it takes the latency alone."""

    def __init__(self, bytes_per_s: float | None, latency_ns: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self._ends: list[tuple[int, int, Handoff]] = []
        self._num_begun = 0

    def begin(self, handoff: Handoff, num_bytes: int, now_ns: int) -> bool:
        """Begin a transfer; return whether it takes no time."""
        duration_ns = self._latency_ns
        if self._bytes_per_s is not None:
            duration_ns += ceil(num_bytes / self._bytes_per_s * 1e9)
        if not duration_ns:
            return True
        heappush(self._ends, (now_ns + duration_ns, self._num_begun, handoff))
        self._num_begun += 1
        return False

    def next_ns(self) -> int:
        """Return when the next transfer ends."""
        return self._ends[0][0] if self._ends else NEVER_NS

    def take_ended(self, now_ns: int) -> list[Handoff]:
        """Return the transfers that end now."""
        ended = []
        while self._ends and self._ends[0][0] <= now_ns:
            ended.append(heappop(self._ends)[2])
        return ended
