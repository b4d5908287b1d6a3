"""Naive cache of single pages, one request at a time: what is evicted next is found by looking at every page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.core.hints import Hints

__all__ = ["Claims", "NaivePages", "of_page"]

Prefix = tuple[int, ...]
Claims = list[tuple[int, Hints]]
"""Every release of a page since it was computed: when, and the hints of its request."""


def of_page(hints: Hints, page: int, num_pages: int, page_size: int = 1) -> Hints:
    """What hints say of a page: the largest that they say of the first tokens of it and of pages after it.

    Of a token, the first range that has it counts, or else the request.
    """
    claims: list[tuple[int | None, float | None]] = []
    for token in range(page * page_size, num_pages * page_size, page_size):
        of_token = (hints.priority, hints.ttl_ms)
        for each in reversed(hints.retain):
            if each.start <= token and (each.end is None or token < each.end):
                of_token = (each.priority, each.ttl_ms)
        claims.append(of_token)
    if len(claims) == 1:
        ttl_ms = claims[0][1]
    elif any((priority or 0) > 0 and ttl_ms is None for priority, ttl_ms in claims):
        ttl_ms = None
    else:
        ttl_ms = max((ttl_ms for _, ttl_ms in claims if ttl_ms is not None), default=None)
    is_given = any(priority is not None for priority, _ in claims)
    priority = max(priority or 0 for priority, _ in claims) if is_given else None
    return Hints(priority=priority, ttl_ms=ttl_ms, pause_ms=hints.pause_ms, tool=hints.tool)


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
            self.claims[page].append((now_ns, of_page(hints or Hints(), len(page) - 1, len(tokens))))
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
