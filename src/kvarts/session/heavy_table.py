"""The page table of a session that keeps pages by the attention that they received."""

from __future__ import annotations

from copy import copy

import numpy as np
import numpy.typing as npt

from kvarts.kv.heavy_pages import HeavyPages
from kvarts.kv.reserve import PageReserve
from kvarts.kv.sink_window import SinkWindow
from kvarts.session.pages import ChunkRoom, SessionPageTable

__all__ = ["HeavyTable"]

SEES_ALL = 1 << 40
"""A window that is never passed. The window of a sequence that retains all tokens is another number."""

Scores = npt.NDArray[np.float64]


class HeavyTable(SessionPageTable):
    """A SessionPageTable whose first pages are those of the sink, then those that were chosen, with gaps between them.

    Owner of the scores of its pages, and of the position of the last decision.
    """

    def __init__(self, keeps: HeavyPages, reserve: PageReserve, room: ChunkRoom) -> None:
        super().__init__(keeps, reserve, room)
        self._keeps = keeps
        self._front = list(range(self.num_sink_pages))
        """The numbers of its first `num_sink_pages` pages; those after them have consecutive numbers."""
        self._decided = 0
        """The position of the last decision."""
        self._scores: Scores = np.zeros(0)
        """The score of each page at that time; later pages have none yet."""
        self._since: list[tuple[int, Scores]] = []
        """What pages received since then, step by step: the position after its tokens, and the scores."""

    def page_numbers(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the pages that it holds, in the history."""
        later = np.arange(len(self._front), len(self._page_ids)) + self.num_dropped
        return np.concatenate((self._front[: len(self._page_ids)], later)).astype(np.int64)

    def scores(self) -> Scores:
        """Return the scores of the pages that it holds."""
        total = np.zeros(len(self._page_ids))
        for scores in (self._scores, *(scores for _, scores in self._since)):
            total[: len(scores)] += scores[: len(total)]
        return total

    def seen(self, rotates_late: bool) -> SinkWindow:
        """Return the tokens that layers see: all that are before them in the table."""
        return SinkWindow(len(self._front) * self._page_size, SEES_ALL, rotates_late)

    def observe(self, start: int, end: int, scores: npt.NDArray[np.float32]) -> None:
        """Add the scores that pages received from tokens [start, end), unless these were computed before."""
        if start >= (self._since[-1][0] if self._since else self._decided):
            self._since.append((end, scores.astype(np.float64)))

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens may be computed before the next decision."""
        return min(num_tokens, self._keeps.num_until_decision(start))

    def _drop(self, position: int) -> bool:
        """Decide which pages stay, if that is due before the token at `position`; return whether any was dropped."""
        decided = self._keeps.decided_at(position)
        if decided <= self._decided:
            return False
        self._decided = decided
        numbers, scores = self.page_numbers(), self.scores()
        num_sink = self._keeps.num_sink_pages(self._page_size)
        num_passed = int(np.count_nonzero(numbers < self._keeps.first_seen(position) // self._page_size))
        stays = [*range(min(num_sink, len(numbers)))]
        if num_passed > num_sink:
            stays += [num_sink + place for place in self._keeps.choose(scores[num_sink:num_passed].tolist())]
            self._front = numbers[stays].tolist()
            self.num_sink_pages = len(stays)
        num_passed = max(num_passed, len(stays))
        gone = sorted({*range(num_passed)} - {*stays})
        for place in gone:
            self._reserve.release(self._page_ids[place])
        self._page_ids = [page_id for place, page_id in enumerate(self._page_ids) if place not in gone]
        self.num_dropped += len(gone)
        self._scores = np.delete(scores, gone) if self._keeps.scoring.adds_up else np.zeros(0)
        self._since = []
        return bool(gone)

    def can_shorten(self, num_tokens: int) -> bool:
        """Return whether no decision was made since the last of the first `num_tokens` tokens was computed."""
        return self._keeps.decided_at(max(0, num_tokens - 1)) == self._decided

    def shorten(self, num_tokens: int) -> None:
        """Release pages beyond the first `num_tokens` tokens; scores of steps that computed later tokens are lost."""
        num_pages = -(-num_tokens // self._page_size) - self.num_dropped
        for page_id in self._page_ids[num_pages:]:
            self._reserve.release(page_id)
        del self._page_ids[num_pages:]
        self._since = [(end, scores) for end, scores in self._since if end <= num_tokens]

    def fork(self) -> HeavyTable:
        """Return a table that shares these pages, between steps."""
        other = copy(self)
        other._share(self)
        other._front, other._since = list(self._front), list(self._since)
        return other

    def release(self) -> None:
        """Release all pages, between steps; nothing is computed then."""
        super().release()
        self._front = list(range(self.num_sink_pages))
        self._decided, self._scores, self._since = 0, np.zeros(0), []
