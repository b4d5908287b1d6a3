"""What all checks of an audit share: the ledger, the requests as their events tell them, and the findings."""

from __future__ import annotations

from kvarts.audit.ledger import Findings, Ledger, LedgerGroup
from kvarts.audit.request_parts import KnownRequest, PageDigests, RequestParts
from kvarts.audit.tiers import EvictionsTold, OrderWatch, TierBooks
from kvarts.content import Content

__all__ = ["Facts"]

WHOLE_PAGES = (LedgerGroup("full", 1),)


class Facts:
    """Owner of the ledger of one engine and of the requests in it. The arguments are those of Auditor."""

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        *,
        groups: tuple[LedgerGroup, ...],
        keeps_all: bool,
        safe_first: bool,
        stores_go_first: bool,
        is_lru: bool,
        watch: OrderWatch | None,
        stored: TierBooks,
        at_branches: bool,
        plans_ahead: bool,
        finds_prefixes: bool,
    ) -> None:
        self.page_size = page_size
        self.has_groups = bool(groups)
        self.unit = "blocks" if groups else "pages"
        self.digests = PageDigests()
        self.found = Findings()
        self.evictions: EvictionsTold | None = None
        """The evictions that the engine names, where the ledger does not know its order."""
        if safe_first or not is_lru:
            books = stored if safe_first else None
            # An engine in which stores go first evicts the parts that tiers hold, whichever run the order names.
            named = None if stores_go_first else watch
            self.evictions = EvictionsTold(books, self.find_page, self.digests, named)
        choose = None if self.evictions is None else self.evictions.choose
        # Of parts in groups one may outlive that before it: a window goes on from what a full group has lost.
        self.ledger = Ledger(
            groups or WHOLE_PAGES, num_blocks, keeps_all=keeps_all, keeps_prefixes=not groups, choose=choose
        )
        if self.evictions is not None:
            self.evictions.ledger = self.ledger
        self.has_states = any(group.is_state for group in groups)
        self.finds_branches = at_branches and self.has_states
        self.page_blocks = sum(group.part_blocks for group in self.ledger.groups if not group.is_state)
        self.held = RequestParts(self.ledger, self.digests, self.found, page_size, names_private=self.has_groups)
        self.requests: dict[int, KnownRequest] = {}
        self.holders: dict[int, KnownRequest] = {}
        """The same requests by the owner of their content. The turns of a session share one, and run one at a time."""
        self.decoding: dict[int, None] = {}
        """In the order in which they computed their prompts: not that of admission, if long prompts are bounded."""
        self.plans_ahead = plans_ahead
        self.finds_prefixes = finds_prefixes
        self.lags = int(plans_ahead)

    def hit(self, known: KnownRequest, request: int, num_hit: int, reach: tuple[int, ...] | None) -> None:
        """Hold the longest resident prefix of a request, and compare its length and what each group could go on from.

        Law L4: the engine's hits are those of the ledger.
        """
        # The last token is always computed.
        num_pages = (known.known - 1) // self.page_size if self.finds_prefixes else 0
        digests = self.digests.upto(known.content, num_pages)[:num_pages]
        longest, by_group = self.ledger.reach(digests, self.page_size)
        if num_hit < longest:
            self.find(f"could be hit, {longest} pages far, and {num_hit} pages were", request, num_hit)
        if reach is not None and tuple(by_group) != reach:
            self.find(f"groups could go on from {by_group} pages, and the engine says {reach}", request)
        self.held.hit(known, num_hit)
        branch = self.ledger.branch(digests) if self.finds_branches else 0
        known.branch = branch * self.page_size if branch > num_hit else 0

    def close(self, request: int, known: KnownRequest, *, num_unread: int = 0, keeps_state: bool = False) -> None:
        """Release the parts of a request, which runs no longer."""
        self.decoding.pop(request, None)
        self.held.close(known, num_unread=num_unread, keeps_state=keeps_state)
        if request not in self.requests:
            self.holders.pop(known.content.owner, None)

    def digest(self, content: Content, page: int) -> bytes:
        """Return the digest of a page."""
        return self.digests.of(content, page)

    def find_page(self, what: str, group: int, digest: bytes) -> None:
        """Add a finding about the page of a digest."""
        self.find(f"{what}{self.ledger.words(group)}", *self.digests.place(digest))

    def find(self, what: str, request: int | None = None, page: int | None = None) -> None:
        """Add a finding."""
        self.found.add(what, request, page)
