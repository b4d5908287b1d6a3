"""Rows of a plan and of its result, for executors of real models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.core.kv.pool import PageId

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PageTable

__all__ = ["DecodeRows", "DraftRows", "PageScores", "Snapshot"]


class DecodeRows(msgspec.Struct, frozen=True, gc=False):
    """The decodes of a step, row by row; all arrays have shape [num_decodes].

    `positions` and `tokens`: the position and the id of each computed token. `new_blocks`: (row, page, its block in
    each page table) for every page that a decode got in this step, pages of drafted tokens last; an entry for a page
    that was named before replaces its blocks. `new_tables`: (row, all page tables) for every decode that brings its own
    pages and got or dropped one.
    """

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint64]
    new_blocks: tuple[tuple[int, int, tuple[PageId, ...]], ...] = ()
    new_tables: tuple[tuple[int, tuple[PageTable, ...]], ...] = ()


class DraftRows(msgspec.Struct, frozen=True, gc=False):
    """The drafted tokens of a step; all arrays have shape [drafted tokens], those of a row together, in order.

    `positions`: those after the position of the row's decode. A drafted token is accepted if it equals the token
    sampled after the token before it, and all drafted tokens before it are accepted.
    """

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint64]


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """A copy of the state of the chunk of `row` after `num_tokens` tokens of its sequence, kept in `blocks`.

    A later chunk of the same step may begin from it.
    """

    row: int
    num_tokens: int
    blocks: tuple[PageId, ...]


class PageScores(msgspec.Struct, frozen=True, gc=False):
    """The attention that tokens [start, end) of a row gave to each page of its table, [pages]: weights, summed over
    layers, heads and those of the tokens that are observed.
    """

    row: int
    start: int
    end: int
    scores: npt.NDArray[np.float32]
