"""Cached prefixes of workers whose events do not describe pages: with KV groups, or several models on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvarts.content import Content

if TYPE_CHECKING:
    from kvarts.sim.router import Routed

__all__ = ["AskedCaches"]


class AskedCaches:
    """A router's index that reads the caches directly, like an index without lag. Covers the device tier only."""

    def __init__(self, engines: Sequence[Routed]) -> None:
        self._engines = engines

    def matches(self, content: Content, limit: int) -> dict[int, tuple[int, ...]]:
        """Return the pages of the longest prefix that each engine could resume from."""
        found = ((index, each.scheduler.cache.match(content, limit)) for index, each in enumerate(self._engines))
        return {index: (match.num_pages,) for index, match in found if match.num_pages}
