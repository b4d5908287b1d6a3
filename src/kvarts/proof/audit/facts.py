"""What all checks of an audit share: the ledger, the requests as their events tell them, and the findings.

`Beside` has the memory in use other than that of requests: pins, and blocks in reserve.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import NamedTuple

from kvarts.core.content import Content
from kvarts.core.events import PagesPinned, PagesReserved
from kvarts.proof.audit.ledger import Findings, Ledger, LedgerPart
from kvarts.proof.audit.request_parts import KnownRequest, PageDigests, RequestParts

__all__ = ["Beside", "EngineRules", "Facts"]


class EngineRules(NamedTuple):
    """How an engine finds and releases pages.

    `at_branches`: snapshots of states are also made where prompts leave others. `plans_ahead`: a step is planned while
    the step before it runs. A request that has ended then keeps its parts until the next plan is made; a page that a
    decode fills is published a step later, and a part that a window has passed is released a step later.
    `finds_prefixes`: requests find cached pages. `ends_steps`: a request that preempts itself ends the step for those
    admitted after it.
    """

    at_branches: bool = False
    plans_ahead: bool = False
    finds_prefixes: bool = True
    ends_steps: bool = True


class Facts:
    """Owner of the requests in the `ledger` of one engine. The other arguments are those of Auditor."""

    def __init__(
        self,
        ledger: Ledger,
        digests: PageDigests,
        found: Findings,
        page_size: int,
        *,
        has_groups: bool,
        rules: EngineRules,
    ) -> None:
        self.ledger = ledger
        self.digests = digests
        self.found = found
        self.page_size = page_size
        self.has_groups = has_groups
        self.unit = "blocks" if has_groups else "pages"
        self.has_states = has_groups and any(group.is_state for group in ledger.groups)
        self.finds_branches = rules.at_branches and self.has_states
        self.held = RequestParts(ledger, digests, found, page_size, names_private=has_groups)
        self.requests: dict[int, KnownRequest] = {}
        self.holders: dict[int, KnownRequest] = {}
        """The same requests by the owner of their content. The turns of a session share one, and run one at a time."""
        self.decoding: dict[int, None] = {}
        """In the order in which they computed their prompts: not that of admission, if long prompts are bounded."""
        self.plans_ahead = rules.plans_ahead
        self.finds_prefixes = rules.finds_prefixes
        self.ends_steps = rules.ends_steps
        self.lags = int(rules.plans_ahead)

    def hit(self, known: KnownRequest, request: int, num_hit: int, reach: tuple[int, ...] | None) -> None:
        """Hold the longest resident prefix of a request, and compare its length and what each group could go on from.

        Law L4: the engine's hits are those of the ledger.
        """
        # The last token is always computed.
        num_pages = (known.known - 1) // self.page_size if self.finds_prefixes else 0
        digests = self.digests.upto(known.content, num_pages)[:num_pages]
        longest, by_group = self.reach(known, num_pages)
        if num_hit < longest:
            self.find(f"could be hit, {longest} pages far, and {num_hit} pages were", request, num_hit)
        if reach is not None and tuple(by_group) != reach:
            self.find(f"groups could go on from {by_group} pages, and the engine says {reach}", request)
        self.held.hit(known, num_hit)
        branch = self.ledger.branch(digests) if self.finds_branches else 0
        known.branch = branch * self.page_size if branch > num_hit else 0

    def num_wanted(self, known: KnownRequest) -> int:
        """Return the blocks that a decode takes which begins a page: in groups whose blocks begin with it."""
        page = known.computed // self.page_size
        groups = [group for group in self.ledger.groups if not group.is_state and page % group.block_pages == 0]
        return sum([group.part_blocks * group.block_pages for group in groups])

    def reach(self, known: KnownRequest, num_pages: int) -> tuple[int, list[int]]:
        """Return what Ledger.reach says of the first `num_pages` pages of a request."""
        names = [
            self.digests.first(known.content, num_pages, group.block_pages)[:num_pages] for group in self.ledger.groups
        ]
        return self.ledger.reach(names, self.page_size)

    def close(self, request: int, known: KnownRequest, *, num_unread: int = 0, keeps_state: bool = False) -> None:
        """Release the parts of a request, which runs no longer."""
        self.decoding.pop(request, None)
        self.held.close(known, num_unread=num_unread, keeps_state=keeps_state)
        if request not in self.requests:
            self.holders.pop(known.content.owner, None)

    def digest(self, content: Content, page: int, group: int | None = None) -> bytes:
        """Return the digest of a page, as a group has it if its blocks are of several pages."""
        groups = self.ledger.groups
        is_known = group is not None and group < len(groups)
        return self.digests.of(content, page, groups[group or 0].block_pages if is_known else 1)

    def find_page(self, what: str, group: int, digest: bytes) -> None:
        """Add a finding about the page of a digest."""
        self.find(f"{what}{self.ledger.words(group)}", *self.digests.place(digest))

    def find(self, what: str, request: int | None = None, page: int | None = None) -> None:
        """Add a finding."""
        self.found.add(what, request, page)


class Beside:
    """Owner of the references of pins. Law L2: at rest they are all that is held."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._pinned: dict[int, list[list[LedgerPart]]] = {}
        """Parts of each pin, group by group, in order of position."""
        self._num_pins: Counter[LedgerPart] = Counter()
        """Pins of each part that has any."""
        self._num_pinned = 0
        """Blocks of these parts."""

    def reserve(self, event: PagesReserved) -> None:
        """Take blocks into reserve, or out of it."""
        if not self._facts.ledger.reserve(event.num_pages):
            self._facts.find(f"{self._facts.unit} were reserved where none is free")

    def num_blocks(self) -> int:
        """Return the number of blocks that are reserved or belong to pinned parts."""
        return self._facts.ledger.num_reserved + self._num_pinned

    def pin(self, event: PagesPinned) -> None:
        """Hold the parts from which every group can resume after the pinned pages: the copies that a lookup finds."""
        holder = KnownRequest(event.content, 0, len(self._facts.ledger.groups))
        self._facts.held.hit(holder, event.num_pages, how="pinned")
        self._pinned[event.pin] = [list(parts.values()) for parts in holder.parts]
        for part in chain(*self._pinned[event.pin]):
            self._num_pins[part] += 1
            if self._num_pins[part] == 1:
                self._num_pinned += self._facts.ledger.groups[part.group].part_blocks

    def unpin(self, pin: int) -> None:
        """Drop the references of a pin, the last page first. Another sequence may resume from its parts."""
        for parts in self._pinned.pop(pin):
            for part in reversed(parts):
                part.stays = True
                self._facts.ledger.release(part)
                self._num_pins[part] -= 1
                if not self._num_pins[part]:
                    del self._num_pins[part]
                    self._num_pinned -= self._facts.ledger.groups[part.group].part_blocks
