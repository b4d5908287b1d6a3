"""The story of a block: the requests that filled, hit and held it, and its eviction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvarts.content import Content
from kvarts.errors import InputError
from kvarts.explain.reading import Journal
from kvarts.explain.telling import place_of, sharing
from kvarts.journal import (
    AdmittedLine,
    CancelledLine,
    ComputedLine,
    FinishedLine,
    GivenBackLine,
    Line,
    LoadingLine,
    PreemptedLine,
    RemovedBelowLine,
    RemovedLine,
    StoredBelowLine,
    StoredLine,
    StoreFailedLine,
    StoringLine,
)
from kvarts.keys import BlockKey, BlockKeys
from kvarts.units import as_duration

__all__ = ["block_named", "story_of_block"]

SHORTEST_PREFIX = 6
"""Least number of hex digits of a block key that may name it, if they are unique."""


def story_of_block(journal: Journal, name: str) -> list[str]:
    """Return lines about a block, named by the first hex digits of its key or as REQUEST:PAGE.

    Keys are those of `kvarts.keys` (sha256), as in vLLM. Raise InputError if no block, or more than one, matches.
    """
    request, page = block_named(journal, name)
    return _BlockStory(journal, request, page).lines()


class _BlockStory:
    """Page `page` of `request`, and of every request with the same sequence up to the end of that page.

    With KV groups it has a part in each; a whole page is one part, of group None.
    """

    def __init__(self, journal: Journal, request: int, page: int) -> None:
        self._journal = journal
        self._page = page
        self._request = request
        self._sharing = set(sharing(journal, request, page))
        self._holders: dict[int, set[int | None]] = {}
        """Groups in which each request holds a part."""
        self._said: list[str] = []
        self._idle_since: dict[int | None, Line] = {}
        self._last: int | None = None
        self._resident: dict[int | None, None] = {}
        """Groups whose part can be found."""
        self._below: dict[tuple[str, int | None], None] = {}
        """Tiers below that hold it, each with the group of the part."""
        self._ended: set[int] = set()
        """Requests that do not run: finished, cancelled, or preempted and not admitted again."""

    def lines(self) -> list[str]:
        journal, size = self._journal, self._journal.page_size
        content = journal.contents[self._request]
        is_known = self._page < content.num_known_pages
        key = BlockKeys(content)[self._page].hex() if is_known else "without a key, of tokens that no other request has"
        others = len(self._sharing) - 1
        also = f", and of {others:,} other requests" if others else ""
        self._said = [
            (
                f"block {key}: page {self._page} of request {journal.names[self._request]}{also}; tokens "
                f"{self._page * size:,} to {(self._page + 1) * size:,}"
            )
        ]
        for line in journal.lines:
            if line.request in self._sharing:
                self._tell(line)
        if not self._resident and self._below:
            tiers = dict.fromkeys(tier for tier, _ in self._below)
            self._said.append(f"in the end it is in {' and '.join(tiers)}, and not on the device")
        elif not self._resident:
            self._said.append("in the end it is not in the cache")
        elif self._holders:
            names = ", ".join(journal.names[holder] for holder in self._holders)
            self._said.append(f"in the end it is held by {names}")
        else:
            of = " and ".join(
                map(journal.name_of_group, sorted(group for group in self._resident if group is not None))
            )
            self._said.append(f"in the end it is cached{f' in {of}' if of else ''}, and nothing holds it")
        return self._said

    def _say(self, line: Line, what: str) -> None:
        self._said.append(f"{place_of(line)}  {what}")

    def _tell(self, line: Line) -> None:
        name = self._journal.names[line.request]
        end = (self._page + 1) * self._journal.page_size
        match line:
            case AdmittedLine() if line.hit_pages > self._page:
                self._hold(line.request, self._journal.needed_by(line.hit_pages, self._page))
                self._say(line, f"hit by {name}{self._held()}")
            case ComputedLine() if line.start < end <= line.end:
                if self._resident:
                    self._say(line, f"computed by {name} as well: a copy")
                self._hold(line.request, self._journal.groups_of_pages)
            case StoredLine() if line.start_page <= self._page < line.end_page:
                self._stored(line, name)
            case GivenBackLine() if line.start_page <= self._page < line.end_page:
                self._end_hold(line, {line.group})
                self._say(line, f"given back by {name}{self._in(line.group)}{self._held()}")
            case PreemptedLine() | FinishedLine() | CancelledLine():
                self._running_ends(line, name)
            case StoringLine() if line.start_page <= self._page < line.end_page:
                self._say(line, f"on its way to {line.tier}{self._in(line.group)}")
            case StoreFailedLine() if line.start_page <= self._page < line.end_page:
                self._say(line, f"did not arrive in {line.tier}{self._in(line.group)}")
            case StoredBelowLine() if line.start_page <= self._page < line.end_page:
                self._below[line.tier, line.group] = None
                self._say(line, f"stored in {line.tier} as well{self._in(line.group)}")
            case RemovedBelowLine() if line.start_page <= self._page < line.end_page:
                self._below.pop((line.tier, line.group), None)
                self._say(line, f"gone from {line.tier}{self._in(line.group)}")
            case LoadingLine() if 0 <= self._page - line.hit_pages - line.front_pages < sum(line.pages.values()):
                self._say(line, f"on its way back to the device, for {name}")
            case RemovedLine() if line.start_page <= self._page < line.end_page:
                self._removed(line)

    def _stored(self, line: StoredLine, name: str) -> None:
        group = line.group
        self._resident[group] = None
        self._last = line.request
        if group is not None and self._journal.groups[group].kind == "state":
            self._say(line, f"stored{self._in(group)}: {name} left a snapshot at its end")
            self._idle_since[group] = line
            return
        self._say(line, f"stored{self._in(group)}: {name} filled it")
        if line.request not in self._ended:
            self._hold(line.request, {group})
        elif not self._is_held(group):
            self._idle_since[group] = line  # a request's private pages are stored when it ends

    def _removed(self, line: RemovedLine) -> None:
        what = "not kept" if line.is_dropped else "evicted"
        if line.is_copy:
            self._say(line, f"a copy of it was {what}{self._in(line.group)}; it can still be found")
        else:
            self._resident.pop(line.group, None)
            self._say(line, f"{what}{self._in(line.group)}{'' if line.is_dropped else self._idle(line)}")

    def _in(self, group: int | None) -> str:
        return "" if group is None else f" in {self._journal.name_of_group(group)}"

    def _is_held(self, group: int | None) -> bool:
        return any(group in groups for groups in self._holders.values())

    def _hold(self, request: int, groups: Iterable[int | None]) -> None:
        held = self._holders.setdefault(request, set())
        held.update(groups)
        if not held:
            del self._holders[request]
        self._last = request
        for group in groups:
            self._idle_since.pop(group, None)
        self._ended.discard(request)

    def _end_hold(self, line: Line, groups: Iterable[int | None]) -> None:
        """End a request's hold on its parts in some groups."""
        held = self._holders.get(line.request, set())
        held.difference_update(groups)
        self._last = line.request
        if not held:
            self._holders.pop(line.request, None)
        for group in groups:
            if not self._is_held(group):
                self._idle_since[group] = line

    def _running_ends(self, line: Line, name: str) -> None:
        self._ended.add(line.request)
        if line.request not in self._holders:
            return
        what = {PreemptedLine: "was preempted", FinishedLine: "finished"}.get(type(line), "was cancelled")
        self._end_hold(line, set(self._holders[line.request]))
        self._say(line, f"{name} {what}{self._held()}")

    def _held(self) -> str:
        return f"; {len(self._holders):,} hold it" if self._holders else "; nothing holds it"

    def _idle(self, line: RemovedLine) -> str:
        last = "" if self._last is None else f", last touched by {self._journal.names[self._last]}"
        since = self._idle_since.get(line.group)
        if since is None:
            return last
        return f" after {as_duration(line.t_ms - since.t_ms)} idle{last}"


def block_named(journal: Journal, name: str) -> tuple[int, int]:
    """Return the request and page that `name` denotes: the first hex digits of a key, or REQUEST:PAGE.

    Raise InputError if no block, or more than one, matches.
    """
    request_name, colon, page_name = name.rpartition(":")
    if colon:
        request = journal.request(request_name)
        if not page_name.isdecimal() or request not in journal.contents:
            raise InputError(f"{name!r} names no page", hint="Write REQUEST:PAGE, with pages counted from 0.")
        stored = (line for line in journal.lines if isinstance(line, StoredLine) and line.request == request)
        num_stored = max((line.end_page for line in stored), default=0)
        page = int(page_name)
        if page >= max(num_stored, journal.contents[request].num_known_pages):
            raise InputError(f"request {request_name} never had a page {page} that could be found")
        return request, page
    prefix = name.lower().removeprefix("0x")
    if len(prefix) < SHORTEST_PREFIX or set(prefix) - set("0123456789abcdef"):
        raise InputError(
            f"{name!r} names no block", hint=f"Give {SHORTEST_PREFIX} hex digits of its key or more, or REQUEST:PAGE."
        )
    found = [(request, page) for request, page, key in _keys(journal) if key.hex().startswith(prefix)]
    if not found:
        raise InputError(f"no block with a key that begins with {prefix} in this journal")
    if len(found) > 1:
        raise InputError(f"{len(found)} blocks have a key that begins with {prefix}", hint="Give more of its digits.")
    return found[0]


def _keys(journal: Journal) -> Iterator[tuple[int, int, BlockKey]]:
    """Iterate over each block of known tokens once, in order of content, so that a shared prefix is hashed once."""
    contents = sorted(journal.contents.values(), key=lambda content: (content.salt or "", bytes(content.units)))
    before: Content | None = None
    keys: list[BlockKey] = []
    for content in contents:
        num_pages = content.num_known_pages
        shared = 0
        if before is not None and before.salt == content.salt:
            shared = content.common_pages(before, 0, min(num_pages, len(keys)))
        keys = list(BlockKeys(content, known=keys[:shared]))
        for page in range(shared, num_pages):
            yield content.owner, page, keys[page]
        before = content
