"""Cached pages that are kept in use for later, as long as no request needs their memory."""

from __future__ import annotations

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.events import PagesPinned, PagesUnpinned
from kvarts.kv.cache import Cache, Holding

__all__ = ["Pins"]


class Pins:
    """Owner of pins: each keeps the first pages of a content in use. The oldest pin is given up first."""

    def __init__(self, cache: Cache, tell: Tell | None = None) -> None:
        self._cache = cache
        self._tell = tell
        self._pins: dict[int, tuple[Holding, Content]] = {}
        self._num_made = 0
        self.num_pins = 0
        self.num_given_up = 0
        """Pins that were given up for requests."""

    def holdings(self) -> list[Holding]:
        """Return the holdings of all pins."""
        return [holding for holding, _ in self._pins.values()]

    def add(self, content: Content, num_pages: int) -> int:
        """Pin the resident ones of the first `num_pages` pages of `content`; return the number of the pin."""
        cache = self._cache
        match = cache.match(content, num_pages)
        pin = self._num_made
        self._num_made += 1
        holding = cache.open(match)
        self._pins[pin] = holding, content
        self.num_pins += 1
        cache.num_reserved += cache.keep(holding)
        if self._tell is not None:
            self._tell(PagesPinned(pin, content, match.num_pages))
        return pin

    def remove(self, pin: int) -> None:
        """Stop keeping the pages of a pin in use; does nothing for a pin that was given up."""
        pinned = self._pins.pop(pin, None)
        if pinned is not None:
            holding, _ = pinned
            self.num_pins -= 1
            self._cache.num_reserved -= self._cache.unkeep(holding)
            self._cache.close(holding, holding.num_pages, holding.num_pages)
            if self._tell is not None:
                self._tell(PagesUnpinned(pin))

    def give_up(self, num_pages: int) -> bool:
        """Remove pins until `num_pages` pages are free; return whether they are."""
        while num_pages > self._cache.num_free:
            if not self.give_up_oldest():
                return False
        return True

    def give_up_oldest(self) -> bool:
        """Remove the oldest pin; return whether there was one."""
        if not self._pins:
            return False
        self.num_given_up += 1
        self.remove(next(iter(self._pins)))
        return True
