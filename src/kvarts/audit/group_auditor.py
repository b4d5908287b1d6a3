"""Checks an engine with KV groups against a `PartLedger`: the same events, a second bookkeeping, and all differences.

As `Auditor`, part by part. From what requests do it works out which parts they take, fill and release, which must be
found at an admission, and which are evicted, in what order; what a window gives back is taken from the events, and must
be what no later token sees, all of it. Compared are page events, one after the other, what a step says of itself, and
the parts of each group that the engine counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from kvarts.audit.digests import PageDigests
from kvarts.audit.finding import AuditError, Finding, Findings
from kvarts.audit.held_parts import HeldParts, PartHolder
from kvarts.audit.part_ledger import AuditedGroup, PartLedger
from kvarts.audit.parts_below import PartsBelow
from kvarts.audit.parts_beside import PartsBeside
from kvarts.content import Content
from kvarts.events import (
    Admitted,
    Arrived,
    AtRest,
    CacheCleared,
    Cancelled,
    ChunkComputed,
    CopiesRemoved,
    DraftJudged,
    DraftTaken,
    Event,
    Finished,
    LoadStarted,
    PagesPinned,
    PagesRemoved,
    PagesReserved,
    PagesStored,
    PagesUnpinned,
    PartsGivenBack,
    Preemption,
    StepDone,
    StepEnded,
    StepStarted,
    StoreStarted,
    TransferEnded,
)

__all__ = ["GroupAuditor", "PartAccount"]

OF_A_REQUEST = (Admitted, ChunkComputed, DraftTaken, DraftJudged, Preemption, Finished, Cancelled)
"""Of one that has arrived and has not ended."""


class PartAccount(Protocol):
    """What an engine says of its parts now."""

    def counts(self) -> tuple[int, ...]:
        """Return the parts used and the parts cached in each group, one pair a group."""


class GroupAuditor:
    """A reader of the events of one engine with `num_blocks` blocks, from its beginning. `findings` grows.

    `keeps_all`: what windows leave behind is kept; else only the tails of prompts and requests. `stores_go_first`: the
    device evicts next what was stored in a tier below. `part_counts`: answers
    what the engine says of its parts; where it is given, `observe` compares with it, and raises AuditError. Nothing is
    repaired.
    """

    wants_details = True

    def __init__(
        self,
        groups: tuple[AuditedGroup, ...],
        num_blocks: int,
        page_size: int,
        *,
        keeps_all: bool,
        stores_go_first: bool = False,
        part_counts: Callable[[], PartAccount] | None = None,
    ) -> None:
        self.ledger = PartLedger(groups, num_blocks, keeps_all=keeps_all)
        self._part_counts = part_counts
        self._page_size = page_size
        self._has_states = any(group.kind == "state" for group in groups)
        self._digests = PageDigests()
        self._found = Findings()
        self._held = HeldParts(self.ledger, self._digests, self._found, page_size)
        self._beside = PartsBeside(self.ledger, self._digests, self._found, page_size)
        self._below = PartsBelow(
            self._held, self.ledger, self._digests, self._found, page_size, goes_first=stores_go_first
        )
        self._with_own_pages: set[int] = set()
        """Requests that bring their pages along: these are reserved."""
        self._requests: dict[int, PartHolder] = {}
        self._holders: dict[int, PartHolder] = {}
        """The same by the owners of contents: turns of a session have one, and one at a time is under way."""
        self._decoding: dict[int, None] = {}
        """In admission order."""
        self._completing: list[int] = []
        self._takers: list[int] = []
        """Decodes that still need parts for a page in this step."""
        self._is_served = self._is_settled = True
        """Whether the decodes of the step were asked whether they need parts, and have computed their tokens."""
        self._has_ended = False
        """Whether a step has ended, and what its requests hold was not looked at since."""
        self._mark: tuple[int, tuple[int, ...]] = -1, ()
        """Blocks, and parts of each group, when most were in use in this step."""

    @property
    def findings(self) -> list[Finding]:
        """What does not add up, so far."""
        return self._found.all

    # Events -----------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Check `events` against the ledger. Raise AuditError for what does not add up, if counts are compared."""
        for event in events:
            self._follow(event)
        self._look_at_held()
        self._expect_nothing()
        if self._part_counts is not None:
            counts, mine = self._part_counts().counts(), self.ledger.counts()
            if counts != mine:
                self._find(f"the engine counts {counts} parts used and cached, group by group; the ledger {mine}")
            if self._found.all:
                raise AuditError(self._found.all)
        self._digests.forget()

    def _follow(self, event: Event) -> None:
        match event:
            case PagesStored() | PagesRemoved() if event.medium != "device":
                self._below.hear(event)
                return
            case PagesStored():
                self._hear_stored(event)
                return
            case PagesRemoved() | CopiesRemoved():
                self._hear_gone(event)
                return
            case PartsGivenBack():
                self._expect_nothing()
                self._give_back(event)
                return
            case _:
                self._expect_nothing()
        match event:
            case DraftJudged() | Finished() | Cancelled() | Preemption() | TransferEnded():
                pass
            case _:
                self._look_at_held()
        request = event.victim if isinstance(event, Preemption) else getattr(event, "request", None)
        if request in self._with_own_pages and not isinstance(event, Arrived):
            if isinstance(event, Finished | Cancelled):
                self._with_own_pages.remove(request)
            elif isinstance(event, ChunkComputed):
                self._serve()
            return
        if isinstance(event, OF_A_REQUEST) and request not in self._requests:
            self._find(f"is said to be {type(event).__name__}, and is not there", request)
            return
        match event:
            case Arrived() if event.has_own_pages:
                self._with_own_pages.add(event.request)
            case Arrived():
                num_groups = len(self.ledger.groups)
                holder = PartHolder(event.content, event.num_prompt_tokens, num_groups)
                self._requests[event.request] = self._holders[event.content.owner] = holder
            case StepStarted():
                self._pass_steps(event.step - 1)
                self._begin(event.step)
                self._below.drop_ended()
            case StoreStarted():
                self._below.begin_store(event)
            case LoadStarted():
                self._settle()
                self._below.begin_load(self._requests[event.request], event)
            case TransferEnded():
                self._settle()
                self._below.end(event)
            case Preemption():
                self._serve()
                self._preempt(event)
            case Admitted():
                self._settle()
                self._admit(event)
            case ChunkComputed():
                self._settle()
                self._compute(event)
            case StepDone():
                self._pass_steps(event.step - 1)
                if self._found.step < event.step:
                    self._begin(event.step)
                self._settle()
                self._check_step(event)
            case StepEnded():
                self._pass_steps(event.step)
                self._end_step()
            case DraftTaken():
                self._settle()
                self._held.draft(self._requests[event.request], event, is_decoding=event.request in self._decoding)
            case DraftJudged():
                self._held.judge(self._requests[event.request], event)
            case Finished():
                self._finish(event.request)
            case Cancelled():
                self._cancel(event.request)
            case PagesReserved():
                self._settle()
                self._beside.reserve(event.num_pages)
            case PagesPinned():
                self._settle()
                self._beside.pin(event)
            case PagesUnpinned():
                # In a step, for a decode that found nothing free, or for what is planned after the decodes.
                self._serve()
                self._beside.unpin(event.pin)
                self._serve_takers()
            case CacheCleared():
                self._settle()
                self.ledger.clear()
            case AtRest():
                num_left = self.ledger.num_used - self._beside.num_blocks - self._below.num_blocks
                if num_left:
                    self._find(f"{num_left} blocks are in use, and no request runs")
            case _:
                pass

    # Page events ------------------------------------------------------------------------------------------

    def _hear_stored(self, event: PagesStored) -> None:
        if not self.ledger.happened:
            self._settle()
        content, start = event.content, event.start_page
        if start:
            before = self._digest(content, start - 1)
            if event.parent is None or self._digest(event.parent, start - 1) != before:
                self._find("was stored after a page that does not precede it", content.owner, start)
        for page in range(start, event.end_page):
            self._compare(("stored", event.group, self._digest(content, page), None), content.owner, page)

    def _hear_gone(self, event: PagesRemoved | CopiesRemoved) -> None:
        if not self.ledger.happened:
            self._serve()
        what = "dropped" if event.is_dropped else "evicted"
        copy = event.copy if isinstance(event, CopiesRemoved) else None
        content = event.content
        for page in range(event.end_page - 1, event.start_page - 1, -1):
            told = what, event.group, self._digest(content, page), copy
            self._compare(told, content.owner, page)

    def _compare(self, told: tuple[str, int | None, bytes, int | None], request: int, page: int) -> None:
        """Compare what an event says of a part with what comes next in the ledger."""
        happened = self.ledger.happened
        what, group, digest, copy = told
        if happened and happened[0] == told:
            happened.popleft()
            if digest not in self.ledger.num_resident:
                self._digests.where.pop(digest, None)
            return
        said = f"was {what} in {self.ledger.name(group)}{_of(copy)}"
        copies = [] if group is None else self.ledger.copies.get((group, digest), [])
        if what != "stored" and copies and all(part.refs for part in copies):
            self._find(f"{said} while it is in use", request, page)
        elif happened and what == happened[0][0]:
            _, group, digest, copy = happened.popleft()
            other, page_of_other = self._digests.place(digest)
            was = f"page {page_of_other} of request {other} in {self.ledger.name(group)}{_of(copy)}"
            self._find(f"{said}, and it was the turn of {was}", request, page)
        else:
            self._find(f"{said}, says an event, and should not have been", request, page)

    def _expect_nothing(self) -> None:
        """Find what has happened in the ledger and was not told."""
        happened = self.ledger.happened
        for what, group, digest, copy in happened:
            self._find(
                f"was {what} in {self.ledger.name(group)}{_of(copy)} and no event says so", *self._digests.place(digest)
            )
        happened.clear()

    # Steps ------------------------------------------------------------------------------------------------

    def _pass_steps(self, last: int) -> None:
        """Account for all steps up to `last`: in those not told of, requests only decoded."""
        self._settle()
        while self._found.step < last:
            self._begin(self._found.step + 1)
            self._settle()

    def _begin(self, step: int) -> None:
        self._found.step = step
        self._is_settled = self._is_served = False
        self._mark = -1, ()

    def _serve(self) -> None:
        """Take the parts of the decodes that begin a page: before all else."""
        if self._is_served:
            return
        self._is_served = True
        size = self._page_size
        self._takers = [request for request in self._decoding if self._requests[request].computed % size == 0]
        self._serve_takers()

    def _serve_takers(self) -> None:
        groups = self.ledger.groups
        num_blocks = sum(group.part_blocks for group in groups if group.kind != "state")
        while self._takers and num_blocks <= self.ledger.num_free:
            known = self._requests[self._takers.pop(0)]
            self._held.take_pages(known, known.computed + 1)

    def _settle(self) -> None:
        """Count the token that each decode of this step computes."""
        if self._is_settled:
            return
        self._serve()
        self._is_settled = True
        for request in self._takers:
            page = self._requests[request].computed // self._page_size
            self._find("needs parts, they are not free, and no request was preempted", request, page)
        self._takers = []
        for request in self._decoding:
            known = self._requests[request]
            known.computed += 1
            known.known += 1
        # Of two that fill a page, the one that is further along goes first, then the one admitted first.
        for known in sorted((self._requests[request] for request in self._decoding), key=lambda known: -known.computed):
            self._held.name(known)

    def _end_step(self) -> None:
        for request in self._completing:
            self._requests[request].known += 1
            self._decoding[request] = None
        self._completing = []
        self._has_ended = True

    def _look(self) -> None:
        num_used = self.ledger.num_used
        if num_used > self._mark[0]:
            self._mark = num_used, self.ledger.counts()

    def _check_step(self, event: StepDone) -> None:
        self._look()
        parts = event.tiers[-2 * len(self.ledger.groups) :]
        if (event.num_used, parts) != self._mark:
            self._find(
                f"the step counts {event.num_used} blocks used, and parts {parts}; the ledger "
                f"{self._mark[0]} and {self._mark[1]}"
            )

    # Requests ---------------------------------------------------------------------------------------------

    def _admit(self, event: Admitted) -> None:
        known, ledger, size = self._requests[event.request], self.ledger, self._page_size
        if known.is_running:
            self._find("was admitted, and runs already", event.request)
        # The last token is always computed.
        if event.by_tier is not None:
            self._admit_loaded(known, event)
            return
        digests = [self._digest(known.content, page) for page in range((known.known - 1) // size)]
        longest, by_group = ledger.reach(digests, size)
        num_hit = event.num_hit_pages
        if num_hit < longest:
            self._find(f"every group could go on from {longest} pages, and {num_hit} were hit", event.request, num_hit)
        if tuple(by_group) != event.reach:
            self._find(f"groups could go on from {by_group} pages, and the engine says {event.reach}", event.request)
        for index, group in enumerate(ledger.groups):
            for page in chain(*group.needed(num_hit * size, size)):
                copies = ledger.copies.get((index, digests[page])) if page < len(digests) else None
                if not copies:
                    self._find(f"was hit, and {self.ledger.name(index)} has no part of it", event.request, page)
                    continue
                ledger.hold(copies[0])
                known.parts[index][page] = copies[0]
        known.num_named = num_hit
        known.computed = num_hit * size
        known.is_running = True

    def _admit_loaded(self, known: PartHolder, event: Admitted) -> None:
        num_pages = self._below.admit(event.request)
        if event.num_hit_pages != num_pages:
            self._find(f"{num_pages} pages were loaded and found, and {event.num_hit_pages} were hit", event.request)
        known.num_named = num_pages
        known.computed = num_pages * self._page_size
        known.is_running = True

    def _compute(self, event: ChunkComputed) -> None:
        known, size = self._requests[event.request], self._page_size
        if (event.start, event.num_known_tokens) != (known.computed, known.known) or not known.is_running:
            self._find(
                f"computes tokens from {event.start} of {event.num_known_tokens}, and had {known.computed} of "
                f"{known.known}",
                event.request,
                event.start // size,
            )
        if not event.start < event.end <= event.num_known_tokens:
            self._find(f"computes tokens {event.start} to {event.end} of {event.num_known_tokens}", event.request)
        known.computed = event.start
        is_end = event.end == event.num_known_tokens
        page_end = event.end // size * size
        if is_end and self._has_states and known.computed < page_end < event.end:
            self._held.grow(known, page_end, is_end=True)
        self._held.grow(known, event.end, is_end=is_end)
        if is_end:
            self._completing.append(event.request)

    def _give_back(self, event: PartsGivenBack) -> None:
        known = self._holders.get(event.content.owner)
        index, request = event.group, event.content.owner
        if known is None or index >= len(known.parts):
            self._find(f"was given back in {self.ledger.name(index)}, and was not held", request, event.start_page)
            return
        needed = self.ledger.groups[index].needed(known.computed, self._page_size)
        for page in range(event.end_page - 1, event.start_page - 1, -1):
            part = known.parts[index].get(page)
            if part is None:
                self._find(f"was given back in {self.ledger.name(index)}, and was not held", request, page)
                continue
            if any(page in pages for pages in needed):
                self._find(f"was given back in {self.ledger.name(index)}, and a later token sees it", request, page)
            self.ledger.release(known.parts[index].pop(page))

    def _look_at_held(self) -> None:
        """Find what running requests hold though no later token sees it. After a step this is the last thing."""
        if not self._has_ended:
            return
        self._has_ended = False
        for known in self._requests.values():
            if known.is_running:
                self._held.look_at(known)

    def _preempt(self, event: Preemption) -> None:
        ledger, known = self.ledger, self._requests[event.victim]
        order = list(self._decoding)
        if event.victim == event.asker and event.victim in self._decoding and not event.model:
            # As in vLLM, that ends the step: decodes that were admitted later compute nothing, and chunks follow.
            for request in order[order.index(event.victim) + 1 :]:
                del self._decoding[request]
        self._look()
        if not known.is_running:
            self._find("was preempted, and does not run", event.victim)
        if event.num_used_pages != ledger.num_used:
            self._find(f"request {event.asker} saw {event.num_used_pages} blocks used; they are {ledger.num_used}")
        if event.num_pages_asked <= ledger.num_free:
            self._find(
                f"request {event.victim} gave way to {event.num_pages_asked} blocks for {event.asker} that were free"
            )
        if event.num_computed_tokens != known.computed:
            self._find(f"request {event.victim} lost {event.num_computed_tokens} tokens; it had {known.computed}")
        self._close(event.victim, known)
        known.computed = 0
        self._takers = [request for request in self._takers if request in self._decoding]
        self._serve_takers()

    def _finish(self, request: int) -> None:
        known = self._requests.pop(request)
        if request not in self._decoding:
            self._find(f"finished with {known.computed} of {known.known} known tokens computed", request)
        self._close(request, known)

    def _cancel(self, request: int) -> None:
        self._completing = [other for other in self._completing if other != request]
        known = self._requests.pop(request)
        if self._below.cancel(request):
            self._holders.pop(known.content.owner, None)
        else:
            self._close(request, known)

    def _close(self, request: int, known: PartHolder) -> None:
        self._decoding.pop(request, None)
        self._held.close(known)
        if request not in self._requests:
            self._holders.pop(known.content.owner, None)

    # Words ------------------------------------------------------------------------------------------------

    def _digest(self, content: Content, page: int) -> bytes:
        return self._digests.of(content, page)

    def _find(self, what: str, request: int | None = None, page: int | None = None) -> None:
        self._found.add(what, request, page)


def _of(copy: int | None) -> str:
    return "" if copy is None else f", copy {copy}"
