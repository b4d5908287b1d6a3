"""The story of a request, or of a block: what happened to it and why, in order, each line with its step."""

from __future__ import annotations

from collections.abc import Iterator

from kvarts.content import Content
from kvarts.errors import InputError
from kvarts.explain.reading import Journal
from kvarts.journal import (
    AdmittedLine,
    ArrivedLine,
    BlockedLine,
    CancelledLine,
    ComputedLine,
    DraftedLine,
    FinishedLine,
    Line,
    LoadedLine,
    LoadingLine,
    PreemptedLine,
    RejectedLine,
    RemovedBelowLine,
    RemovedLine,
    StoredBelowLine,
    StoredLine,
    StoreFailedLine,
    StoringLine,
)
from kvarts.keys import BlockKey, BlockKeys

__all__ = ["block_named", "story_of_block", "story_of_request"]

SHORTEST_PREFIX = 6
"""Hex digits of a block key that are enough, if they are unique."""


def story_of_request(journal: Journal, name: str) -> list[str]:
    """Return lines about the request that goes by `name`. Raise InputError if there is none."""
    return _RequestStory(journal, journal.request(name)).lines()


def story_of_block(journal: Journal, name: str) -> list[str]:
    """Return lines about a block, named by the beginning of its key in hex, or as REQUEST:PAGE.

    Keys are those of `kvarts.keys` (sha256), as vLLM gives them. Raise InputError if there is no such block.
    """
    request, page = block_named(journal, name)
    return _BlockStory(journal, request, page).lines()


# A request ------------------------------------------------------------------------------------------------


class _RequestStory:
    def __init__(self, journal: Journal, request: int) -> None:
        self._journal = journal
        self._request = request
        self._said: list[str] = []
        self._since_ms = 0.0
        self._arrived_ms = 0.0
        self._made = 0
        self._decoding_since: int | None = None
        self._lost = 0
        self._num_drafted = self._num_accepted = 0
        self._evicted: list[RemovedLine] = []

    def lines(self) -> list[str]:
        for line in self._journal.lines:
            if line.request == self._request:
                if not isinstance(line, RemovedLine):
                    self._tell_evicted()
                self._tell(line)
        self._tell_evicted()
        return self._said

    def _say(self, line: Line, what: str) -> None:
        self._said.append(f"{_place(line)}  {what}")

    def _tell(self, line: Line) -> None:
        names, size = self._journal.names, self._journal.page_size
        match line:
            case ArrivedLine():
                self._since_ms = self._arrived_ms = line.t_ms
                num_pages = -(-line.prompt_tokens // size)
                ahead = f"behind {line.num_ahead:,} others" if line.num_ahead else "with none ahead"
                urgent = f", priority {line.priority}" if line.priority else ""
                self._say(
                    line,
                    f"arrived{urgent}: {line.prompt_tokens:,} prompt tokens ({_pages(num_pages)}), up to "
                    f"{line.output_tokens:,} to make, {ahead}",
                )
            case RejectedLine():
                self._say(line, f"rejected: {line.reason}")
            case BlockedLine():
                self._say(line, f"first in the queue and not admitted: {_why_blocked(line)}")
            case AdmittedLine():
                self._admitted(line)
            case ComputedLine():
                self._computed(line)
            case DraftedLine():
                self._made += line.accepted
                self._num_drafted += line.drafted
                self._num_accepted += line.accepted
            case LoadingLine():
                asked = ", ".join(f"{_pages(count)} from {tier}" for tier, count in line.pages.items() if count)
                self._say(line, f"waits for {asked}, after {_pages(line.hit_pages)} found on the device")
            case LoadedLine():
                self._say(line, f"its load ended: {_pages(line.good_pages)} arrived")
            case StoredBelowLine():
                self._say(line, f"of its sequence, {_which(line)} stored in {line.tier}")
            case StoreFailedLine():
                self._say(line, f"of its sequence, {_which(line)} could not be stored in {line.tier}")
            case PreemptedLine():
                self._count_made(line.step - 1)
                by = (
                    "itself"
                    if line.asker == line.request
                    else names.get(line.asker, f"request {line.asker} of another model")
                )
                self._lost = line.lost_tokens
                self._since_ms = line.t_ms
                self._say(
                    line,
                    f"preempted by {by}, which asked for {_pages(line.pages_asked)} and was {line.pages_short:,} "
                    f"short with {line.used_pages:,} in use: lost {line.lost_tokens:,} computed tokens, keeps "
                    f"{self._made:,} made",
                )
            case FinishedLine():
                self._count_made(line.step)
                self._say(
                    line,
                    f"finished: {self._made:,} tokens made, {_seconds(line.t_ms - self._arrived_ms)} after it arrived"
                    + self._of_drafts(),
                )
            case CancelledLine():
                self._count_made(line.step)
                self._say(line, f"cancelled{self._of_drafts()}")
            case RemovedLine() if not line.is_copy:
                self._evicted.append(line)
            case _:
                pass

    def _tell_evicted(self) -> None:
        """Tell evictions one after the other in one line: pages go one by one, and a prompt may have thousands."""
        lines, self._evicted = self._evicted, []
        if not lines:
            return
        num_pages = sum(line.end_page - line.start_page for line in lines)
        first, last = min(line.start_page for line in lines), max(line.end_page for line in lines) - 1
        which = f"page {first}" if num_pages == 1 else f"{num_pages:,} pages between {first:,} and {last:,}"
        until = "" if lines[-1].step == lines[0].step else f", until step {lines[-1].step}"
        self._say(lines[0], f"of its sequence, {which} evicted{until}")

    def _admitted(self, line: AdmittedLine) -> None:
        size = self._journal.page_size
        hit = line.hit_pages * size
        waited = _seconds(line.t_ms - self._since_ms)
        again = " again" if self._lost else ""
        if not hit:
            found = "found nothing in the cache"
        else:
            last = _last_holder(self._journal, line, line.hit_pages - 1)
            by = f", last touched by {last}" if last else ""
            loaded = "".join(f", {count:,} of them from {tier}" for tier, count in line.loaded_pages.items())
            found = f"hit {hit:,} tokens ({_pages(line.hit_pages)}{loaded}{by})"
        if self._lost:
            found += f", computes {max(0, self._lost - hit):,} of the {self._lost:,} lost tokens again"
        self._say(line, f"admitted{again} after {waited}: {found}")

    def _computed(self, line: ComputedLine) -> None:
        made = ""
        if line.end == line.known:
            self._made += 1
            self._decoding_since = line.step
            made = ", makes its first token" if self._made == 1 else ", goes on making tokens"
        self._say(line, f"computes tokens {line.start:,} to {line.end:,} of {line.known:,}{made}")

    def _of_drafts(self) -> str:
        if not self._num_drafted:
            return ""
        return f"; {self._num_accepted:,} of {self._num_drafted:,} drafted tokens were right"

    def _count_made(self, last_step: int) -> None:
        if self._decoding_since is not None:
            self._made += max(0, last_step - self._decoding_since)
            self._decoding_since = None


def _why_blocked(line: BlockedLine) -> str:
    if line.reason == "pages":
        return f"{_pages(line.pages_short)} short"
    if line.reason == "token_budget":
        return "the step's token budget was spent"
    return "as many requests ran as may"


# A block --------------------------------------------------------------------------------------------------


class _BlockStory:
    """Page `page` of `request`, and of every request with the same sequence up to its end."""

    def __init__(self, journal: Journal, request: int, page: int) -> None:
        self._journal = journal
        self._page = page
        self._request = request
        self._sharing = set(_sharing(journal, request, page))
        self._holders: dict[int, None] = {}
        self._said: list[str] = []
        self._idle_since: Line | None = None
        self._last: int | None = None
        self._is_resident = False
        self._below: dict[str, None] = {}
        self._ended: set[int] = set()
        """Requests that do not run: finished, cancelled, or preempted and not yet back."""

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
        if not self._is_resident and self._below:
            self._said.append(f"in the end it is in {' and '.join(self._below)}, and not on the device")
        elif not self._is_resident:
            self._said.append("in the end it is not in the cache")
        elif self._holders:
            names = ", ".join(journal.names[holder] for holder in self._holders)
            self._said.append(f"in the end it is held by {names}")
        else:
            self._said.append("in the end it is cached, and nothing holds it")
        return self._said

    def _say(self, line: Line, what: str) -> None:
        self._said.append(f"{_place(line)}  {what}")

    def _tell(self, line: Line) -> None:
        name = self._journal.names[line.request]
        end = (self._page + 1) * self._journal.page_size
        match line:
            case AdmittedLine() if line.hit_pages > self._page:
                self._hold(line.request)
                self._say(line, f"hit by {name}{self._held()}")
            case ComputedLine() if line.start < end <= line.end:
                if self._is_resident:
                    self._say(line, f"computed by {name} as well: a copy")
                self._hold(line.request)
            case StoredLine() if line.start_page <= self._page < line.end_page:
                self._is_resident = True
                self._last = line.request
                self._say(line, f"stored: {name} filled it")
                if line.request not in self._ended:
                    self._hold(line.request)
                elif not self._holders:
                    self._idle_since = line  # its private pages are stored when it ends
            case PreemptedLine() | FinishedLine() | CancelledLine():
                self._running_ends(line, name)
            case StoringLine() if line.start_page <= self._page < line.end_page:
                self._say(line, f"on its way to {line.tier}")
            case StoreFailedLine() if line.start_page <= self._page < line.end_page:
                self._say(line, f"did not arrive in {line.tier}")
            case StoredBelowLine() if line.start_page <= self._page < line.end_page:
                self._below[line.tier] = None
                self._say(line, f"stored in {line.tier} as well")
            case RemovedBelowLine() if line.start_page <= self._page < line.end_page:
                self._below.pop(line.tier, None)
                self._say(line, f"gone from {line.tier}")
            case LoadingLine() if line.hit_pages <= self._page < line.hit_pages + sum(line.pages.values()):
                self._say(line, f"on its way back to the device, for {name}")
            case RemovedLine() if line.start_page <= self._page < line.end_page:
                if line.is_copy:
                    self._say(line, "a copy of it was evicted; it can still be found")
                else:
                    self._is_resident = False
                    self._say(line, f"evicted{self._idle(line)}")

    def _hold(self, request: int) -> None:
        self._holders[request] = None
        self._last = request
        self._idle_since = None
        self._ended.discard(request)

    def _running_ends(self, line: Line, name: str) -> None:
        self._ended.add(line.request)
        if line.request not in self._holders:
            return
        del self._holders[line.request]
        self._last = line.request
        what = {PreemptedLine: "was preempted", FinishedLine: "finished"}.get(type(line), "was cancelled")
        if not self._holders:
            self._idle_since = line
        self._say(line, f"{name} {what}{self._held()}")

    def _held(self) -> str:
        return f"; {len(self._holders):,} hold it" if self._holders else "; nothing holds it"

    def _idle(self, line: Line) -> str:
        last = "" if self._last is None else f", last touched by {self._journal.names[self._last]}"
        if self._idle_since is None:
            return last
        return f" after {_seconds(line.t_ms - self._idle_since.t_ms)} idle{last}"


def block_named(journal: Journal, name: str) -> tuple[int, int]:
    """Return a request and page that `name` stands for: the beginning of a key in hex, or REQUEST:PAGE.

    Raise InputError if there is none.
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
    """Iterate over each block of known tokens, once. In order of content, so that a shared prefix is hashed once."""
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


# Together -------------------------------------------------------------------------------------------------


def _sharing(journal: Journal, request: int, page: int) -> list[int]:
    """Return the requests with the same sequence as `request` up to the end of `page`; itself first."""
    content = journal.contents[request]
    if page >= content.num_known_pages:
        return [request]
    others = [
        index
        for index, other in journal.contents.items()
        if index != request
        and other.salt == content.salt
        and other.num_known_pages > page
        and content.common_pages(other, 0, page + 1) > page
    ]
    return [request, *others]


def _last_holder(journal: Journal, at: Line, page: int) -> str | None:
    """Return the request that held `page` of the line's request last before it, or still holds it."""
    sharing = set(_sharing(journal, at.request, page))
    end = (page + 1) * journal.page_size
    last: int | None = None
    for line in journal.lines[: at.n]:
        if line.request not in sharing:
            continue
        match line:
            case StoredLine() if line.start_page <= page < line.end_page:
                last = line.request
            case AdmittedLine() if line.hit_pages > page:
                last = line.request
            case ComputedLine() if line.start < end <= line.end:
                last = line.request
    return None if last is None else journal.names[last]


def _which(line: StoredBelowLine | StoreFailedLine) -> str:
    num_pages = line.end_page - line.start_page
    return f"page {line.start_page:,}" if num_pages == 1 else f"pages {line.start_page:,} to {line.end_page - 1:,}"


def _pages(count: int) -> str:
    return "1 page" if count == 1 else f"{count:,} pages"


def _place(line: Line) -> str:
    step = f"step {line.step}" if line.step >= 0 else "before step 0"
    return f"{step:<13} {line.t_ms / 1e3:>12,.3f} s"


def _seconds(ms: float) -> str:
    return f"{ms:,.1f} ms" if ms < 1000 else f"{ms / 1e3:,.1f} s"
