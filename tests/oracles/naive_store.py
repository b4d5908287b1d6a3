"""A store that engines share, one page at a time: a naive tier that knows who stored what, and links one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from oracles.naive_tier import NaivePlacement, NaiveTier, Name


@dataclass
class NaiveStore(NaiveTier):
    """What engines evict does not concern it, and what arrives broken is still there."""

    writers: dict[Name, int] = field(default_factory=dict)

    def store(self, writer: int, names: list[Name], start: int) -> NaivePlacement | None:
        placement = self.place(names, start)
        for entry in placement.new if placement is not None else ():
            self.writers[entry.name] = writer
        return placement

    def of_writer(self, writer: int) -> set[Name]:
        """What can be found and was stored by `writer`."""
        return {name for name in self.entries if self.is_stored(name) and self.writers[name] == writer}


@dataclass
class NaiveJob:
    begin_ns: int
    worker: int
    num_bytes: int
    is_read: bool


def naive_ends(jobs: list[NaiveJob], store_rate: int, worker_rate: int, latency_ns: int) -> list[Fraction]:
    """When each of `jobs` ends, in exact numbers, at rates in bytes per nanosecond."""
    left = [Fraction(job.num_bytes) for job in jobs]
    ends: list[Fraction | None] = [None] * len(jobs)
    now = Fraction(0)
    while None in ends:
        going = [place for place, job in enumerate(jobs) if ends[place] is None and job.begin_ns + latency_ns <= now]
        rates = {}
        for place in going:
            same = [jobs[other] for other in going if jobs[other].is_read is jobs[place].is_read]
            num_here = sum(job.worker == jobs[place].worker for job in same)
            rates[place] = min(Fraction(worker_rate, num_here), Fraction(store_rate, len(same)))
        times = [now + left[place] / rate for place, rate in rates.items()]
        times += [Fraction(job.begin_ns + latency_ns) for job in jobs if job.begin_ns + latency_ns > now]
        after = min(times)
        for place, rate in rates.items():
            left[place] -= (after - now) * rate
            if not left[place]:
                ends[place] = after
        now = after
    return [end for end in ends if end is not None]
