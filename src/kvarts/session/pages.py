"""The pages of one bounded session."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.kv.pool import PageId
from kvarts.kv.reserve import PageReserve
from kvarts.kv.sink_window import SinkWindow

__all__ = ["ChunkRoom", "SessionPages"]


class ChunkRoom:
    """The pages that chunks of sessions may hold within one step, beyond what sessions hold between steps."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_used = 0
        """Pages used in the step under way."""

    @property
    def most_tokens(self) -> int:
        """Return how many tokens certainly fit now: one more does, for which no session needs a page of these."""
        return max(1, (self.num_pages - self.num_used) * self.page_size)


class SessionPages:
    """OwnPages of a session that keeps a sink and a window, with ids from `reserve`.

    The reserve has as many pages for the session as `keeps.most_pages`, and those of `room` beside.
    """

    def __init__(self, keeps: SinkWindow, reserve: PageReserve, room: ChunkRoom) -> None:
        self.keeps = keeps
        self.num_dropped = 0
        self.most_held = 0
        """The most pages it has held, within a step."""
        self._reserve = reserve
        self._room = room
        self._page_size = room.page_size
        self._num_sink_pages = keeps.num_sink_pages(room.page_size)
        self._page_ids: list[PageId] = []
        self._copies: list[tuple[PageId, PageId]] = []
        self._num_borrowed = 0
        """Pages of `room` that it uses in the step under way."""

    @property
    def page_ids(self) -> Sequence[PageId]:
        """The pages that it holds, in order of position."""
        return self._page_ids

    def settle(self, position: int) -> bool:
        """Drop pages that no token at `position` or later can see; return whether there were any."""
        num_dropped = self.keeps.num_dropped(position, self._page_size) - self.num_dropped
        if num_dropped > 0:
            first = self._num_sink_pages
            for page_id in self._page_ids[first : first + num_dropped]:
                self._reserve.release(page_id)
            del self._page_ids[first : first + num_dropped]
            self.num_dropped += num_dropped
        if self._num_borrowed:
            most = self.keeps.most_pages(self._page_size)
            num_borrowed = max(0, len(self._page_ids) - most)
            self._room.num_used -= self._num_borrowed - num_borrowed
            self._num_borrowed = num_borrowed
        return num_dropped > 0

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens may be computed in this step."""
        return min(num_tokens, self._room.most_tokens)

    def grow(self, start: int, end: int) -> bool:
        """Make tokens [start, end) writable; return whether that took a page.

        A page that is shared with a fork, and that has some of these tokens, is copied first.
        """
        page_ids, reserve, size = self._page_ids, self._reserve, self._page_size
        took = False
        for place in range(start // size - self.num_dropped, len(page_ids)):
            shared = page_ids[place]
            if reserve.is_shared(shared):
                page_ids[place] = reserve.take()
                reserve.release(shared)
                self._copies.append((shared, page_ids[place]))
                took = True
        for _ in range(-(-end // size) - self.num_dropped - len(page_ids)):
            page_ids.append(reserve.take())
            took = True
        num_held = len(page_ids)
        if num_held > self.most_held:
            self.most_held = num_held
        num_over = num_held - self.keeps.most_pages(size) - self._num_borrowed
        if num_over > 0:
            self._room.num_used += num_over
            self._num_borrowed += num_over
            assert self._room.num_used <= self._room.num_pages, "a chunk took more pages than there are for chunks"
        return took

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the pages to be copied, and forget them."""
        copies, self._copies = self._copies, []
        return copies

    def shorten(self, num_tokens: int) -> None:
        """Release pages beyond the first `num_tokens` tokens, between steps."""
        if num_tokens <= self._num_sink_pages * self._page_size:
            self.num_dropped = 0  # what came after pages that were dropped goes as well
        num_pages = -(-num_tokens // self._page_size) - self.num_dropped
        for page_id in self._page_ids[num_pages:]:
            self._reserve.release(page_id)
        del self._page_ids[num_pages:]

    def fork(self) -> SessionPages:
        """Return pages that are shared with these, between steps."""
        other = SessionPages(self.keeps, self._reserve, self._room)
        other.num_dropped = self.num_dropped
        other._page_ids = list(self._page_ids)
        other.most_held = len(self._page_ids)
        for page_id in self._page_ids:
            self._reserve.share(page_id)
        return other

    def restore(self, num_pages: int, num_dropped: int) -> Sequence[PageId]:
        """Take pages for KV that was kept elsewhere, where nothing is computed yet; return them."""
        assert not self._page_ids
        self._page_ids = [self._reserve.take() for _ in range(num_pages)]
        self.num_dropped = num_dropped
        self.most_held = max(self.most_held, num_pages)
        return self._page_ids

    def release(self) -> None:
        """Release all pages, between steps."""
        for page_id in self._page_ids:
            self._reserve.release(page_id)
        self._page_ids = []
