"""The story of a request: its events and their reasons, in order, each line with its step."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.explain.block_story import story_of_block
from kvarts.explain.reading import Journal
from kvarts.explain.telling import last_holder, named_pages, num_of, place_of
from kvarts.journal import (
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
    PreemptedLine,
    RejectedLine,
    ReleasedLine,
    RemovedLine,
    StoredBelowLine,
    StoredLine,
    StoreFailedLine,
)
from kvarts.units import as_duration

__all__ = ["story_of_block", "story_of_request"]


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
        self._made = 0
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
                    self._tell_gone()
                self._tell(line)
        self._tell_gone()
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

    def _tell_gone(self) -> None:
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
