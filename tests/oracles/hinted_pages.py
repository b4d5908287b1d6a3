"""Naive cache of single pages, one request at a time: what is evicted next is found by looking at every page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.hints import Hints

__all__ = ["Claims", "NaivePages"]

Prefix = tuple[int, ...]
Claims = list[tuple[int, Hints]]
"""Every release of a page since it was computed: when, and the hints of its request."""


class NaivePages:
    """Pages of one token, by the tokens up to their end. `rank` is that of a page by its claims at a time."""

    def __init__(self, num_pages: int, rank: Callable[[Claims, int], tuple[float, ...]]) -> None:
        self.num_pages = num_pages
        self.rank = rank
        self.claims: dict[Prefix, Claims] = {}
        """In the order in which pages were computed."""
        self.released_at: dict[Prefix, int] = {}
        self.num_requests = 0

    def serve(self, tokens: Sequence[int], hints: Hints | None, now_ns: int) -> tuple[int, list[Prefix]]:
        """Return how many pages are found, and those that are evicted, in their order."""
        pages = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
        found = next((end for end, page in enumerate(pages) if page not in self.claims), len(pages))
        held = set(pages)
        evicted = []
        for page in pages[found:]:
            if len(self.claims) == self.num_pages:
                evicted.append(self.evict(held, now_ns))
            self.claims[page] = []
        self.num_requests += 1
        for page in pages:
            self.claims[page].append((now_ns, hints or Hints()))
            self.released_at[page] = self.num_requests
        return found, evicted

    def evict(self, held: set[Prefix], now_ns: int) -> Prefix:
        """Drop the page of the lowest rank, or else the last that follows it, and that; LRU, the deepest first."""
        free = [page for page in self.claims if page not in held]
        page = min(free, key=lambda page: (self.rank(self.claims[page], now_ns), self.released_at[page], -len(page)))
        while followers := [other for other in self.claims if len(other) == len(page) + 1 and other[:-1] == page]:
            page = followers[-1]
        del self.claims[page]
        return page
