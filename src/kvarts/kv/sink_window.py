"""The tokens that a bounded sequence retains, and the pages that it brings along for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kvarts.kv.pool import PageId

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["OwnPages", "PageTable", "SinkWindow"]


class SinkWindow(msgspec.Struct, frozen=True):
    """The first `sink` and the last `window` tokens of a sequence.

    The token at position p attends to itself, and to positions q < p with q < sink or q >= p - window. `rotates_late`:
    positions are places among the retained tokens, so keys are stored before rotation.
    """

    sink: int
    window: int
    rotates_late: bool = False

    @property
    def is_scored(self) -> bool:
        """Whether the pages that stay are chosen by the attention that they receive."""
        return False

    @property
    def most_seen(self) -> int:
        """The number of tokens before its own that a token of a long sequence sees."""
        return self.sink + self.window

    def observed(self, start: int, end: int) -> range:
        """Return the positions of [start, end) whose attention is scored, to decide which pages stay: none."""
        return range(0)

    def first_seen(self, position: int) -> int:
        """Return the first position after the sink that the token at `position` attends to."""
        return max(0, position - self.window)

    def sink_seen(self, position: int) -> int:
        """Return the number of tokens of the sink that are kept for the token at `position` and later ones."""
        return self.sink

    def sees(self, positions: Any, num_tokens: int) -> Any:
        """Return, elementwise, whether a token after the first `num_tokens` can see `positions` of held pages."""
        return (positions < self.sink_seen(num_tokens)) | (positions >= self.first_seen(num_tokens))

    def num_retained(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens a later token can see."""
        return min(num_tokens, self.sink + self.window)

    def num_sink_pages(self, page_size: int) -> int:
        """Return the pages that hold the sink."""
        return -(-self.sink // page_size)

    def most_pages(self, page_size: int) -> int:
        """Return the most pages that a sequence holds between steps: ceil(sink/page) + ceil(window/page) + 1."""
        return self.num_sink_pages(page_size) + -(-self.window // page_size) + 1

    def num_dropped(self, position: int, page_size: int) -> int:
        """Return how many pages after those of the sink no token at `position` or later can see."""
        return max(0, self.first_seen(position) // page_size - self.num_sink_pages(page_size))

    def places(self, page_size: int) -> set[int]:
        """Return the places in a page at which a token no longer needs a page that the token before it needed."""
        return {self.window % page_size}


class PageTable(msgspec.Struct, frozen=True, gc=False):
    """A page table of a sequence: its pages in order of position, with 0 for a page that is not held.

    `num_dropped`: pages that are not in `page_ids`, after the first `num_sink_pages`. `keeps`: the tokens that layers
    with this table see from here on; None for all.
    """

    page_ids: tuple[PageId, ...]
    num_dropped: int = 0
    num_sink_pages: int = 0
    keeps: SinkWindow | None = None


class OwnPages(Protocol):
    """Pages that a request brings along, and that stay when it ends. They are in use for as long as they exist.

    Promises: the pages that `grow` needs are available, for as many tokens as `most_tokens` returns. Only these calls
    change its pages. A page table leaves out the pages that were dropped, which are the first after those of the sink.
    """

    keeps: SinkWindow

    @property
    def page_ids(self) -> Sequence[PageId]:
        """The remaining pages, in order of position; empty where pages are only counted."""

    @property
    def places(self) -> Iterable[int]:
        """The places in a page at which a token no longer needs a page that the token before it needed."""

    @property
    def page_tables(self) -> tuple[PageTable, ...]:
        """The page tables, one for each block of a page; empty where pages are only counted."""

    def settle(self, position: int) -> bool:
        """Drop pages that no token at `position` or later can see; return whether there were any."""

    def most_tokens(self, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens from `start` on may be computed in this step: at least one."""

    def grow(self, start: int, end: int) -> bool:
        """Make tokens [start, end) writable; all before are computed. Return whether that took a page."""

    def observe(self, start: int, end: int, scores: npt.NDArray[np.float32]) -> None:
        """Add the attention that tokens [start, end) of a step gave to each of the pages, by `keeps.observed`."""

    def take_copies(self) -> Sequence[tuple[PageId, PageId]]:
        """Return the pairs of pages to copy, from one to the other, before these pages are written; once."""
