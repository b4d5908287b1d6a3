"""Pages that are taken out of a cache permanently: no request of the cache gets them until they are returned."""

from __future__ import annotations

from kvarts.event_log import Tell
from kvarts.events import PagesReserved
from kvarts.kv.cache import Cache, Holding
from kvarts.kv.pool import PageError, PageId

__all__ = ["PageReserve"]


class PageReserve:
    """Owner of pages that were taken from `cache`, and of the number of sequences that share each."""

    def __init__(self, cache: Cache, tell: Tell | None = None) -> None:
        self._cache = cache
        self._tell = tell
        self.num_pages = 0
        self.has_page_ids = cache.has_page_ids
        self._num_numbered = 0
        """The count of page numbers handed out; where pages are only counted, the reserve numbers its pages itself."""
        self._free_ids: list[PageId] = []
        self._num_sharing: dict[PageId, int] = {}
        """The number of sharers of each taken page."""

    @property
    def num_taken(self) -> int:
        """Pages that are taken."""
        return len(self._num_sharing)

    def extend(self, num_pages: int) -> None:
        """Take `num_pages` from the cache. Raise PageError for more than are free."""
        if num_pages > self._cache.num_free:
            raise PageError(f"{num_pages} pages asked for, {self._cache.num_free} free")
        self._say(num_pages)  # before the evictions for it
        page_ids = self._cache.take(num_pages)
        if page_ids is None:
            page_ids = [PageId(self._num_numbered + index) for index in range(num_pages)]
            self._num_numbered += num_pages
        self._free_ids += page_ids

    def shrink(self, num_pages: int) -> None:
        """Return `num_pages` pages that are not taken to the cache."""
        assert num_pages <= len(self._free_ids), f"{num_pages} pages to give back, {len(self._free_ids)} are free"
        at = len(self._free_ids) - num_pages
        page_ids = self._free_ids[at:]
        del self._free_ids[at:]
        self._cache.give(num_pages, page_ids if self.has_page_ids else None)
        self._say(-num_pages)

    def _say(self, num_pages: int) -> None:
        self.num_pages += num_pages
        self._cache.num_reserved += num_pages
        if self._tell is not None:
            self._tell(PagesReserved(self.num_pages))

    def take(self) -> PageId:
        """Take a page. One is available: a taker has reserved the most pages that it takes."""
        page_id = self._free_ids.pop()
        self._num_sharing[page_id] = 1
        return page_id

    def share(self, page_id: PageId) -> None:
        """Add a sharer of a page."""
        self._num_sharing[page_id] += 1

    def is_shared(self, page_id: PageId) -> bool:
        """Return whether a page has more than one sharer."""
        return self._num_sharing[page_id] > 1

    def release(self, page_id: PageId) -> None:
        """Remove a sharer of a page; a page without sharers is no longer taken."""
        num_sharing = self._num_sharing[page_id] - 1
        if num_sharing:
            self._num_sharing[page_id] = num_sharing
        else:
            del self._num_sharing[page_id]
            self._free_ids.append(page_id)

    def holding(self) -> Holding | None:
        """Return a holding of all pages; None without pages."""
        if not self.num_pages:
            return None
        page_ids = [*self._free_ids, *self._num_sharing] if self.has_page_ids else None
        assert page_ids is None or len(page_ids) == self.num_pages, "L1: the reserve has lost a page"
        return self._cache.reserved(self.num_pages, page_ids)
