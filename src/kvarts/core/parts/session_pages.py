"""Requests that bring their own pages along, which come from a reserve: turns of sessions with bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarts.core.event_log import Emit
from kvarts.core.kv.cache import Cache, PageReserve
from kvarts.core.kv.pool import PageId
from kvarts.core.request import Request
from kvarts.core.sched.step import Step
from kvarts.core.sched.wheel import DecodeWheel

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PagesOfSession

__all__ = ["SessionPagesInUse"]


class SessionPagesInUse:
    """The pages that requests brought along. `reserve`: the source of these pages.

    Decodes that bring their own pages get and drop pages only in steps that compute a token at certain places of a
    page: the first place, and the places at which their window leaves a page. So no other decode is touched.
    """

    def __init__(self, cache: Cache, emit: Emit | None) -> None:
        self.reserve = PageReserve(cache, emit)
        self.waiting: deque[Request] = deque()
        """Requests that wait for a place and for tokens, and never for memory."""
        self.computed: list[tuple[PagesOfSession, int]] = []
        """Holders of pages with a chunk in this step, and the position of its last token."""
        self.changed: Sequence[Request] = ()
        """Decodes whose pages changed for the step being planned."""
        self._copying: list[PagesOfSession] = []

    def compute(self, own: PagesOfSession, start: int, end: int) -> None:
        """Make tokens [start, end) of a chunk writable."""
        own.settle(start)
        own.grow(start, end)
        self.computed.append((own, end - 1))
        self._copying.append(own)

    def settle(self) -> None:
        """Drop the pages that no token after the chunks of this step can see. The last token may be computed again."""
        for own, last in self.computed:
            own.settle(last)
        self.computed.clear()

    def take_turns(self, wheel: DecodeWheel, step: Step) -> bool:
        """Get and drop own pages for the decodes of `step`; return False: others take theirs otherwise."""
        if not wheel.window_places:
            self.changed = ()
            return False
        changed = []
        for place in sorted({0, *wheel.window_places}):
            for request in wheel.computing_at(place):
                own = request.own
                if own is None:
                    continue
                position = wheel.num_computed(request)
                is_settled = own.settle(position)
                if own.grow(position, position + 1) or is_settled:
                    changed.append(request)
        self.changed = changed
        return False

    def take_copies(self) -> tuple[tuple[PageId, PageId], ...]:
        """Return the copies of pages to make at the start of this step."""
        copies: list[tuple[PageId, PageId]] = []
        for own in self._copying:
            copies += own.take_copies()
        self._copying.clear()
        return tuple(copies)
