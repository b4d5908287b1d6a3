"""Explanations on the page of a run: the sources of prompt tokens, and the stories of the longest waits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvarts.explain.hits import hit_ledger
from kvarts.explain.reading import Journal
from kvarts.explain.story import story_of_request
from kvarts.explain.sums import longest_waits
from kvarts.journal import RemovedLine

__all__ = ["Overview", "TokenKind", "Wait", "overview_of"]

NUM_WAITS = 10
NUM_STRETCHES = 200
MAX_STORY_LINES = 400


class TokenKind(msgspec.Struct, frozen=True):
    """Prompt tokens of one kind of the hit ledger. `remark`: an additional text; may be empty."""

    kind: str
    tokens: int
    remark: str


class Wait(msgspec.Struct, frozen=True):
    """The wait of a request for admission, its cause, and its story. `num_others` waited with it for the same cause."""

    request: str
    waited_ms: float
    cause: str
    num_others: int
    lines: list[str]


class Overview(msgspec.Struct, frozen=True):
    """Overview of all replicas of a run together. `waits`: the longest waits, the longest first.

    `evictions`: for equal stretches of time, the end of each in ms and the pages evicted in it; with KV groups, the
    blocks. `notes`: remarks on journals that break off.
    """

    prompt_tokens: int
    kinds: list[TokenKind]
    waits: list[Wait]
    evictions: list[tuple[float, int]]
    notes: list[str]


def overview_of(journals: Sequence[Journal]) -> Overview:
    """Return the overview of `journals`; at least one is required."""
    ledgers = [hit_ledger(journal) for journal in journals]
    kinds = []
    for kind in ledgers[0].tokens:
        tokens = sum(ledger.tokens.get(kind, 0) for ledger in ledgers)
        gone_for = [ledger.gone_for for ledger in ledgers if ledger.gone_for]
        remark = gone_for[0] if kind == "evicted" and len(gone_for) == 1 else ""
        if tokens or kind not in ("recomputed", "not_computed"):
            kinds.append(TokenKind(kind, tokens, remark))
    return Overview(
        sum(ledger.prompt_tokens for ledger in ledgers),
        kinds,
        _waits(journals),
        _evictions(journals),
        sorted({journal.note for journal in journals if journal.note is not None}),
    )


def _waits(journals: Sequence[Journal]) -> list[Wait]:
    waits = [(wait, journal) for journal in journals for wait in longest_waits(journal, NUM_WAITS)]
    waits.sort(key=lambda found: -found[0].waited_ms)
    out = []
    for wait, journal in waits[:NUM_WAITS]:
        lines = story_of_request(journal, wait.request)
        if len(lines) > MAX_STORY_LINES:
            lines = [*lines[:MAX_STORY_LINES], f"and {len(lines) - MAX_STORY_LINES:,} lines more: kvarts story"]
        out.append(Wait(wait.request, wait.waited_ms, wait.cause, wait.num_others, lines))
    return out


def _evictions(journals: Sequence[Journal]) -> list[tuple[float, int]]:
    removed = [
        (line.t_ms, (line.end_page - line.start_page) * _num_blocks(journal, line.group))
        for journal in journals
        for line in journal.lines
        if isinstance(line, RemovedLine) and not line.is_copy and not line.is_dropped
    ]
    end_ms = max((line.t_ms for journal in journals for line in journal.lines[-1:]), default=0.0)
    if not removed or end_ms <= 0:
        return []
    at = np.minimum(np.array([t_ms for t_ms, _ in removed]) / end_ms * NUM_STRETCHES, NUM_STRETCHES - 1).astype(
        np.int64
    )
    pages = np.bincount(at, weights=[count for _, count in removed], minlength=NUM_STRETCHES)
    return [(end_ms * (index + 1) / NUM_STRETCHES, int(count)) for index, count in enumerate(pages.tolist())]


def _num_blocks(journal: Journal, group: int | None) -> int:
    return 1 if group is None else journal.groups[group].part_blocks
