"""The hit ledger token by token: a naive engine that remembers every prefix computed and every page evicted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from oracles.naive import NaiveEngine, NaiveRequest, Page


class RememberingEngine(NaiveEngine):
    """Classifies each prompt token when its request is admitted, and once more if it is computed again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: set[object] = set()
        self.ever_evicted: set[object] = set()
        self.fates: dict[int, dict[int, str]] = {}
        self.pending: dict[int, list[str]] = {}
        self.decoding: set[int] = set()

    def prefix(self, request: NaiveRequest, end: int) -> object:
        return (request.tenant, tuple(request.token(index) for index in range(end)))

    def see(self, request: NaiveRequest, start: int, end: int) -> None:
        self.seen.update(self.prefix(request, upto) for upto in range(start + 1, end + 1))

    def take_page(self) -> Page:
        evicted = len(self.evicted)
        page = super().take_page()
        self.ever_evicted.update(self.evicted[evicted:])
        return page

    def lookup(self, request: NaiveRequest) -> list[Page]:
        found = super().lookup(request)
        kinds = []
        num_prompt = len(request.tokens)
        for position in range(num_prompt):
            page = position // self.page_size
            if page < len(found):
                kinds.append("device_hit")
            elif self.prefix(request, position + 1) not in self.seen:
                kinds.append("never_seen")
            elif page < (num_prompt - 1) // self.page_size and self.name_of(request, page) in self.ever_evicted:
                kinds.append("evicted")
            else:
                kinds.append("alignment")
        self.pending[request.seq] = kinds
        return found

    def compute(self, request: NaiveRequest, upto: int) -> None:
        start = request.computed
        num_prompt = len(request.tokens)
        fates = self.fates.setdefault(request.seq, {})
        kinds = self.pending[request.seq]
        for position in range(min(start, num_prompt)):
            fates.setdefault(position, kinds[position])  # found, on admission
        for position in range(start, min(upto, num_prompt)):
            fates[position] = "recomputed" if position in fates else kinds[position]
        is_decode = request.seq in self.decoding
        super().compute(request, upto)
        if not is_decode:
            self.see(request, start, upto)
        elif upto % self.page_size == 0:
            self.see(request, max(0, upto - self.page_size), upto)
        if request.computed == request.known:
            self.decoding.add(request.seq)

    def release(self, request: NaiveRequest) -> None:
        self.see(request, 0, request.computed)
        self.decoding.discard(request.seq)
        super().release(request)

    def counts(self) -> dict[int, Counter[str]]:
        return {seq: Counter(fates.values()) for seq, fates in self.fates.items()}
