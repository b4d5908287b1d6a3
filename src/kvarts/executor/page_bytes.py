"""The contents of pages, read and written as arrays, for copies that outlive a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

__all__ = ["NoPageBytes", "PageBytes"]


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
