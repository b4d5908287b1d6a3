"""The hit ledger of a run: why each prompt token was, or was not, a cache hit.

Every prompt token of every admitted request is of one of these kinds:

* `device_hit`: found in pages that other requests had left on the device;
* `host_hit`, `disk_hit`: found in a tier below the device, if there are tiers, by its name;
* `never_seen`: no earlier sequence had computed this prefix up to this token;
* `evicted`: an earlier sequence had, and its page was in the cache but has been evicted; with KV groups, a part that
  some group needed to resume from there or later has been evicted;
* `alignment`: an earlier sequence had, but not as a whole page that could be found: the page was never full, or it is
  the last page of the prompt, whose last token is always computed;
* `not_kept`: with KV groups, an earlier sequence had, but the token would not have been a hit even without evictions:
  windows had released the parts, or no snapshot of a state was taken there or later;
* `recomputed`: it had been in this request's own pages, and was computed again after a preemption;
* `not_computed`: the request ended before computing it.

Tokens count as seen if a chunk, a full page, or the end of a request (or of its run, by preemption) had computed them
before the request was admitted. Tokens that a running request has generated into a page that is not full do not count.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvarts.base.columns import Column, percentile_rank
from kvarts.core.content import Content
from kvarts.proof.explain.reading import Journal
from kvarts.proof.journal import (
    AdmittedLine,
    CancelledLine,
    ComputedLine,
    DraftedLine,
    FinishedLine,
    Line,
    LoadingLine,
    PreemptedLine,
    RemovedLine,
    StoredLine,
)

__all__ = ["BELOW", "KINDS", "NOT_KEPT", "HitLedger", "hit_ledger", "stored_ledger"]

BELOW = ("host_hit", "disk_hit")
KINDS = ("device_hit", "never_seen", "evicted", "alignment", "recomputed", "not_computed")
NOT_KEPT = "not_kept"
"""An additional kind, in journals with KV groups."""
STORED_KINDS = ("never_seen", "evicted", "renamed")
"""Kinds of the tokens that events alone name."""
MISSED = ("alignment", "evicted", NOT_KEPT)


class HitLedger(msgspec.Struct, frozen=True):
    """Prompt tokens by kind, for the run and for each admitted request.

    `evicted_ago_ms`: time from the eviction of missed tokens to the admission that missed them: mean, percentiles and
    maximum, weighted by tokens; None if no tokens were evicted. `ended_by`: for each KV group that cut hits short, by
    name, the number of these hits and of the tokens missed so.
    """

    prompt_tokens: int
    tokens: dict[str, int]
    evicted_ago_ms: dict[str, float] | None
    by_request: dict[int, dict[str, int]]
    ended_by: dict[str, tuple[int, int]] = {}

    @property
    def gone_for(self) -> str:
        """Text of the time since eviction of the evicted tokens; empty if there are none."""
        if self.evicted_ago_ms is None:
            return ""
        p50, p90 = (self.evicted_ago_ms[name] / 1e3 for name in ("p50", "p90"))
        return f"gone for {p50:,.1f} s (median), {p90:,.1f} s (p90)"

    def to_text(self) -> str:
        """Return one line per kind, ending in a line end."""
        lines = [f"{'prompt tokens':<14}{self.prompt_tokens:>16,}"]
        for kind, tokens in self.tokens.items():
            line = f"{kind.replace('_', ' '):<14}{tokens:>16,}{tokens / max(1, self.prompt_tokens):>9.1%}"
            if kind == "evicted" and self.gone_for:
                line += f"  {self.gone_for}"
            lines.append(line)
        for name, (count, tokens) in self.ended_by.items():
            lines.append(f"hits ended by {name}: {count:,}, with {tokens:,} tokens that others could have gone on from")
        return "\n".join(lines) + "\n"

    def to_builtins(self) -> dict[str, Any]:
        """Return a JSON-able value, without the requests."""
        values: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "evicted_ago_ms": self.evicted_ago_ms,
        }
        if self.ended_by:
            values["ended_by"] = {
                name: {"hits": count, "tokens": tokens} for name, (count, tokens) in self.ended_by.items()
            }
        return values


class _Node:
    """Tokens [start, end) of `content`, which were computed after all tokens before them."""

    __slots__ = ("children", "content", "end", "start")

    def __init__(self, content: Content, start: int, end: int) -> None:
        self.content = content
        self.start = start
        self.end = end
        self.children: dict[bytes | int, _Node] = {}


HERE, LEFT = np.inf, -np.inf
"""Marks of parts that can be found, and of parts released by windows. Any other mark is the time of an eviction."""


class _Seen:
    """All tokens ever computed, as runs, and the time when each page of them was last evicted.

    Contents have one token per page here.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str | None, _Node] = {}
        self._marks: dict[tuple[int, int | None], Column] = {}
        """Marks per page, by group and by owner of the run that contains the page's last token."""

    def path(self, content: Content, end: int) -> tuple[list[tuple[_Node, int]], int]:
        """Return the longest seen prefix of `content` up to `end`: its runs, each with its end, and its length."""
        found: list[tuple[_Node, int]] = []
        node = self._roots.get(content.salt)
        position = 0
        while node is not None and position < end:
            child = node.children.get(content.key(position))
            if child is None:
                break
            common = content.common_pages(child.content, position, min(end, child.end))
            found.append((child, common))
            position = common
            if common < child.end:
                break
            node = child
        return found, position

    def add(self, content: Content, end: int) -> None:
        """Record that the tokens up to `end` were computed."""
        end = min(end, content.num_known_tokens)
        found, position = self.path(content, end)
        if position >= end:
            return
        if not found:
            last = self._roots.setdefault(content.salt, _Node(content, 0, 0))
        else:
            last, at = found[-1]
            if at < last.end:
                tail = _Node(last.content, at, last.end)
                tail.children = last.children
                last.children = {last.content.key(at): tail}
                last.end = at
            elif last.content is content and not last.children:
                last.end = end
                return
        last.children[content.key(position)] = _Node(content, position, end)

    def mark(
        self, content: Content, start_page: int, end_page: int, time_ms: float, *, group: int | None = None
    ) -> None:
        """Record the eviction time of pages, or the state of their parts in a group: HERE, LEFT, or that time."""
        for marks, first, last in self._slices(content, start_page, end_page, group):
            marks[first:last] = time_ms

    def marks(self, content: Content, start_page: int, end_page: int, *, group: int | None = None) -> Column:
        """Return the last eviction time of pages, or the state of their parts; NaN for those without a mark."""
        out = np.full(end_page - start_page, np.nan)
        for marks, first, last in self._slices(content, start_page, end_page, group):
            out[first - start_page : last - start_page] = marks[first:last]
        return out

    def _slices(
        self, content: Content, start_page: int, end_page: int, group: int | None
    ) -> list[tuple[Column, int, int]]:
        size = self._page_size
        out = []
        for node, at in self.path(content, end_page * size)[0]:
            # A page belongs to the run that contains its last token.
            first, last = max(start_page, node.start // size), min(end_page, at // size)
            if first < last:
                owner = node.content.owner, group
                pages = self._marks.get(owner)
                if pages is None or len(pages) < last:
                    grown = np.full(max(last, node.content.num_known_tokens // size), np.nan)
                    if pages is not None:
                        grown[: len(pages)] = pages
                    pages = self._marks[owner] = grown
                out.append((pages, first, last))
        return out


class _Request:
    """The ledger's state of one request. Tokens up to `furthest` have been found or computed once."""

    __slots__ = ("again", "at_step", "computed", "content", "furthest", "parts", "prompt", "seen")

    def __init__(self, content: Content, prompt: int) -> None:
        self.content = content
        self.prompt = prompt
        self.furthest = 0
        self.computed = 0
        self.at_step = -1
        """The step after which it decodes; -1 until then."""
        self.seen: list[tuple[int, str]] = []
        """Kinds of the misses of the present admission, each with the token up to which it applies."""
        self.parts: list[tuple[int, int, str]] = []
        self.again: list[tuple[int, int]] = []


def hit_ledger(journal: Journal) -> HitLedger:
    """Return the hit ledger of `journal`."""
    reading = _Reading(journal)
    for line in journal.lines:
        reading.read(line)
    return reading.ledger()


def stored_ledger(journal: Journal) -> HitLedger:
    """Return what KV events alone say of the tokens that an engine stored: `kvarts watch --events` writes them.

    Kinds: `evicted`: they had been stored before, and were evicted; `renamed`: they are on the device under another
    name, of another salt, adapter or image; `never_seen`. Events do not name requests: stretches of pages count.
    """
    reading = _Reading(journal)
    for line in journal.lines:
        reading.read_stored(line)
    return reading.ledger_of_stored()


class _Reading:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._page_size = journal.page_size
        self._seen = _Seen(journal.page_size)
        self._tokens = {
            owner: Content(
                content.units,
                num_tokens=content.num_known_tokens,
                page_size=1,
                unit_tokens=content.unit_tokens,
                owner=owner,
                salt=content.salt,
            )
            for owner, content in journal.contents.items()
        }
        self._requests: dict[int, _Request] = {}
        self._below: dict[str, None] = {}
        """The kinds of hits in tiers below the device that were seen."""
        self._ended = [[0, 0] for _ in journal.groups]
        """For each KV group: hits that it cut short, and tokens by which another group could have extended them."""
        self._stored: dict[int, dict[str, int]] = {}
        """Tokens of the stored pages of each stretch, by kind."""
        self._evicted_ago_ms: list[Column] = []
        """Time since eviction of each page that was missed because it was evicted."""

    def read(self, line: Line) -> None:
        content = self._tokens.get(line.request)
        if content is None:
            return
        size = self._page_size
        match line:
            case LoadingLine() if line.front_pages:
                self._find(line, content, line.hit_pages, {})  # it computes before it is admitted
            case AdmittedLine():
                self._admit(line, content)
            case ComputedLine():
                self._compute(line)
            case DraftedLine():
                self._requests[line.request].computed += line.accepted
            case PreemptedLine():
                self._end(line.request, line.step - 1)
            case FinishedLine() | CancelledLine():
                self._end(line.request, line.step)
            case StoredLine():
                self._seen.add(content, line.end_page * size)
                if line.group is not None:
                    self._mark(line, content, HERE)
            case RemovedLine() if not line.is_copy:
                self._mark(line, content, LEFT if line.is_dropped else line.t_ms)

    def _mark(self, line: StoredLine | RemovedLine, content: Content, mark: float) -> None:
        end_page = min(line.end_page, content.num_known_tokens // self._page_size)
        if line.start_page < end_page:
            self._seen.mark(content, line.start_page, end_page, mark, group=line.group)

    def read_stored(self, line: Line) -> None:
        """Count the pages of a line by what became of them before."""
        content = self._tokens.get(line.request)
        if content is None or not isinstance(line, StoredLine | RemovedLine):
            return
        if isinstance(line, StoredLine):
            marks = self._seen.marks(content, line.start_page, line.end_page, group=line.group)
            was_evicted = np.isfinite(marks)
            of_run = self._stored.setdefault(line.request, dict.fromkeys(STORED_KINDS, 0))
            for kind, is_of in zip(STORED_KINDS, (np.isnan(marks), was_evicted, marks == HERE), strict=True):
                of_run[kind] += int(is_of.sum()) * self._page_size
            if was_evicted.any():
                self._evicted_ago_ms.append(line.t_ms - marks[was_evicted])
            self._seen.add(content, line.end_page * self._page_size)
            self._mark(line, content, HERE)
        elif not line.is_copy:
            self._mark(line, content, line.t_ms)

    def ledger_of_stored(self) -> HitLedger:
        """Return the ledger of `read_stored`."""
        tokens = {kind: sum(of[kind] for of in self._stored.values()) for kind in STORED_KINDS}
        return HitLedger(sum(tokens.values()), tokens, self._ago(), self._stored)

    def _admit(self, line: AdmittedLine, content: Content) -> None:
        for group in line.ended_by:
            self._ended[group][0] += 1
            self._ended[group][1] += (max(line.reach) - line.hit_pages) * self._page_size
        self._find(line, content, line.hit_pages, line.loaded_pages)

    def _find(self, line: Line, content: Content, num_pages: int, loaded_pages: dict[str, int]) -> None:
        """Count the first `num_pages` pages of a request as hits, and determine why it misses the others."""
        size = self._page_size
        arrival = self._journal.arrivals[line.request]
        request = self._requests.get(line.request)
        if request is None:
            request = self._requests[line.request] = _Request(content, arrival.prompt_tokens)
        hit = num_pages * size
        prompt = request.prompt
        if loaded_pages and hit == prompt and request.furthest < hit:
            hit -= 1  # after a hit of the whole prompt, its last token is computed again
        end = hit
        for tier, count in reversed(loaded_pages.items()):
            start = min(end, (-(-end // size) - count) * size)
            self._below[f"{tier}_hit"] = None
            request.parts += _new_part(start, min(end, prompt), request.furthest, f"{tier}_hit")
            end = start
        request.parts += _new_part(0, min(end, prompt), request.furthest, "device_hit")
        request.furthest = max(request.furthest, hit)
        request.computed = hit
        request.at_step = -1
        # The prefix may include its own earlier tokens; those up to `furthest` are not counted again.
        seen_end = self._seen.path(content, prompt)[1]
        findable = min(seen_end, (prompt - 1) // size * size) // size
        request.seen = []
        first = num_pages
        if first < findable:
            kinds, removed_ms = self._missed(content, first, findable)
            # Runs of pages missed for the same reason.
            edges = np.flatnonzero(np.diff(kinds)) + 1
            for end in [*edges.tolist(), len(kinds)]:
                request.seen.append(((first + end) * size, MISSED[kinds[end - 1]]))
            new = np.arange(first, findable) * size >= request.furthest
            ago = (line.t_ms - removed_ms)[(kinds == 1) & new]
            if len(ago):
                self._evicted_ago_ms.append(ago)
        request.seen += [(seen_end, "alignment"), (prompt, "never_seen")]

    def _missed(self, content: Content, first: int, end: int) -> tuple[Column, Column]:
        """Return why seen pages [first, end) were missed, as indices into MISSED, and when they were evicted."""
        groups = self._journal.groups
        if not groups:
            removed_ms = self._seen.marks(content, first, end)
            return (~np.isnan(removed_ms)).astype(np.int64), removed_ms
        marks = np.stack([self._seen.marks(content, 0, end, group=group) for group in range(len(groups))])
        was_evicted, is_gone = np.isfinite(marks), np.isnan(marks) | (marks == LEFT)
        num_gone = np.concatenate((np.zeros((len(groups), 1), np.int64), np.cumsum(is_gone, axis=1)), axis=1)
        length = end
        while length > first and not self._had_been_hit(length, num_gone):
            length -= 1
        kinds = np.where(np.isnan(marks[:, first:]).all(axis=0), 0, 2)
        kinds[: length - first] = 1
        times = np.where(was_evicted, marks, LEFT)
        last_ms = max((times[index, pages].max() for index, pages in self._needed(length) if len(pages)), default=LEFT)
        own_ms = times.max(axis=0)[first:]
        return kinds, np.where(own_ms == LEFT, last_ms, own_ms)

    def _had_been_hit(self, length: int, num_gone: Column) -> bool:
        """Return whether `length` pages would have been a hit if nothing had been evicted.

        `num_gone`: for each group and page, the number of pages before it whose part was missing even then.
        """
        has_last = (num_gone[:, length] == num_gone[:, length - 1]).any()
        return bool(has_last) and all(
            num_gone[index, pages.stop] == num_gone[index, pages.start] for index, pages in self._needed(length)
        )

    def _needed(self, length: int) -> list[tuple[int, range]]:
        """Return the runs of pages needed to resume after `length` pages, each with its group."""
        if not length:
            return []
        size = self._page_size
        return [
            (index, pages)
            for index, group in enumerate(self._journal.groups)
            for pages in group.needed(length, size)
            if pages
        ]

    def _compute(self, line: ComputedLine) -> None:
        request = self._requests[line.request]
        prompt, furthest = request.prompt, request.furthest
        if line.start < min(line.end, furthest, prompt):
            request.again.append((line.start, min(line.end, furthest, prompt)))
        start = max(line.start, furthest)
        for until, kind in request.seen:
            end = min(until, line.end, prompt)
            if start < end:
                request.parts.append((start, end, kind))
                start = end
        request.furthest = max(furthest, line.end)
        request.computed = line.end
        request.at_step = line.step if line.end == line.known else -1
        self._seen.add(request.content, line.end)

    def _end(self, index: int, last_step: int) -> None:
        request = self._requests.get(index)
        if request is None:
            return
        if request.at_step >= 0:
            request.computed += max(0, last_step - request.at_step)
        request.furthest = max(request.furthest, request.computed)
        self._seen.add(request.content, request.computed)
        request.at_step = -1

    def ledger(self) -> HitLedger:
        by_request = {index: self._account(request) for index, request in sorted(self._requests.items())}
        below = () if not self._below else BELOW if self._below.keys() <= set(BELOW) else tuple(self._below)
        kinds = (KINDS[0], *below, *KINDS[1:])
        if self._journal.groups:
            kinds = (*kinds[:-2], NOT_KEPT, *kinds[-2:])
        tokens = {kind: sum(account.get(kind, 0) for account in by_request.values()) for kind in kinds}
        ended_by = {
            self._journal.name_of_group(group): (count, missed)
            for group, (count, missed) in enumerate(self._ended)
            if count
        }
        return HitLedger(sum(tokens.values()), tokens, self._ago(), by_request, ended_by)

    def _ago(self) -> dict[str, float] | None:
        """Return the time since eviction of what was missed; None if nothing was."""
        if not self._evicted_ago_ms:
            return None
        ordered = np.sort(np.concatenate(self._evicted_ago_ms))
        ago = {"mean": float(ordered.mean())}
        ago.update({f"p{p}": float(ordered[percentile_rank(p, len(ordered))]) for p in (50, 90, 99)})
        return ago | {"max": float(ordered[-1])}

    @staticmethod
    def _account(request: _Request) -> dict[str, int]:
        account = dict.fromkeys(KINDS, 0)
        again: list[tuple[int, int]] = []
        for start, end in sorted(request.again):
            if again and start <= again[-1][1]:
                again[-1] = again[-1][0], max(end, again[-1][1])
            else:
                again.append((start, end))
        account["recomputed"] = sum(end - start for start, end in again)
        for start, end, kind in request.parts:
            account[kind] = account.get(kind, 0) + end - start
            account[kind] -= sum(max(0, min(end, b) - max(start, a)) for a, b in again)
        account["not_computed"] = request.prompt - sum(account.values())
        return account


def _new_part(start: int, end: int, furthest: int, kind: str) -> list[tuple[int, int, str]]:
    """Return tokens [start, end) with their kind, as far as the request never had them before."""
    start = max(start, furthest)
    return [(start, end, kind)] if start < end else []
