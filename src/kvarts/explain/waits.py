"""The longest waits for a first admission, with their causes. Requests that waited together are listed once."""

from __future__ import annotations

import msgspec
import numpy as np

from kvarts.columns import Column
from kvarts.explain.reading import Journal
from kvarts.journal import AdmittedLine, BlockedLine
from kvarts.units import as_percent

__all__ = ["Blockers", "Waited", "longest_waits"]

MOST_CANDIDATES = 20_000
SHORTEST_MS = 1.0
TOGETHER = 0.5
"""Least share of a wait that overlaps another for both to be one entry, if their cause is the same."""
CAUSES = {
    "pages": "too few free KV pages",
    "token_budget": "the token budget of the steps",
    "sequence_cap": "the cap on running sequences",
    "turn": "its turn: nothing held up the queue",
}


class Waited(msgspec.Struct, frozen=True):
    """A request that waited, the main cause, and the number of others that waited with it for the same cause."""

    request: str
    waited_ms: float
    cause: str
    num_others: int


class _Wait(msgspec.Struct):
    request: int
    begin_ms: float
    end_ms: float
    reason: str
    share: float
    num_others: int = 0


def longest_waits(journal: Journal, count: int) -> list[Waited]:
    """Return up to `count` waits, the longest first, no two of them together for the same cause."""
    begins: dict[int, float] = {}
    waits: list[tuple[float, int, float, float]] = []
    for line in journal.lines:
        if isinstance(line, AdmittedLine) and line.request not in begins:
            begin = begins[line.request] = journal.arrivals[line.request].t_ms
            waits.append((begin - line.t_ms, line.request, begin, line.t_ms))
    blocked = Blockers(journal)
    found: list[_Wait] = []
    for _, request, begin, end in sorted(waits)[:MOST_CANDIDATES]:
        if found and end - begin < SHORTEST_MS:
            break
        near = [wait for wait in found if min(end, wait.end_ms) - max(begin, wait.begin_ms) >= TOGETHER * (end - begin)]
        if len(found) == count and not near:
            continue
        reason, share = blocked.reason(begin, end)
        same = next((wait for wait in near if wait.reason == reason), None)
        if same is not None:
            same.num_others += 1
        elif len(found) < count:
            found.append(_Wait(request, begin, end, reason, share))
    return [
        Waited(
            journal.names[wait.request],
            wait.end_ms - wait.begin_ms,
            CAUSES[wait.reason] + (f" ({as_percent(wait.share)} of the time)" if wait.reason != "turn" else ""),
            wait.num_others,
        )
        for wait in found
    ]


class Blockers:
    """Times when the head of the queue was not admitted, and the reasons."""

    def __init__(self, journal: Journal) -> None:
        begins: dict[str, list[float]] = {reason: [] for reason in CAUSES if reason != "turn"}
        ends: dict[str, list[float]] = {reason: [] for reason in begins}
        head: BlockedLine | None = None
        last_ms = 0.0
        for line in journal.lines:
            last_ms = max(last_ms, line.t_ms)
            if head is not None and (
                isinstance(line, BlockedLine) or (isinstance(line, AdmittedLine) and line.request == head.request)
            ):
                ends[head.reason].append(line.t_ms)
                head = None
            if isinstance(line, BlockedLine) and line.reason in begins:
                begins[line.reason].append(line.t_ms)
                head = line
        if head is not None:
            ends[head.reason].append(last_ms)
        self._spans: dict[str, tuple[Column, Column, Column]] = {}
        for reason, times in begins.items():
            begin, end = np.array(times, np.float64), np.array(ends[reason], np.float64)
            self._spans[reason] = begin, end, np.concatenate(([0.0], np.cumsum(end - begin)))

    def reason(self, begin_ms: float, end_ms: float) -> tuple[str, float]:
        """Return the main reason why the queue was blocked, and its share of the time; `turn` if it was not."""
        length = end_ms - begin_ms
        shares = {reason: self._between(reason, begin_ms, end_ms) / length for reason in self._spans if length > 0}
        reason = max(shares, key=lambda reason: shares[reason], default="turn")
        return (reason, min(1.0, shares[reason])) if shares.get(reason, 0.0) > 0.0 else ("turn", 1.0)

    def _between(self, reason: str, begin_ms: float, end_ms: float) -> float:
        begin, end, sums = self._spans[reason]
        first = int(np.searchsorted(end, begin_ms, side="right"))
        last = int(np.searchsorted(begin, end_ms, side="left"))
        if first >= last:
            return 0.0
        total = float(sums[last] - sums[first])
        return total - max(0.0, begin_ms - float(begin[first])) - max(0.0, float(end[last - 1]) - end_ms)
