"""The page events of an engine, one by one, beside the entries of the ledger. Laws L3 and L4."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.core.content import Content
from kvarts.core.events import CopiesRemoved, Event, PagesRemoved, PagesStored
from kvarts.proof.audit.facts import Facts
from kvarts.proof.audit.ledger import LOST, Happened
from kvarts.proof.audit.tiers import EvictionsTold, Told
from kvarts.proof.audit.turns import Turns

__all__ = ["ToldPages"]

WORDS = {LOST: "removed while a transfer kept it"}


class ToldPages:
    """Compares what the engine says about its pages with what happened in the ledger: each in its turn, and no other.

    A page is stored after the one before it (L3); it is found and evicted as in the ledger (L4).
    """

    def __init__(self, facts: Facts, turns: Turns) -> None:
        self._facts = facts
        self._turns = turns

    def look_ahead(self, evictions: EvictionsTold, events: Sequence[Event]) -> None:
        """Collect the evictions in `events` beforehand: their causes precede them in the same batch."""
        evictions.told.clear()
        for event in events:
            match event:
                case CopiesRemoved(copy=copy, is_dropped=False):
                    pass
                case PagesRemoved(medium="device", is_held=False, is_dropped=False):
                    copy = 0
                case _:
                    continue
            for page in range(event.end_page - 1, event.start_page - 1, -1):
                digest = self._facts.digest(event.content, page, event.group)
                evictions.told.append(Told(event.group or 0, digest, copy, event.content, page))

    def hear_stored(self, event: PagesStored) -> None:
        """Compare pages that became findable. Law L3: they are stored after the page before them."""
        if not self._facts.ledger.happened:
            self._turns.count_decodes()
            self._turns.name_filled(until_stored=True)
        if not self._facts.ledger.happened:
            self._turns.name_stalled()
        content, start = event.content, event.start_page
        if start:
            before = self._facts.digest(content, start - 1)
            parent = None if event.parent is None else self._facts.digest(event.parent, start - 1)
            if parent != before:
                other = (
                    "no page"
                    if parent is None
                    else "page {1} of request {0}".format(*self._facts.digests.place(parent))
                )
                self._facts.find(f"was stored after {other}, which does not precede it", content.owner, start)
        self._compare("stored", event.group, content, range(start, event.end_page), None)

    def hear_gone(self, event: PagesRemoved | CopiesRemoved) -> None:
        """Compare pages that are not findable any more, the last one first."""
        what = "dropped" if event.is_dropped else "evicted"
        copy = None
        if isinstance(event, CopiesRemoved):
            copy = event.copy
        elif event.is_held:
            what = LOST
        self._compare(what, event.group, event.content, range(event.end_page - 1, event.start_page - 1, -1), copy)

    def _compare(self, what: str, group: int | None, content: Content, pages: range, copy: int | None) -> None:
        """Compare an event about the parts of `pages` with the next entries of the ledger."""
        if group is None and not self._facts.has_groups:
            group = 0
        happened, num_resident, where = (
            self._facts.ledger.happened,
            self._facts.ledger.num_resident,
            self._facts.digests.where,
        )
        for page in pages:
            digest = self._facts.digest(content, page, group)
            if not happened and what != "stored":
                self._turns.begin_serving()
                self._turns.serve_takers(until_evicted=True)
            first = happened[0] if happened else None
            if first is None or first.name != digest or (first.what, first.group, first.copy) != (what, group, copy):
                self._find_told(what, group, content, page, copy)
                continue
            happened.popleft()
            if digest not in num_resident:
                where.pop(digest, None)

    def _find_told(self, what: str, group: int | None, content: Content, page: int, copy: int | None) -> None:
        """Report an event about a part that is not the ledger's next entry."""
        happened, request = self._facts.ledger.happened, content.owner
        said = f"was {WORDS.get(what, what)}{self._facts.ledger.words(group)}{_of(copy)}"
        copies = (
            []
            if group is None
            else self._facts.ledger.copies.get((group, self._facts.digest(content, page, group)), [])
        )
        if what != "stored" and copies and all(part.refs for part in copies):
            self._facts.find(f"{said} while it is in use", request, page)
        elif happened and what == happened[0].what:
            turn = happened.popleft()
            other, page_of_other = self._facts.digests.place(turn.name)
            was = f"page {page_of_other} of request {other}{self._facts.ledger.words(turn.group)}{_of(turn.copy)}"
            self._facts.find(f"{said}, and it was the turn of {was}", request, page)
        else:
            self._facts.find(f"{said}, says an event, and should not have been", request, page)

    def expect_nothing(self) -> None:
        """Report ledger entries for which no event was emitted."""
        happened = self._facts.ledger.happened
        while happened:
            self._find_untold(happened.popleft())

    def _find_untold(self, one: Happened) -> None:
        words = f"{self._facts.ledger.words(one.group)}{_of(one.copy)}"
        what = f"was {WORDS.get(one.what, one.what)}{words} and no event says so"
        self._facts.find(what, *self._facts.digests.place(one.name))


def _of(copy: int | None) -> str:
    return "" if copy is None else f" (copy {copy})"
