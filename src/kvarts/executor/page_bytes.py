"""What pages hold, read and written as arrays: for copies that outlive a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

__all__ = ["NoPageBytes", "PageBytes"]


class PageBytes(Protocol):
    """The KV of pages, between steps. What is read is a copy, and what is written is copied."""

    def read_pages(self, page_ids: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """Return all that pages hold, by names; the first axis of each array is the pages."""

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write what `read_pages` returned, of as many pages."""


class NoPageBytes:
    """The PageBytes of an executor that computes no keys and values."""

    def read_pages(self, page_ids: Sequence[int]) -> Mapping[str, npt.NDArray[Any]]:
        """Return nothing."""
        return {}

    def write_pages(self, page_ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Do nothing."""
