"""What a page about a run shows of why: where prompt tokens came from, and the stories of the longest waits."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvarts.explain.hits import hit_ledger
from kvarts.explain.reading import Journal
from kvarts.explain.story import longest_waits, story_of_request

__all__ = ["Overview", "TokenKind", "Wait", "overview_of"]

NUM_WAITS = 10
MAX_STORY_LINES = 400


class TokenKind(msgspec.Struct, frozen=True):
    """Prompt tokens of one kind of the hit ledger. `remark`: what else is to be said of them; empty for nothing."""

    kind: str
    tokens: int
    remark: str


class Wait(msgspec.Struct, frozen=True):
    """How long a request waited to be admitted, and its story."""

    request: str
    waited_ms: float
    lines: list[str]


class Overview(msgspec.Struct, frozen=True):
    """Of all replicas of a run together. `waits`: the longest, the longest first."""

    prompt_tokens: int
    kinds: list[TokenKind]
    waits: list[Wait]


def overview_of(journals: Sequence[Journal]) -> Overview:
    """Return the overview of what `journals` tell, at least one."""
    ledgers = [hit_ledger(journal) for journal in journals]
    kinds = []
    for kind in ledgers[0].tokens:
        tokens = sum(ledger.tokens.get(kind, 0) for ledger in ledgers)
        gone_for = [ledger.gone_for for ledger in ledgers if ledger.gone_for]
        remark = gone_for[0] if kind == "evicted" and len(gone_for) == 1 else ""
        if tokens or kind not in ("recomputed", "not_computed"):
            kinds.append(TokenKind(kind, tokens, remark))
    return Overview(sum(ledger.prompt_tokens for ledger in ledgers), kinds, _waits(journals))


def _waits(journals: Sequence[Journal]) -> list[Wait]:
    waits = [(ms, name, journal) for journal in journals for name, ms in longest_waits(journal, NUM_WAITS)]
    waits.sort(key=lambda wait: -wait[0])
    out = []
    for ms, name, journal in waits[:NUM_WAITS]:
        lines = story_of_request(journal, name)
        if len(lines) > MAX_STORY_LINES:
            lines = [*lines[:MAX_STORY_LINES], f"and {len(lines) - MAX_STORY_LINES:,} lines more: kvarts story"]
        out.append(Wait(name, ms, lines))
    return out
