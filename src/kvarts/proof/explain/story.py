"""The stories of a request and of a block: their events and reasons, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvarts.base.errors import InputError
from kvarts.base.limits import whole_number
from kvarts.base.units import as_duration
from kvarts.core.content import Content
from kvarts.core.keys import BlockKey, BlockKeys
from kvarts.proof.explain.reading import Journal
from kvarts.proof.journal import (
    AdmittedLine,
    ArrivedLine,
    BlockedLine,
    CancelledLine,
    ComputedLine,
    DraftedLine,
    FinishedLine,
    GivenBackLine,
    HeldLine,
    Line,
    LoadedLine,
    LoadingLine,
    LoadLostLine,
    PreemptedLine,
    RejectedLine,
    ReleasedLine,
    RemovedBelowLine,
    RemovedLine,
    StoredBelowLine,
    StoredLine,
    StoreFailedLine,
    StoringLine,
)

__all__ = [
    "block_named",
    "last_holder",
    "named_pages",
    "num_of",
    "place_of",
    "sharing",
    "story_of_block",
    "story_of_request",
]

SHORTEST_PREFIX = 6
"""Least number of hex digits of a block key that may name it, if they are unique."""


def sharing(journal: Journal, request: int, page: int) -> list[int]:
    """Return the requests with the same sequence as `request` up to the end of `page`, `request` itself first."""
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


def last_holder(journal: Journal, at: Line, page: int) -> str | None:
    """Return the name of the last request that held `page` of the line's request before the line, or still holds it."""
    alike = set(sharing(journal, at.request, page))
    end = (page + 1) * journal.page_size
    last: int | None = None
    for line in journal.lines[: at.n]:
        if line.request not in alike:
            continue
        match line:
            case StoredLine() if line.start_page <= page < line.end_page:
                last = line.request
            case AdmittedLine() if line.hit_pages > page:
                last = line.request
            case ComputedLine() if line.start < end <= line.end:
                last = line.request
    return None if last is None else journal.names[last]


def named_pages(line: StoredBelowLine | StoreFailedLine) -> str:
    """Return a text that names the pages of a line."""
    num_pages = line.end_page - line.start_page
    return f"page {line.start_page:,}" if num_pages == 1 else f"pages {line.start_page:,} to {line.end_page - 1:,}"


def num_of(count: int, what: str) -> str:
    """Return a count with its noun; `what` is the singular."""
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def place_of(line: Line) -> str:
    """Return the step and time of a line, for the beginning of a story line."""
    step = f"step {line.step}" if line.step >= 0 else "before step 0"
    return f"{step:<13} {line.t_ms / 1e3:>12,.3f} s"


def story_of_block(journal: Journal, name: str) -> list[str]:
    """Return lines about a block, named by the first hex digits of its key or as REQUEST:PAGE.

    Keys are those of `kvarts.core.keys` (sha256), as in vLLM. Raise InputError if no block, or more than one, matches.
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
                self._emit(line)
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

    def _emit(self, line: Line) -> None:
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
        page = whole_number(page_name)
        if page is None or request not in journal.contents:
            raise InputError(f"{name!r} names no page", hint="Write REQUEST:PAGE, with pages counted from 0.")
        stored = (line for line in journal.lines if isinstance(line, StoredLine) and line.request == request)
        num_stored = max((line.end_page for line in stored), default=0)
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


def story_of_request(journal: Journal, name: str) -> list[str]:
    """Return lines about the request called `name`. Raise InputError if the journal lacks it."""
    return _RequestStory(journal, journal.request(name)).lines()


class _RequestStory:
    def __init__(self, journal: Journal, request: int) -> None:
        self._journal = journal
        self._request = request
        self._said: list[str] = []
        self._since_ms = 0.0
        self._arrived_ms = 0.0
        self._made = self._most = 0
        """The tokens made so far, and the most that it may make."""
        self._decoding_since: int | None = None
        self._lost = 0
        self._num_front = 0
        """Pages that it computes while others are loaded, until it is admitted."""
        self._num_drafted = self._num_accepted = 0
        self._gone: dict[tuple[str, int | None], list[RemovedLine | GivenBackLine]] = {}
        """Removals of pages of its sequence since the last line, by kind of removal and KV group."""

    def lines(self) -> list[str]:
        for line in self._journal.lines:
            if line.request == self._request:
                if not self._is_about_parts(line):
                    self._emit_gone()
                self._emit(line)
        self._emit_gone()
        return self._said

    def _is_about_parts(self, line: Line) -> bool:
        """Return whether a line is one of many that are summed up in one."""
        if isinstance(line, StoredLine) and line.group is not None:
            return self._journal.groups[line.group].kind != "state"
        return isinstance(line, RemovedLine | GivenBackLine)

    def _in(self, group: int | None) -> str:
        return "" if group is None else f", of {self._journal.name_of_group(group)}"

    def _say(self, line: Line, what: str) -> None:
        self._said.append(f"{place_of(line)}  {what}")

    def _emit(self, line: Line) -> None:
        names, size = self._journal.names, self._journal.page_size
        match line:
            case ArrivedLine():
                self._since_ms = self._arrived_ms = line.t_ms
                self._most = line.output_tokens
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
                self._say(line, f"first in the queue and not admitted: {self._why_blocked(line)}")
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
                self._num_front = line.front_pages
                front = f", and computes {_pages(line.front_pages)} before them" if line.front_pages else ""
                self._say(line, f"waits for {asked}, after {_pages(line.hit_pages)} found on the device{front}")
            case LoadedLine():
                self._say(line, f"its load ended: {_pages(line.good_pages)} arrived")
            case LoadLostLine():
                self._say(line, "lost the pages of its load to another request, and waits again")
            case StoredBelowLine():
                self._say(line, f"of its sequence, {named_pages(line)} stored in {line.tier}{self._in(line.group)}")
            case StoreFailedLine():
                pages, place = named_pages(line), f"{line.tier}{self._in(line.group)}"
                self._say(line, f"of its sequence, {pages} could not be stored in {place}")
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
                    f"preempted by {by}, which asked for {self._memory(line.pages_asked)} and was {line.pages_short:,} "
                    f"short with {line.used_pages:,} in use: lost {line.lost_tokens:,} computed tokens, keeps "
                    f"{self._made:,} made",
                )
            case FinishedLine():
                self._count_made(line.step)
                # With asynchronous scheduling, it ends in the plan of one more step.
                self._made = min(self._made, self._most)
                self._say(
                    line,
                    f"finished: {self._made:,} tokens made, {as_duration(line.t_ms - self._arrived_ms)} after it "
                    f"arrived{self._of_drafts()}",
                )
            case HeldLine():
                self._decoding_since = None
                self._say(line, "its prompt is computed, and held until another worker has it")
            case ReleasedLine():
                self._say(line, f"its pages are free, {as_duration(line.t_ms - self._arrived_ms)} after it arrived")
            case CancelledLine():
                self._count_made(line.step)
                self._say(line, f"cancelled{self._of_drafts()}")
            case StoredLine() if not self._is_about_parts(line) and line.group is not None:
                self._say(line, f"its state at the end of page {line.start_page} is kept, as a snapshot")
            case GivenBackLine():
                self._gone.setdefault(("given back", line.group), []).append(line)
            case RemovedLine() if not line.is_copy:
                what = "not kept" if line.is_dropped else "evicted"
                self._gone.setdefault((what, line.group), []).append(line)
            case _:
                pass

    def _emit_gone(self) -> None:
        """Sum up consecutive removals in one line: pages are removed one by one, and a prompt may have thousands."""
        gone, self._gone = self._gone, {}
        for (what, group), lines in gone.items():
            given_back, not_kept = (_pages_of(gone.get((how, group), [])) for how in ("given back", "not kept"))
            if what == "not kept" and given_back == not_kept:
                continue
            how = "given back, and not kept" if what == "given back" and given_back == not_kept else what
            num_pages = sum(line.end_page - line.start_page for line in lines)
            first, last = min(line.start_page for line in lines), max(line.end_page for line in lines) - 1
            which = f"page {first}" if num_pages == 1 else f"{num_pages:,} pages between {first:,} and {last:,}"
            if group is not None:
                which += f" of {self._journal.name_of_group(group)}"
            until = "" if lines[-1].step == lines[0].step else f", until step {lines[-1].step}"
            self._say(lines[0], f"of its sequence, {which} {how}{until}")

    def _admitted(self, line: AdmittedLine) -> None:
        size = self._journal.page_size
        num_hit, self._num_front = line.hit_pages - self._num_front, 0
        hit = num_hit * size
        waited = as_duration(line.t_ms - self._since_ms)
        again = " again" if self._lost else ""
        if not hit:
            found = "found nothing in the cache"
        else:
            last = last_holder(self._journal, line, line.hit_pages - 1)
            by = f", last touched by {last}" if last else ""
            loaded = "".join(f", {count:,} of them from {tier}" for tier, count in line.loaded_pages.items())
            found = f"hit {hit:,} tokens ({_pages(num_hit)}{loaded}{by})"
        found += self._ended_by(line)
        if self._lost:
            found += f", computes {max(0, self._lost - hit):,} of the {self._lost:,} lost tokens again"
        self._say(line, f"admitted{again} after {waited}: {found}")

    def _ended_by(self, line: AdmittedLine) -> str:
        """Return a text about the KV groups that cut short a hit which other groups could have extended."""
        furthest = max(line.reach, default=0)
        if furthest <= line.hit_pages:
            return ""
        beyond = f"others could go on from {_pages(furthest)}"
        if not line.ended_by:
            return f", as no KV groups could all go on from more; {beyond[7:]}"
        return f", as {' and '.join(map(self._journal.name_of_group, line.ended_by))} had no more; {beyond}"

    def _memory(self, count: int) -> str:
        """Return an amount of memory: in pages, or with KV groups in blocks."""
        return num_of(count, "block" if self._journal.groups else "page")

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

    def _why_blocked(self, line: BlockedLine) -> str:
        if line.reason == "pages":
            return f"{self._memory(line.pages_short)} short"
        if line.reason == "token_budget":
            return "the step's token budget was spent"
        if line.reason == "handoffs":
            return "requests of other workers have precedence"
        return "as many requests ran as may"


def _pages_of(lines: Sequence[RemovedLine | GivenBackLine]) -> list[tuple[int, int, int]]:
    return [(line.step, line.start_page, line.end_page) for line in lines]


def _pages(count: int) -> str:
    return num_of(count, "page")
