"""The contents of each slot of KV memory, recorded at each write, for checks that do not trust page tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PageSlots"]


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
