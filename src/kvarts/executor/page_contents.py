"""The contents of pages: read and written as arrays, for copies that outlive a process, and recorded slot by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["NoPageBytes", "PageBytes", "PageSlots"]


class PageBytes(Protocol):
    """The KV of pages, between steps. Both methods copy."""

    def read_pages(self, page_ids: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """Return everything that the pages hold, as arrays by name; the first axis of each array is the pages."""

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write arrays that `read_pages` returned for the same number of pages."""


class NoPageBytes:
    """The PageBytes of an executor that computes no keys and values."""

    def read_pages(self, page_ids: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """Return nothing."""
        return {}

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Do nothing."""


class PageSlots:
    """Owner of the position of the token that each slot holds; -1 for a slot that was never written."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._positions = np.full((num_pages, page_size), -1, np.int64)
        self._flat = self._positions.reshape(-1)

    def write(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """Record that tokens at `positions` were written to `slots`, of the same shape."""
        self._flat[slots] = positions

    def copy_page(self, source: int, target: int) -> None:
        """Record that a page was copied."""
        self._positions[target] = self._positions[source]

    def restore(self, page_ids: Sequence[int], positions: npt.NDArray[np.int64]) -> None:
        """Record that pages were written whole. `positions` [pages, page_size]."""
        self._positions[list(page_ids)] = positions

    def positions(self, page_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the positions of the tokens in pages, of shape [pages, page_size]."""
        found: npt.NDArray[np.int64] = self._positions[list(page_ids)]
        return found
