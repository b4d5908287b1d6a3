"""Naive engines in lock step: each plans a step, the longest decides, and all of them compute for that long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

from oracles.naive import NaiveRequest
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

    def with_copies_ns(self, duration_ns: int, now_ns: int) -> int:
        return super().step_ns(duration_ns, now_ns)


def step_together(engines: Sequence[NaiveRank], now_ns: int, together_ns: TogetherNs) -> tuple[int, bool]:
    """Run a common step, or none; return when it ends, or what is waited for, and whether any engine computes."""
    alone = [(engine, engine.begin_with_others(now_ns)) for engine in engines]
    computing = [(engine, duration_ns) for engine, duration_ns in alone if duration_ns is not None]
    if not computing:
        return min(engine.end_ns for engine in engines), False
    duration_ns = together_ns([duration_ns for _, duration_ns in computing])
    duration_ns = max(engine.with_copies_ns(duration_ns, now_ns) for engine, _ in computing)
    for engine, _ in computing:
        engine.end_with_others(duration_ns)
    return now_ns + duration_ns, True


def run_naive_ranks(requests: Sequence[NaiveRequest], engines: Sequence[NaiveRank], together_ns: TogetherNs) -> None:
    """Open loop, round robin, as `run_naive` does it for engines that are not in lock step."""
    pending = sorted(requests, key=lambda request: request.arrival_ns)
    end: int | None = None
    is_pausing = False
    dropping: list[NaiveRequest] = []
    impatient: list[NaiveRequest] = []
    now = sent = 0

    def give_up(request: NaiveRequest) -> None:
        assert request.replica is not None
        engines[request.replica].end_transfers(now)
        engines[request.replica].give_up(request)

    while True:
        if end is not None and end <= now:
            end = None
            for request in dropping:
                give_up(request)
            dropping = []
        impatient = [r for r in impatient if not r.rejected and (r.last_token_ns is None or r.last_token_ns > now)]
        for request in sorted(impatient, key=lambda r: (r.gives_up_ns, r.seq)):
            assert request.gives_up_ns is not None
            if request.gives_up_ns > now:
                break
            impatient.remove(request)
            if is_pausing:
                end = None
            if end is None:
                give_up(request)
            else:
                dropping.append(request)
        while sent < len(pending) and pending[sent].arrival_ns <= now:
            request = pending[sent]
            request.replica = sent % len(engines)
            engines[request.replica].submit(request)
            if is_pausing:
                end = None
            if request.gives_up_ns is not None:
                impatient.append(request)
            sent += 1
        if any(request.gives_up_ns == now for request in impatient):
            continue
        busy = [engine for engine in engines if engine.has_work()]
        if end is None and busy:
            for engine in busy:
                engine.is_pausing = False
            end, computes = step_together(busy, now, together_ns)
            is_pausing = not computes
        times = [end] if end is not None else []
        if sent < len(pending):
            times.append(pending[sent].arrival_ns)
        times += [request.gives_up_ns for request in impatient if request.gives_up_ns is not None]
        if not times:
            return
        now = min(times)
