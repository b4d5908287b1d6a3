"""A naive engine whose decodes draft tokens before prompts are planned, one request at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oracles.naive import NaiveEngine, NaiveRequest, Page

DraftFn = Callable[[int, int], tuple[int, int]]
"""From a request and the number of its generated tokens to the tokens drafted next, and how many are right."""


class NaiveDraftEngine(NaiveEngine):
    def __init__(self, *, num_slots: int, drafts: DraftFn, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_slots = num_slots
        self.drafts = drafts
        self.planned: dict[int, tuple[int, int]] = {}
        self.has_prefills = self.has_running = False
        self.names_at_turns = True

    def num_drafted(self, request: NaiveRequest) -> int:
        if not request.decodes:
            return 0
        num_drafted, num_right = self.drafts(request.seq, request.made)
        self.planned[request.seq] = num_drafted, num_right
        return num_drafted

    def compute_given(self, took: dict[int, tuple[NaiveRequest, int]], before: dict[int, int]) -> None:
        """What is drafted counts when it turns out to be right; pages that it fills are named at the next turn."""
        for seq, (request, want) in took.items():
            took[seq] = request, min(want, request.known - request.computed)
        super().compute_given(took, before)

    def num_right(self, request: NaiveRequest) -> int:
        return self.planned.pop(request.seq, (0, 0))[1]

    def preempt(self, victim: NaiveRequest, asker: NaiveRequest, now_ns: int) -> None:
        self.planned.pop(victim.seq, None)
        super().preempt(victim, asker, now_ns)

    def begin_admissions(self, before: dict[int, int]) -> None:
        self.has_running = bool(before)
        self.has_prefills = any(not request.decodes for request in self.running if request.seq in before)

    def num_padded(self, head: NaiveRequest, hits: list[Page]) -> int:
        is_last = head.known - len(hits) * self.page_size == 1
        return self.num_slots if is_last and not self.has_prefills and (self.has_running or hits) else 0
