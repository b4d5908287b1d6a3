"""Pages that requests bring along, in the steps of a scheduler, and the reserve from which they are taken."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.event_log import Tell
from kvarts.kv.cache import Cache, PageReserve
from kvarts.kv.groups import OwnPages
from kvarts.kv.pool import PageId
from kvarts.request import Request
from kvarts.sched.wheel import DecodeWheel

__all__ = ["OwnPagesInUse"]


class OwnPagesInUse:
    """The pages that running requests brought along. `reserve`: the source of these pages.

    Decodes that bring their own pages get and drop pages only in steps that compute a token at certain places of a
    page: the first place, and the places at which their window leaves a page. So no other decode is touched.
    """

    def __init__(self, cache: Cache, tell: Tell | None) -> None:
        self.reserve = PageReserve(cache, tell)
        self.computed: list[tuple[OwnPages, int]] = []
        """Holders of pages with a chunk in this step, and the position of its last token."""
        self._copying: list[OwnPages] = []

    def compute(self, own: OwnPages, start: int, end: int) -> None:
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

    def turn(self, wheel: DecodeWheel) -> Sequence[Request]:
        """Get and drop pages for the decodes of the next step; return those whose pages changed."""
        if not wheel.window_places:
            return ()
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
        return changed

    def take_copies(self) -> tuple[tuple[PageId, PageId], ...]:
        """Return the copies of pages to make at the start of this step."""
        copies: list[tuple[PageId, PageId]] = []
        for own in self._copying:
            copies += own.take_copies()
        self._copying.clear()
        return tuple(copies)
