"""Which pages a session keeps by attention, by definition: numbers of pages, and a table of all that each received."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

__all__ = ["NaiveHeavyPages"]


@dataclass
class NaiveHeavyPages:
    """`held`: pages by number. `received`: what each got from the tokens of a step, which ends before a position."""

    sink: int
    window: int
    num_heavy: int
    page_size: int
    keep: str
    held: set[int] = field(default_factory=set)
    received: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    decided: int = 0

    @property
    def interval(self) -> int:
        """The tokens between two decisions: 64, in whole pages."""
        pages = 1
        while pages * self.page_size < 64:
            pages += 1
        return pages * self.page_size

    def last_decision(self, position: int) -> int:
        """Return the position of the last decision that is due before the token at `position`."""
        return max(due for due in range(0, position + 1, self.interval))

    def score(self, page: int) -> int:
        """Return what a page has received of what counts."""
        return sum(scores.get(page, 0) for _, scores in self.received)

    def begin(self, position: int) -> None:
        """The token at `position` may be next: decide, if that is due."""
        due = self.last_decision(position)
        if due <= self.decided:
            return
        self.decided = due
        of_sink = {token // self.page_size for token in range(self.sink)}
        passed = [page for page in self.held - of_sink if (page + 1) * self.page_size <= due - self.window]
        passed.sort(key=lambda page: (self.score(page), page))
        self.held -= set(passed[: max(0, len(passed) - self.num_heavy)])
        if self.keep == "snapkv":
            self.received = []
        else:
            # What was received before a decision stays, wherever the session goes back to.
            self.received = [(0, scores) for _, scores in self.received]

    def compute(self, start: int, end: int) -> None:
        """Tokens [start, end) are computed."""
        assert self.last_decision(start) == self.last_decision(end - 1), "a step has tokens of both sides of a decision"
        self.held |= {token // self.page_size for token in range(start, end)}

    def receive(self, start: int, end: int, scores: dict[int, int]) -> None:
        """Tokens [start, end) gave pages these scores, which count unless those of the first of them count already."""
        if all(start >= until for until, _ in self.received):
            self.received.append((end, scores))

    def can_go_back(self, length: int) -> bool:
        """Return whether the last of `length` tokens can be computed again: nothing was decided since."""
        return self.last_decision(max(0, length - 1)) >= self.decided

    def go_back(self, length: int) -> None:
        """Only the first `length` tokens stay, and what steps of these alone gave."""
        self.held = {page for page in self.held if page * self.page_size < length}
        self.received = [(end, scores) for end, scores in self.received if end <= length]

    def fork(self) -> NaiveHeavyPages:
        """Return one that goes its own way."""
        return deepcopy(self)
