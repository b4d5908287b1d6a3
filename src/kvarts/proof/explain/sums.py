"""The time of a request as a sum (TTFT = queue + load + prefill), and the longest waits, with their causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from kvarts.base.columns import Column
from kvarts.base.units import as_duration, as_percent
from kvarts.proof.explain.hits import hit_ledger
from kvarts.proof.explain.reading import Journal
from kvarts.proof.explain.story import story_of_request
from kvarts.proof.journal import AdmittedLine, BlockedLine, FinishedLine, LoadedLine, LoadingLine, RemovedLine

__all__ = [
    "Blockers",
    "Overview",
    "RequestTimes",
    "Sums",
    "TokenKind",
    "Wait",
    "Waited",
    "longest_waits",
    "overview_of",
    "slowest",
    "sum_of",
    "times_in",
]

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


MOST_CANDIDATES = 20_000
SHORTEST_MS = 1.0
TOGETHER = 0.5
"""Least share of a wait that overlaps another for both to be one entry, if their cause is the same."""
WAITS = {
    "pages": "too few free KV pages",
    "token_budget": "the token budget of the steps",
    "sequence_cap": "the cap on running sequences",
    "turn": "its turn: nothing held up the queue",
}
CAUSES = {"pages": "KV pages", "token_budget": "token budget", "sequence_cap": "sequence cap"}
LEAST_MS = 0.1
"""The cause of a shorter wait is omitted."""


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
            WAITS[wait.reason] + (f" ({as_percent(wait.share)} of the time)" if wait.reason != "turn" else ""),
            wait.num_others,
        )
        for wait in found
    ]


class Blockers:
    """Times when the head of the queue was not admitted, and the reasons."""

    def __init__(self, journal: Journal) -> None:
        begins: dict[str, list[float]] = {reason: [] for reason in WAITS if reason != "turn"}
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


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A request by its outside name, with its times in ms of the run; None for an event that is absent or unknown."""

    name: str
    arrival_ms: float
    first_admitted_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0

    @property
    def slowness_ms(self) -> float:
        """Time to the first token, or to the last if the first is not known; below 0 for a request without tokens."""
        end_ms = self.last_token_ms if self.first_token_ms is None else self.first_token_ms
        return -1.0 if end_ms is None else end_ms - self.arrival_ms


def slowest(requests: Sequence[RequestTimes], count: int) -> list[RequestTimes]:
    """Return up to `count` requests, the slowest first; ties stay in the order given."""
    return sorted((each for each in requests if each.slowness_ms >= 0), key=lambda each: -each.slowness_ms)[:count]


def times_in(journal: Journal) -> list[RequestTimes]:
    """Return the times that a journal alone contains: ends of requests, but not the step of each first token."""
    admitted: dict[int, float] = {}
    finished: dict[int, float] = {}
    for line in journal.lines:
        if isinstance(line, AdmittedLine):
            admitted.setdefault(line.request, line.t_ms)
        elif isinstance(line, FinishedLine):
            finished[line.request] = line.t_ms
    return [
        RequestTimes(
            name=journal.names[request],
            arrival_ms=line.t_ms,
            first_admitted_ms=admitted.get(request),
            last_token_ms=finished.get(request),
        )
        for request, line in journal.arrivals.items()
    ]


class Sums:
    """Sums of the requests of one journal; None for a run without a journal."""

    def __init__(self, journal: Journal | None) -> None:
        self._blockers = None if journal is None else Blockers(journal)
        self._loads = {} if journal is None else _loads(journal)

    def text(self, request: RequestTimes) -> str:
        """Return the sum of a request: `TTFT 680.0 ms = 486.0 ms queue (token budget) + 194.0 ms prefill; ...`."""
        start, admitted = request.arrival_ms, request.first_admitted_ms
        if admitted is None:
            return "never admitted"
        load_ms = min(self._loads.get(request.name, 0.0), admitted - start)
        queue_ms = admitted - start - load_ms
        parts = [f"{as_duration(queue_ms)} queue{self._cause(start, admitted) if queue_ms >= LEAST_MS else ''}"]
        if load_ms:
            parts.append(f"{as_duration(load_ms)} load")
        if request.first_token_ms is None:
            if request.last_token_ms is None:
                return f"{' + '.join(parts)}, then no token"
            return f"E2E {as_duration(request.last_token_ms - start)}, of which {' + '.join(parts)}"
        parts.append(f"{as_duration(request.first_token_ms - admitted)} prefill")
        text = f"TTFT {as_duration(request.first_token_ms - start)} = {' + '.join(parts)}"
        num_more = request.num_output_tokens - 1
        if num_more > 0 and request.last_token_ms is not None:
            each = as_duration((request.last_token_ms - request.first_token_ms) / num_more)
            text += f"; then {num_more:,} token{'s' if num_more > 1 else ''} at {each}"
        if request.num_preemptions:
            text += f"; preempted {'once' if request.num_preemptions == 1 else f'{request.num_preemptions:,} times'}"
        return text

    def _cause(self, begin_ms: float, end_ms: float) -> str:
        if self._blockers is None:
            return ""
        reason, _ = self._blockers.reason(begin_ms, end_ms)
        return f" ({CAUSES[reason]})" if reason in CAUSES else ""


def sum_of(request: RequestTimes, journal: Journal | None) -> str:
    """Return the sum of one request."""
    return Sums(journal).text(request)


def _loads(journal: Journal) -> Mapping[str, float]:
    """Return the time that requests waited for loads before their first admission, by name."""
    began: dict[int, float] = {}
    loads: dict[str, float] = {}
    for line in journal.lines:
        if isinstance(line, LoadingLine):
            began[line.request] = line.t_ms
        elif isinstance(line, LoadedLine | AdmittedLine) and line.request in began:
            # A request may be admitted while the last layers of its load are under way.
            name = journal.names[line.request]
            loads.setdefault(name, line.t_ms - began.pop(line.request))
    return loads
