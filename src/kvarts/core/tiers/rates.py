"""Rates that transfers share, in virtual time.

Bytes and rates are exact: rounded sums would depend on when other transfers begin and end, also those of other ends.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Final

from kvarts.base.limits import LATEST_NS, TooLateError

__all__ = ["NEVER_NS", "End", "Job", "SharedRates"]

NEVER_NS: Final = (1 << 62) - 1

End = tuple[str, int]
"""A resource that transfers share: a direction, and the number of a worker, or -1 for the store."""


class Job:
    """A transfer under way between ends that each have a rate in bytes per nanosecond.

    It takes `factor` times its usual time. `num_left`: bytes still to go at `since_ns`, when its rate last changed.
    """

    __slots__ = ("end_ns", "ends", "factor", "num_left", "owner", "rate", "since_ns")

    def __init__(self, owner: object, num_bytes: int, ends: tuple[tuple[End, Fraction], ...], factor: int = 1) -> None:
        self.owner = owner
        self.num_left = Fraction(num_bytes)
        self.ends = ends
        self.factor = factor
        self.rate = Fraction(0)
        self.since_ns = 0
        self.end_ns = NEVER_NS


class SharedRates:
    """Transfers that share the rates of their ends evenly. Each runs at the rate of the end that has least for it.

    What changes, changes at the time to which `advance` was called.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        """In the order in which they began."""
        self.now_ns = 0
        self._num_at: dict[End, int] = {}
        self._rate_at: dict[End, Fraction] = {}
        """The part of an end's rate that each of its transfers may have."""
        self._next_ns = NEVER_NS
        self.busy_ns: dict[End, int] = {}
        """How long each end has been in use."""

    def begin(self, job: Job, now_ns: int) -> None:
        """Begin a transfer of at least one byte."""
        self.advance(now_ns)
        self.jobs.append(job)
        self._share(job, 1)

    def remove(self, job: Job) -> None:
        """Remove a transfer; the others get its share."""
        self.jobs.remove(job)
        self._share(job, -1)

    def add(self, job: Job, num_bytes: int) -> None:
        """Make a transfer under way longer."""
        self._count(job)
        job.num_left += num_bytes
        self._expect(job)

    def slow_down(self, job: Job, factor: int) -> None:
        """Make the rest of a transfer take `factor` times its usual time."""
        job.factor = factor
        self._change(job)

    def advance(self, now_ns: int) -> None:
        """Go on to `now_ns`."""
        elapsed_ns = now_ns - self.now_ns
        if elapsed_ns:
            for end, count in self._num_at.items():
                if count:
                    self.busy_ns[end] = self.busy_ns.get(end, 0) + elapsed_ns
            self.now_ns = now_ns

    def next_ns(self) -> int:
        """Return when the next transfer ends, if none begins before; NEVER_NS if none is under way.

        Raise TooLateError if that is beyond LATEST_NS.
        """
        if self._next_ns == NEVER_NS and self.jobs:
            self._next_ns = min(job.end_ns for job in self.jobs)
            if self._next_ns > LATEST_NS:
                raise TooLateError
        return self._next_ns

    def take_ended(self, now_ns: int) -> list[Job]:
        """Return the transfers that end now, in the order in which they began."""
        self.advance(now_ns)
        done = [job for job in self.jobs if job.end_ns <= now_ns]
        for job in done:
            self.remove(job)
        return done

    def left_ns(self, job: Job, now_ns: int) -> int:
        """Return how long a transfer would still take if no other began or ended."""
        return max(0, job.end_ns - now_ns)

    def rate_of_one_more(self, ends: tuple[tuple[End, Fraction], ...]) -> Fraction:
        """Return the rate that one more transfer between `ends` would have now."""
        return min(rate / (self._num_at.get(end, 0) + 1) for end, rate in ends)

    def _share(self, job: Job, num_more: int) -> None:
        """Share the rates of the ends of `job` among `num_more` transfers more."""
        self._next_ns = NEVER_NS
        ends = [end for end, _ in job.ends]
        for end, rate in job.ends:
            self._num_at[end] = num = self._num_at.get(end, 0) + num_more
            if num:
                self._rate_at[end] = rate / num
        for each in self.jobs:
            if any(end in ends for end, _ in each.ends):
                self._change(each)

    def _change(self, job: Job) -> None:
        """Give a transfer the rate that its ends have for it."""
        rate = min(self._rate_at[end] for end, _ in job.ends)
        if job.factor != 1:
            rate /= job.factor
        if rate != job.rate:
            self._count(job)
            job.rate = rate
            self._expect(job)

    def _count(self, job: Job) -> None:
        """Count the bytes that are transferred by now."""
        job.num_left -= (self.now_ns - job.since_ns) * job.rate
        job.since_ns = self.now_ns

    def _expect(self, job: Job) -> None:
        # Of a transfer that ends in this nanosecond, less than nothing is left.
        job.end_ns = job.since_ns + max(0, ceil(job.num_left / job.rate))
        self._next_ns = NEVER_NS
