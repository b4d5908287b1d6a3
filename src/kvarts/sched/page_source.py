"""Where a scheduler's pages and tokens come from: a pool of its own, or a part of a device that models share."""

from __future__ import annotations

from typing import Protocol

from kvarts.kv.cache import PageCache
from kvarts.request import Request

__all__ = ["OnePool", "PageSource"]


class PageSource(Protocol):
    """Promises: the answers change only between steps, or by what the scheduler itself takes and gives back."""

    token_budget: int
    """Tokens that the next step may compute."""

    is_draining: bool
    """Whether no request is admitted for now."""

    @property
    def num_most(self) -> int:
        """Pages that one request can be sure to get, in time."""

    @property
    def num_withheld(self) -> int:
        """Pages that are not used here and cannot be taken, since other models use or claim them."""

    def num_free_to_admit(self, num_pages: int) -> int:
        """Return how many pages a request that is admitted with `num_pages` of them can take now."""

    def make_way(self, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Ask others for pages until `num_pages` can be taken for `request`; whether they can."""


class OnePool:
    """All pages of one pool, and `token_budget` tokens in every step."""

    __slots__ = ("_cache", "is_draining", "num_most", "num_withheld", "token_budget")

    def __init__(self, cache: PageCache, *, token_budget: int) -> None:
        self._cache = cache
        self.num_most: int = cache.pool.total
        self.num_withheld = 0
        self.token_budget = token_budget
        self.is_draining = False

    def num_free_to_admit(self, num_pages: int) -> int:
        """Return how many pages are free."""
        return self._cache.num_free

    def make_way(self, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Return False: there are no others."""
        return False
