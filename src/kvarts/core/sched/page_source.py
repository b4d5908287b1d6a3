"""The source of a scheduler's pages and tokens: a separate pool, or a part of a device that models share."""

from __future__ import annotations

from typing import Protocol

from kvarts.core.kv.cache import Cache, Pins
from kvarts.core.request import Request

__all__ = ["OnePool", "PageSource"]


class PageSource(Protocol):
    """Pages and tokens for a scheduler.

    Promises: the values change only between steps, or when the scheduler itself takes and releases pages.
    """

    token_budget: int
    """Tokens that the next step may compute."""

    is_draining: bool
    """Whether admission is suspended."""

    is_alone: bool
    """Whether no other model takes from the same memory, now and later.

    Then all free pages are free to admit, none are withheld, admission is never suspended, and `num_most` and
    `token_budget` are constant.
    """

    @property
    def num_most(self) -> int:
        """The number of pages that one request is certain to get if it waits long enough."""

    @property
    def num_withheld(self) -> int:
        """Pages that are not used here and cannot be taken, because other models use or claim them."""

    def num_free_to_admit(self, num_pages: int) -> int:
        """Return how many pages are free for a request that is to be admitted with `num_pages` pages."""

    def num_lent(self) -> int:
        """Return how many pages `reclaim_lent` can free."""

    def reclaim_lent(self, num_pages: int, num_matched: int = 0) -> bool:
        """Free `num_pages` pages that only stores to a tier below hold; return False if there are not so many.

        `num_matched`: those of them that the request itself is going to hold.
        """

    def preempt_for(self, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Request pages from other models until `num_pages` can be taken for `request`; return whether they can."""


class OnePool:
    """A PageSource of all pages of one pool, and `token_budget` tokens in every step.

    `pins`: pages that are kept in use for later, and are unpinned when running or waiting requests need them.
    """

    __slots__ = ("_cache", "is_alone", "is_draining", "num_most", "num_withheld", "pins", "token_budget")

    def __init__(self, cache: Cache, *, token_budget: int, pins: Pins | None = None) -> None:
        self._cache = cache
        self.num_most: int = cache.pool.total
        self.num_withheld = 0
        self.token_budget = token_budget
        self.is_draining = False
        self.is_alone = True
        self.pins = pins

    def num_free_to_admit(self, num_pages: int) -> int:
        """Return the number of free pages."""
        return self._cache.num_free

    def num_lent(self) -> int:
        """Return the idle pages that stores hold."""
        return self._cache.lender.num_lent()

    def reclaim_lent(self, num_pages: int, num_matched: int = 0) -> bool:
        """Give up stores for `num_pages` pages, if that is enough."""
        if num_pages + num_matched > self._cache.lender.num_lent():
            return False
        self._cache.lender.return_lent(num_pages)
        return True

    def preempt_for(self, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Unpin pages until `num_pages` can be taken; return whether they can."""
        return self.pins is not None and self.pins.num_pins > 0 and self.pins.give_up(num_pages)
