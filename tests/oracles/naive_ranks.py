"""Naive engines in lock step: each plans a step, the longest decides, and all of them compute for that long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

from oracles.naive import NaiveRequest, run_naive
from oracles.naive_offload import NaiveOffloadEngine

__all__ = ["NaiveRank", "run_naive_ranks"]

TogetherNs: TypeAlias = Callable[[list[int]], int]
"""How long a common step is without copies, given how long each engine that computes would take alone."""


class NaiveRank(NaiveOffloadEngine):
    """An engine that waits, once it has planned a step, for the duration that all ranks decide."""

    def begin_with_others(self, now_ns: int) -> int | None:
        """Plan a step; return how long it would take alone and without copies, or None without anything to compute."""
        self._planned: SimpleQueue[int | None] = SimpleQueue()
        self._decided: SimpleQueue[int] = SimpleQueue()
        self._failed: list[BaseException] = []
        self._thread = Thread(target=self._run, args=(now_ns,))
        self._thread.start()
        duration_ns = self._planned.get()
        if duration_ns is None:
            self._join()
        return duration_ns

    def end_with_others(self, duration_ns: int) -> None:
        self._decided.put(duration_ns)
        self._join()

    def _run(self, now_ns: int) -> None:
        try:
            self.end_ns = self.step(now_ns)
        except BaseException as error:
            self._failed.append(error)
        self._planned.put(None)

    def _join(self) -> None:
        self._thread.join()
        if self._failed:
            raise self._failed[0]

    def step_ns(self, duration_ns: int, now_ns: int) -> int:
        self._planned.put(duration_ns)
        return self._decided.get()

    def with_loads_ns(self, duration_ns: int, now_ns: int) -> int:
        return super().step_ns(duration_ns, now_ns)


class NaiveRanks:
    """Ranks that step together, one request after the other in turn. `run_naive` drives them as one engine."""

    def __init__(self, ranks: Sequence[NaiveRank], together_ns: TogetherNs) -> None:
        self.ranks, self.together_ns = ranks, together_ns
        self.rank_of: dict[int, int] = {}
        self.is_pausing = False

    def submit(self, request: NaiveRequest) -> None:
        rank = self.rank_of[request.seq] = len(self.rank_of) % len(self.ranks)
        self.ranks[rank].submit(request)

    def give_up(self, request: NaiveRequest) -> None:
        self.ranks[self.rank_of[request.seq]].give_up(request)

    def end_transfers(self, now_ns: int) -> None:
        for rank in self.ranks:
            rank.end_transfers(now_ns)

    def has_work(self) -> bool:
        return any(rank.has_work() for rank in self.ranks)

    def step(self, now_ns: int) -> int:
        """Run a common step; return when it ends, or what is waited for if no rank computes."""
        busy = [rank for rank in self.ranks if rank.has_work()]
        for rank in busy:
            rank.is_pausing = False
        alone = [(rank, rank.begin_with_others(now_ns)) for rank in busy]
        computing = [(rank, duration_ns) for rank, duration_ns in alone if duration_ns is not None]
        self.is_pausing = not computing
        if not computing:
            return min(rank.end_ns for rank in busy)
        duration_ns = self.together_ns([duration_ns for _, duration_ns in computing])
        duration_ns = max(rank.with_loads_ns(duration_ns, now_ns) for rank, _ in computing)
        for rank, _ in computing:
            rank.end_with_others(duration_ns)
        return now_ns + duration_ns


def run_naive_ranks(requests: Sequence[NaiveRequest], ranks: Sequence[NaiveRank], together_ns: TogetherNs) -> None:
    """Run `requests` as `run_naive` does; each then knows its rank."""
    group = NaiveRanks(ranks, together_ns)
    run_naive(requests, [group])
    for request in requests:
        request.replica = group.rank_of[request.seq]
