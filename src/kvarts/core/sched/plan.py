"""The plan of a step: a frozen value, and the only thing an executor sees.

A plan names *rows*: places in the executor's batch, one for each running request, in [0, max_num_seqs). The fields that
name pages, rows and tokens are filled for executors that need them, and empty in virtual time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvarts.base.records import Value
from kvarts.core.events import Preemption
from kvarts.core.kv.pool import PageId
from kvarts.core.request import Request
from kvarts.core.sched.rows import DecodeRows, DraftRows, PageScores, Snapshot

if TYPE_CHECKING:
    from kvarts.core.kv.groups import PageTable, SinkWindow
    from kvarts.core.kv.transfer import Transfer, TransferReport

__all__ = ["Batch", "Chunk", "DecodeRows", "DraftRows", "PageScores", "Snapshot", "StepPlan", "StepResult", "chunk_of"]


class Chunk(Value):
    """Consecutive known tokens of one sequence, computed in one step, of a prompt or of a recompute.

    Tokens [start, start + num_tokens) are computed; known tokens end at `num_known_tokens`, and the first
    `num_prompt_tokens` of them are the prompt. A chunk that reaches the end of the known tokens samples the next.

    `tokens`: npt.NDArray[np.uint64] of shape [num_tokens], or None. `samples`: whether a token is sampled where known
    tokens end. `keeps`: the tokens that the sequence retains; None for all. `tables`: all page tables of the sequence,
    by GroupMemory.part_tables. `state`: the blocks of the state, for a model with states: the chunk leaves its state
    there, and later decodes do. `begins_from`: the blocks of the state before the chunk: `state`, or those of a
    snapshot; empty before the first token.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "start",
        "num_tokens",
        "num_prompt_tokens",
        "num_known_tokens",
        "row",
        "request_index",
        "tokens",
        "samples",
        "keeps",
        "tables",
        "state",
        "begins_from",
    )
    __slots__ = FIELDS

    def __init__(
        self,
        start: int,
        num_tokens: int,
        num_prompt_tokens: int,
        num_known_tokens: int,
        row: int = -1,
        request_index: int = -1,
        tokens: Any = None,
        samples: bool = True,
        keeps: SinkWindow | None = None,
        tables: tuple[PageTable, ...] = (),
        state: tuple[PageId, ...] = (),
        begins_from: tuple[PageId, ...] = (),
    ) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.num_known_tokens = num_known_tokens
        self.row = row
        self.request_index = request_index
        self.tokens = tokens
        self.samples = samples
        self.keeps = keeps
        self.tables = tables
        self.state = state
        self.begins_from = begins_from

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


class Batch(Value):
    """The work of a step, as a cost model sees it.

    `num_decodes` sequences compute one token each; together they know `decode_known_tokens` tokens, including these.
    `pool_tokens`: the capacity of the KV pool, in tokens. `num_drafted`: additional tokens that may follow those of the
    decodes; only plans for real models have any.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ("chunks", "num_decodes", "decode_known_tokens", "pool_tokens", "num_drafted")
    __slots__ = FIELDS

    def __init__(
        self,
        chunks: tuple[Chunk, ...],
        num_decodes: int,
        decode_known_tokens: int,
        pool_tokens: int,
        num_drafted: int = 0,
    ) -> None:
        self.chunks = chunks
        self.num_decodes = num_decodes
        self.decode_known_tokens = decode_known_tokens
        self.pool_tokens = pool_tokens
        self.num_drafted = num_drafted

    def as_seen(self) -> Batch:
        """Return the batch as a cost model should see it, with each chunk as by Chunk.as_seen."""
        chunks = tuple([chunk.as_seen() for chunk in self.chunks])
        return Batch(chunks, self.num_decodes, self.decode_known_tokens, self.pool_tokens)

    @property
    def num_tokens(self) -> int:
        """The number of tokens computed in the step."""
        num_tokens = self.num_decodes + self.num_drafted
        for chunk in self.chunks:
            num_tokens += chunk.num_tokens
        return num_tokens


class StepPlan(Value):
    """One step. `admitted`: request indices, in order. `preemptions`: in order.

    `transfers`: to begin with this step; the pages they read are complete before it, and the pages they write are not
    read before the transfers are reported. `page_copies`: (from, to) of pages to copy before anything is written.
    `drafts`: tokens that may follow those of the decodes; None without any. `snapshots`: snapshots of states to make
    during the step.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "step",
        "batch",
        "admitted",
        "preemptions",
        "decodes",
        "transfers",
        "page_copies",
        "drafts",
        "snapshots",
    )
    __slots__ = FIELDS

    def __init__(
        self,
        step: int,
        batch: Batch,
        admitted: tuple[int, ...] = (),
        preemptions: tuple[Preemption, ...] = (),
        decodes: DecodeRows | None = None,
        transfers: tuple[Transfer, ...] = (),
        page_copies: tuple[tuple[PageId, PageId], ...] = (),
        drafts: DraftRows | None = None,
        snapshots: tuple[Snapshot, ...] = (),
    ) -> None:
        self.step = step
        self.batch = batch
        self.admitted = admitted
        self.preemptions = preemptions
        self.decodes = decodes
        self.transfers = transfers
        self.page_copies = page_copies
        self.drafts = drafts
        self.snapshots = snapshots


class StepResult(Value):
    """The result of a step. `duration_ns`: its duration.

    `tokens`: shape [max_num_seqs], the id sampled for each row that sampled one; None in virtual time. `stopped_rows`:
    rows with a token that ended its sequence. `transfer_reports`: transfers that ended since the last step. `accepted`:
    (row, number of accepted drafted tokens) for every row with any; the row's token in `tokens` follows these.
    `attended`: for every row with tokens whose attention is scored.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "duration_ns",
        "tokens",
        "stopped_rows",
        "transfer_reports",
        "accepted",
        "attended",
    )
    __slots__ = FIELDS

    def __init__(
        self,
        duration_ns: int,
        tokens: npt.NDArray[np.uint64] | None = None,
        stopped_rows: tuple[int, ...] = (),
        transfer_reports: tuple[TransferReport, ...] = (),
        accepted: tuple[tuple[int, int], ...] = (),
        attended: tuple[PageScores, ...] = (),
    ) -> None:
        self.duration_ns = duration_ns
        self.tokens = tokens
        self.stopped_rows = stopped_rows
        self.transfer_reports = transfer_reports
        self.accepted = accepted
        self.attended = attended


def chunk_of(request: Request, start: int, num_tokens: int, num_known: int) -> Chunk:
    """Return a chunk as a cost model should see it."""
    if request.own is None and not request.computes_only:
        return Chunk(start, num_tokens, request.num_prompt_tokens, num_known)
    keeps = None if request.own is None else request.own.keeps
    samples = not request.computes_only
    return Chunk(start, num_tokens, request.num_prompt_tokens, num_known, samples=samples, keeps=keeps).as_seen()
