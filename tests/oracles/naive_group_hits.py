"""The hit ledger of KV groups token by token: a naive engine that remembers every prefix, and what became of each part.

What is missed and was seen is `evicted` if some prefix that is as long or longer would have been a hit had nothing been
evicted; else `not_kept`, if its page was ever full.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from oracles.naive import NaiveRequest
from oracles.naive_group_engine import CountingGroups, NaiveGroupEngine
from oracles.naive_grouped import NaivePart, Name

__all__ = ["RememberingGroupEngine"]


class RememberingGroups(CountingGroups):
    """Knows of each part that cannot be found any more whether it was evicted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.was_evicted: dict[tuple[int, Name], bool] = {}
        self.leaving: tuple[NaivePart, ...] = ()

    def lose(self, part: NaivePart) -> None:
        super().lose(part)
        assert part.name is not None
        if (part.group, part.name) not in self.copies:
            self.was_evicted[part.group, part.name] = part not in self.leaving

    def release(self, part: NaivePart, *, is_passed: bool = False) -> None:
        self.leaving = (part,)
        super().release(part, is_passed=is_passed)
        self.leaving = ()

    def had(self, group: int, name: Name) -> bool:
        """Return whether a part is there, or would be if nothing had been evicted."""
        return (group, name) in self.copies or self.was_evicted.get((group, name), False)


class RememberingGroupEngine(NaiveGroupEngine):
    """Classifies each prompt token when its request is admitted, and once more if it is computed again."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.memory = RememberingGroups(self.layers, self.page_size, self.total_bytes, keeps_all=options["keeps_all"])
        self.groups = self.memory
        self.seen: set[object] = set()
        self.fates: dict[int, dict[int, str]] = {}
        self.pending: dict[int, list[str]] = {}
        self.num_classified: dict[int, int] = {}

    def prefix(self, request: NaiveRequest, end: int) -> object:
        return (request.tenant, tuple(request.token(index) for index in range(end)))

    def see(self, request: NaiveRequest, end: int) -> None:
        self.seen.update(self.prefix(request, upto) for upto in range(1, end + 1))

    def had_been_hit(self, tokens: list[Any], salt: Any, length: int) -> bool:
        names = [self.groups.name(tokens, salt, page) for page in range(length)]
        return any(self.memory.had(group, names[-1]) for group in range(len(self.layers))) and all(
            self.memory.had(group, names[page])
            for group, (layer, _) in enumerate(self.layers)
            for page in self.groups.needed(layer, length * self.page_size)
        )

    def classify(self, request: NaiveRequest) -> None:
        tokens = self.tokens_of(request, len(request.tokens))
        num_prompt, size, salt = len(tokens), self.page_size, request.tenant
        num_seen = max(end for end in range(num_prompt + 1) if not end or self.prefix(request, end) in self.seen)
        findable = min(num_seen, num_prompt - 1) // size
        kinds = []
        for position in range(num_prompt):
            page = position // size
            name = self.groups.name(tokens, salt, page)  # type: ignore[arg-type]
            if position < request.computed:
                kinds.append("device_hit")
            elif position >= num_seen:
                kinds.append("never_seen")
            elif page >= findable:
                kinds.append("alignment")
            elif any(self.had_been_hit(tokens, salt, length) for length in range(page + 1, findable + 1)):
                kinds.append("evicted")
            elif any(
                (group, name) in self.groups.copies or (group, name) in self.memory.was_evicted
                for group in range(len(self.layers))
            ):
                kinds.append("not_kept")
            else:
                kinds.append("alignment")
        self.pending[request.seq] = kinds
        fates = self.fates.setdefault(request.seq, {})
        for position in range(min(request.computed, num_prompt)):
            fates.setdefault(position, kinds[position])

    def compute_chunk(self, request: NaiveRequest, want: int) -> None:
        if self.num_classified.get(request.seq) != request.admissions:
            self.num_classified[request.seq] = request.admissions
            self.classify(request)
        start, end = request.computed, request.computed + want
        fates, kinds = self.fates[request.seq], self.pending[request.seq]
        for position in range(start, min(end, len(request.tokens))):
            fates[position] = "recomputed" if position in fates else kinds[position]
        super().compute_chunk(request, want)
        self.see(request, end)

    def fill(self, request: NaiveRequest) -> None:
        super().fill(request)
        if request.computed % self.page_size == 0:
            self.see(request, request.computed)

    def release(self, request: NaiveRequest) -> None:
        self.see(request, request.computed)
        super().release(request)

    def num_by_fate(self) -> dict[int, Counter[str]]:
        return {seq: Counter(fates.values()) for seq, fates in self.fates.items()}
