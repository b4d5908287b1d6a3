"""The rows of a live batch: the request in each row, and the tokens sampled for it.

A step of 256 decodes changes every row. State that changes in every row is kept in arrays over rows and written at
once; a request is touched only when it enters, fills a page or leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvarts.core.content import UNIT_BYTES
from kvarts.core.kv.pool import PageId
from kvarts.core.request import Request
from kvarts.core.sched.plan import Chunk, DecodeRows, Snapshot, StepResult

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PageTable

__all__ = ["MOST_LATE", "InputBatch", "NewPage"]

MOST_LATE: Final = 112
"""The most steps for which an engine without readers of its pages leaves pages that decodes fill unpublished."""

NewPage = tuple[int, int, tuple[PageId, ...]]
"""A row, a page of its sequence, and its block in each page table."""


class InputBatch:
    """Owner of each request's `row`, and of sampled tokens until they enter the request's content.

    `most_late`: for how many steps tokens that fill a page are kept here in addition.
    """

    __slots__ = (
        "_bases",
        "_decoding",
        "_free_rows",
        "_page_size",
        "_rows",
        "_sampled",
        "_sampled_steps",
        "most_late",
        "requests",
    )

    def __init__(self, max_num_seqs: int, page_size: int, *, most_late: int = 0) -> None:
        self.requests: list[Request | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs))
        heapify(self._free_rows)
        self._bases = np.zeros(max_num_seqs, np.int64)
        self._decoding = np.zeros(max_num_seqs, np.bool_)
        self._rows: npt.NDArray[np.int64] | None = None
        self._page_size = page_size
        self.most_late = most_late
        # A ring of the last steps' tokens: they are appended to the content when they fill a page, or so much later.
        self._sampled_steps = page_size + 1 + most_late
        self._sampled = np.zeros((self._sampled_steps, max_num_seqs), np.uint64)

    def enter(self, request: Request) -> None:
        """Give `request` the lowest free row."""
        request.row = heappop(self._free_rows)
        self.requests[request.row] = request

    def leave(self, request: Request) -> None:
        """Free the row of `request`."""
        row = request.row
        self.requests[row] = None
        heappush(self._free_rows, row)
        if self._decoding[row]:
            self._decoding[row] = False
            self._rows = None
        request.row = -1

    def chunk(self, request: Request, start: int, num_tokens: int, num_known: int) -> Chunk:
        """Return a chunk of `request` that names its row, tokens and page tables."""
        own = request.own
        return Chunk(
            start,
            num_tokens,
            request.num_prompt_tokens,
            num_known,
            row=request.row,
            request_index=request.index,
            tokens=np.frombuffer(request.content.tokens(start, start + num_tokens).tobytes(), np.uint64),
            samples=not request.computes_only,
            keeps=None if own is None else own.keeps,
            tables=self._page_tables(request, start + num_tokens) if own is None else own.page_tables,
        )

    def start_decoding(self, request: Request) -> None:
        """Let `request` compute one token per step from the next step on."""
        self._bases[request.row] = request.wheel_base
        self._decoding[request.row] = True
        self._rows = None

    def stop_decoding(self, request: Request) -> None:
        """Let `request` compute nothing until it starts again; all its sampled tokens are in its content."""
        self._decoding[request.row] = False
        self._rows = None

    def skip(self, request: Request, tokens: npt.NDArray[np.uint64]) -> None:
        """Append accepted tokens of `request`; all before them are known, and its base has advanced by their number."""
        request.content.append(tokens.tobytes())
        self._bases[request.row] = request.wheel_base

    def keep(self, step: int, result: StepResult) -> None:
        """Keep the tokens that `step` sampled."""
        assert result.tokens is not None, "an executor of pages answers with tokens"
        self._sampled[step % self._sampled_steps] = result.tokens

    def append_sampled(self, request: Request, num_known: int, step: int) -> None:
        """Append the tokens sampled before `step` to the content, so that `num_known` tokens are known."""
        self.append_all_sampled([request], [num_known], step)

    def append_all_sampled(self, requests: Sequence[Request], nums_known: Sequence[int], step: int) -> None:
        """Do the same as `append_sampled` for several requests, at about the cost of one."""
        counts = [known - request.content.num_known_tokens for request, known in zip(requests, nums_known, strict=True)]
        most = max(counts, default=0)
        if most == 0:
            return
        assert most <= self._sampled_steps
        steps = np.arange(step - most, step) % self._sampled_steps
        rows = [request.row for request in requests]
        sampled = self._sampled[steps, np.array(rows)[:, None]].tobytes()
        end = 0
        for request, count in zip(requests, counts, strict=True):
            end += most * UNIT_BYTES
            if count:
                request.content.append(sampled[end - count * UNIT_BYTES : end])

    def decodes(
        self, step: int, with_new_page: Iterable[Request], with_new_table: Iterable[Request] = ()
    ) -> DecodeRows:
        """Return the decodes of `step`, each of which sampled a token in the step before.

        `with_new_page`: the requests that got a page for this step. `with_new_table`: those that bring their own pages,
        where these changed.
        """
        rows = self._rows
        if rows is None:
            rows = self._rows = np.flatnonzero(self._decoding)
            rows.flags.writeable = False
        return DecodeRows(
            rows=rows,
            positions=self._bases[rows] + step,
            tokens=self._sampled[(step - 1) % self._sampled_steps][rows],
            new_blocks=self._new_pages(with_new_page, step),
            new_tables=tuple(
                (request.row, own.page_tables) for request in with_new_table if (own := request.own) is not None
            ),
        )

    def _new_pages(self, requests: Iterable[Request], step: int) -> tuple[NewPage, ...]:
        """Return the entries of a plan for the pages that requests got for `step`: their last ones."""
        new_pages: list[NewPage] = []
        for request in requests:
            table = request.table
            assert table is not None and table.page_ids is not None
            page = (request.wheel_base + step) // self._page_size
            new_pages.append((request.row, page, (table.page_ids[page],)))
        return tuple(new_pages)

    def new_page(self, request: Request, page: int) -> NewPage:
        """Return the entry of a plan for a page that `request` got: its row, the page, and its block in each table."""
        return request.row, page, self._blocks_of(request, page)

    def _page_tables(self, request: Request, end: int) -> tuple[PageTable, ...]:
        """Return the page tables of the first `end` tokens of a request that does not bring its own pages."""
        from kvarts.core.kv.groups import PageTable  # only an executor of tokens has tables

        table = request.table
        assert table is not None and table.page_ids is not None
        return (PageTable(tuple(table.page_ids)),)

    def _blocks_of(self, request: Request, page: int) -> tuple[PageId, ...]:
        """Return the block of a page in each page table."""
        table = request.table
        assert table is not None and table.page_ids is not None
        return (table.page_ids[page],)

    def take_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the snapshots of states to make in the step: none, since every layer keeps its tokens."""
        return ()
