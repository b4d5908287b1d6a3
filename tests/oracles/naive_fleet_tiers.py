"""Workers of a naive fleet with tiers below the device: some compute prompts, and others generate."""

from __future__ import annotations

from typing import Any

from oracles.naive import CostFn, NaiveRequest
from oracles.naive_fleet import NaiveHandoff, NaiveWorker
from oracles.naive_offload import NaiveOffloadEngine


class NaiveTieredWorker(NaiveWorker, NaiveOffloadEngine):
    """A NaiveWorker in the steps of which a NaiveOffloadEngine loads and stores."""

    def __init__(self, *, cost: CostFn, **settings: Any) -> None:
        super().__init__(is_mocker=False, cost=cost, **settings)
        self.receiving: list[NaiveRequest] = []
        """They have pages here, which are not filled yet."""

    def has_work(self) -> bool:
        return bool(self.held or self.receiving) or super().has_work()

    def start(self, now_ns: int) -> bool:
        self.end_transfers(now_ns)
        if not self.has_work():
            return False
        if super().start(now_ns):
            return True
        self.is_pausing = False
        return False

    def next_wake_ns(self) -> int | None:
        if not self.transfers:
            return None
        return self.pause_until()

    def try_to_reserve(self, now_ns: int) -> list[NaiveHandoff]:
        done = super().try_to_reserve(now_ns)
        self.receiving += [handoff.decode for handoff in done]
        return done

    def activate(self, handoff: NaiveHandoff, now_ns: int) -> None:
        request = handoff.decode
        self.receiving.remove(request)
        super().activate(handoff, now_ns)
        self.settle_lists()
        self.mark_held(request)
        num_full = len(request.tokens) // self.page_size
        if num_full and not self.is_lazy:
            self.wanted[request.seq] = request, 0, num_full

    def let_follow(self, awaited: NaiveRequest) -> None:
        super().let_follow(awaited)
        if self.is_by_age:
            self.waiting.sort(key=self.age)

    def finish(self, now_ns: int) -> list[NaiveRequest]:
        done = super().finish(now_ns)
        if not self.is_lazy:
            self.wanted.update((request.seq, (request, 0, num_pages)) for request, num_pages in self.computed_now)
        self.computed_now = []
        return done

    def release(self, request: NaiveRequest) -> None:
        super().release(request)
        if request.last_token_ns is not None:
            self.forget(request)
