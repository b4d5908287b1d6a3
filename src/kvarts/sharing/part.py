"""The part of a shared device that one model's scheduler takes its pages and tokens from."""

from __future__ import annotations

from typing import Protocol

from kvarts.request import Request
from kvarts.sharing.cache import SharedCache

__all__ = ["DevicePages"]


class MakesWay(Protocol):
    """The device, as far as a part of it asks others for pages."""

    def make_way(self, model: str, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Ask other models for pages until `num_pages` can be taken for `request` of `model`; whether they can."""


class DevicePages:
    """A PageSource: pages of memory that other models use as well, and a share of the device's tokens.

    Written by the device (`is_draining`) and by the turns (`token_budget`).
    """

    __slots__ = ("_cache", "_device", "is_draining", "token_budget")

    def __init__(self, cache: SharedCache, device: MakesWay, *, token_budget: int) -> None:
        self._cache = cache
        self._device = device
        self.token_budget = token_budget
        self.is_draining = False

    @property
    def num_most(self) -> int:
        """Pages that are left if all other models use what is guaranteed to them."""
        return self._cache.num_most

    @property
    def num_withheld(self) -> int:
        """Pages that are not used here and cannot be taken, since other models use or claim them."""
        return self._cache.pool.total - self._cache.num_used - self._cache.num_free

    def num_free_to_admit(self, num_pages: int) -> int:
        """Return how many pages are free and not claimed by a model before this one."""
        return self._cache.num_free_to_admit(num_pages)

    def make_way(self, request: Request, num_pages: int, *, to_admit: bool) -> bool:
        """Ask other models for pages until `num_pages` can be taken for `request`; whether they can."""
        return self._device.make_way(self._cache.name, request, num_pages, to_admit=to_admit)
