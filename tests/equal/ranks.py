"""Data-parallel ranks of either side, behind its front end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from equal.workload import Step, Workload


class FrontEnd(Protocol):
    """Chooses the rank of each request."""

    def place(self, index: int) -> int:
        """Return the rank of a request."""

    def ended(self, indices: list[int]) -> None:
        """Record that requests have ended."""

    def report(self, loads: list[tuple[int, int, int]]) -> None:
        """Record what the ranks report: requests that wait, that run, and blocks in use."""


def run_ranks(workload: Workload, run: Callable[[Workload], Iterator[Step]], front_end: FrontEnd) -> Iterator[Step]:
    """Yield what all ranks of one side do in each step, until every request has ended."""
    alone = [msgspec.structs.replace(workload, asks=[], num_ranks=1, is_open=True) for _ in range(workload.num_ranks)]
    ranks = [run(each) for each in alone]
    names: list[list[int]] = [[] for _ in ranks]
    num_arrived = step = num_ended = 0
    loads = [(0, 0, 0) for _ in ranks]
    while num_ended < len(workload.asks):
        if step % workload.report_every == 0:
            front_end.report(loads)
        whole = Step()
        while num_arrived < len(workload.asks) and workload.asks[num_arrived].step <= step:
            rank = whole.placed[num_arrived] = front_end.place(num_arrived)
            alone[rank].asks.append(workload.asks[num_arrived])
            names[rank].append(num_arrived)
            num_arrived += 1
        for rank, each in enumerate(ranks):
            done, name = next(each), names[rank]
            loads[rank] = done.load
            whole.tokens |= {name[index]: count for index, count in done.tokens.items()}
            whole.admitted |= {name[index]: count for index, count in done.admitted.items()}
            whole.cached |= {name[index]: count for index, count in done.cached.items()}
            whole.preempted += [name[index] for index in done.preempted]
            whole.ended += [name[index] for index in done.ended]
            whole.num_free += done.num_free
            whole.stored += [(rank, key) for _, key in done.stored]
            whole.removed += [(rank, key) for _, key in done.removed]
            whole.uncomputed |= {(rank, key) for _, key in done.uncomputed}
        whole.load = list(loads)
        front_end.ended(whole.ended)
        num_ended += len(whole.ended)
        yield whole
        step += 1
