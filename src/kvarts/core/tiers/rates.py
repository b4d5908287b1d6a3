"""Rates that transfers share, in virtual time."""

from __future__ import annotations

from math import ceil
from typing import Final

from kvarts.base.limits import LATEST_NS, TooLateError

__all__ = ["NEVER_NS", "End", "Job", "SharedRates"]

NEVER_NS: Final = (1 << 62) - 1
NO_RATE = float("inf")
ROUNDING = 1e-6
"""Bytes that may remain of a finished transfer because of rounding in the sums."""

End = tuple[str, int]
"""A resource that transfers share: a direction, and the number of a worker, or -1 for the store."""


class Job:
    """A transfer under way between ends that each have a rate in bytes per nanosecond. `num_left`: bytes still to go.

    It takes `factor` times its usual time.
    """

    __slots__ = ("ends", "factor", "num_left", "owner")

    def __init__(self, owner: object, num_bytes: int, ends: tuple[tuple[End, float], ...], factor: int = 1) -> None:
        self.owner = owner
        self.num_left = float(num_bytes)
        self.ends = ends
        self.factor = factor


class SharedRates:
    """Transfers that share the rates of their ends evenly. Each runs at the rate of the end that has least for it."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        """In the order in which they began."""
        self.now_ns = 0
        """The time up to which bytes are counted."""
        self._num_at: dict[End, int] = {}
        self.busy_ns: dict[End, int] = {}
        """How long each end has been in use."""

    def begin(self, job: Job, now_ns: int) -> None:
        """Begin a transfer of at least one byte."""
        self.advance(now_ns)
        self.jobs.append(job)
        for end, _ in job.ends:
            self._num_at[end] = self._num_at.get(end, 0) + 1

    def remove(self, job: Job) -> None:
        """Remove a transfer; the others get its share from the time to which `advance` was called."""
        self.jobs.remove(job)
        for end, _ in job.ends:
            self._num_at[end] -= 1

    def advance(self, now_ns: int) -> None:
        """Count the bytes that are transferred by `now_ns`."""
        elapsed_ns = now_ns - self.now_ns
        if elapsed_ns:
            for job in self.jobs:
                job.num_left -= elapsed_ns * self._rate(job)
            for end, count in self._num_at.items():
                if count:
                    self.busy_ns[end] = self.busy_ns.get(end, 0) + elapsed_ns
            self.now_ns = now_ns

    def next_ns(self) -> int:
        """Return when the next transfer ends, if none begins before; NEVER_NS if none is under way.

        Raise TooLateError if that is beyond LATEST_NS.
        """
        if not self.jobs:
            return NEVER_NS
        next_ns = self.now_ns + min(max(1, ceil(job.num_left / self._rate(job))) for job in self.jobs)
        if next_ns > LATEST_NS:
            raise TooLateError
        return next_ns

    def take_ended(self, now_ns: int) -> list[Job]:
        """Return the transfers that end now, in the order in which they began."""
        self.advance(now_ns)
        done = [job for job in self.jobs if job.num_left <= ROUNDING]
        for job in done:
            self.remove(job)
        return done

    def left_ns(self, job: Job, now_ns: int) -> int:
        """Return how long a transfer would still take if no other began or ended."""
        return max(0, self.now_ns + ceil(job.num_left / self._rate(job)) - now_ns)

    def rate_of_one_more(self, ends: tuple[tuple[End, float], ...]) -> float:
        """Return the rate that one more transfer between `ends` would have now."""
        return min(rate / (self._num_at.get(end, 0) + 1) for end, rate in ends)

    def _rate(self, job: Job) -> float:
        """Return the current rate of a transfer, in bytes per nanosecond."""
        rate = NO_RATE
        for end, rate_of_end in job.ends:
            rate = min(rate, rate_of_end / self._num_at[end])
        return rate / job.factor
