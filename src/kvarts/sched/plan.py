"""The plan of a step: a frozen value, and the only thing an executor sees.

A plan names *rows*: places in the executor's batch, one for each running request, in [0, max_num_seqs). The fields that
name pages, rows and tokens are filled for executors that need them, and empty in virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.events import Preemption
from kvarts.kv.groups import PageTable, SinkWindow
from kvarts.kv.pool import PageId
from kvarts.kv.transfer import Transfer, TransferReport

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Batch", "Chunk", "DecodeRows", "DraftRows", "PageScores", "Snapshot", "StepPlan", "StepResult"]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Consecutive known tokens of one sequence, computed in one step, of a prompt or of a recompute.

    Tokens [start, start + num_tokens) are computed; known tokens end at `num_known_tokens`, and the first
    `num_prompt_tokens` of them are the prompt. A chunk that reaches the end of the known tokens samples the next.
    """

    start: int
    num_tokens: int
    num_prompt_tokens: int
    num_known_tokens: int
    row: int = -1
    request_index: int = -1
    tokens: Any = None
    """npt.NDArray[np.uint64] of shape [num_tokens], or None."""
    samples: bool = True
    """Whether a token is sampled where known tokens end."""
    keeps: SinkWindow | None = None
    """The tokens that the sequence retains; None for all."""
    tables: tuple[PageTable, ...] = ()
    """All page tables of the sequence: one for each block of a page."""
    state: tuple[PageId, ...] = ()
    """The blocks of the state, for a model with states: the chunk leaves its state there, and later decodes do."""
    begins_from: tuple[PageId, ...] = ()
    """The blocks of the state before the chunk: `state`, or those of a snapshot; empty before the first token."""

    @property
    def end(self) -> int:
        """The position after the last computed token."""
        return self.start + self.num_tokens

    def as_seen(self) -> Chunk:
        """Return the chunk as a cost model should see it: as if the sequence had only the tokens that it retains."""
        if self.keeps is None:
            return self
        shift = max(0, self.start - self.keeps.most_seen)
        return Chunk(
            self.start - shift,
            self.num_tokens,
            self.num_prompt_tokens - shift,
            self.num_known_tokens - shift,
            samples=self.samples,
        )

    @property
    def is_last(self) -> bool:
        """Whether a token is sampled after this chunk."""
        return self.samples and self.start + self.num_tokens == self.num_known_tokens


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The work of a step, as a cost model sees it.

    `num_decodes` sequences compute one token each; together they know `decode_known_tokens` tokens, including these.
    `pool_tokens`: the capacity of the KV pool, in tokens. `num_drafted`: additional tokens that may follow those of the
    decodes; only plans for real models have any.
    """

    chunks: tuple[Chunk, ...]
    num_decodes: int
    decode_known_tokens: int
    pool_tokens: int
    num_drafted: int = 0

    def as_seen(self) -> Batch:
        """Return the batch as a cost model should see it, with each chunk as by Chunk.as_seen."""
        chunks = tuple(chunk.as_seen() for chunk in self.chunks)
        return Batch(chunks, self.num_decodes, self.decode_known_tokens, self.pool_tokens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens computed in the step."""
        return sum(chunk.num_tokens for chunk in self.chunks) + self.num_decodes + self.num_drafted


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


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """One step. `admitted`: request indices, in order. `preemptions`: in order.

    `left_rows`: rows vacated by requests that finished, were cancelled or were preempted since the last plan.
    `transfers`: to begin with this step; the pages they read are complete before it, and the pages they write are not
    read before the transfers are reported. `page_copies`: (from, to) of pages to copy before anything is written.
    `drafts`: tokens that may follow those of the decodes; None without any. `snapshots`: snapshots of states to make
    during the step. `num_joined`: the decodes that were not decodes in the step before: another engine has computed
    their prompts, or they were stalled.
    """

    step: int
    batch: Batch
    admitted: tuple[int, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    decodes: DecodeRows | None = None
    left_rows: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    page_copies: tuple[tuple[PageId, PageId], ...] = ()
    drafts: DraftRows | None = None
    snapshots: tuple[Snapshot, ...] = ()
    num_joined: int = 0


class PageScores(msgspec.Struct, frozen=True, gc=False):
    """The attention that tokens [start, end) of a row gave to each page of its table, [pages]: weights, summed over
    layers, heads and those of the tokens that are observed.
    """

    row: int
    start: int
    end: int
    scores: npt.NDArray[np.float32]


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a step. `duration_ns`: its duration.

    `tokens`: shape [max_num_seqs], the id sampled for each row that sampled one; None in virtual time. `stopped_rows`:
    rows with a token that ended its sequence. `transfer_reports`: transfers that ended since the last step. `accepted`:
    (row, number of accepted drafted tokens) for every row with any; the row's token in `tokens` follows these.
    `attended`: for every row with tokens whose attention is scored.
    """

    duration_ns: int
    tokens: npt.NDArray[np.uint64] | None = None
    stopped_rows: tuple[int, ...] = ()
    transfer_reports: tuple[TransferReport, ...] = ()
    accepted: tuple[tuple[int, int], ...] = ()
    attended: tuple[PageScores, ...] = ()
