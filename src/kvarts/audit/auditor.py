"""Checks an engine against a `PageLedger`: the same events, a second bookkeeping, and all differences.

The auditor knows of the engine only what its events say: which request arrived, was admitted with how many pages found,
was preempted or ended, which tokens were computed, when a step began and ended. From that it works out, page by page,
what every request must hold and what must be stored and evicted, and compares: with the page events that the engine
told, in order; with the pages the engine counts as used and cached; and, where these differ, page by page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvarts.audit.beside import PagesBeside
from kvarts.audit.comparison import PageAccount, find_different_pages, find_different_private
from kvarts.audit.digests import PageDigests
from kvarts.audit.drafts import DraftBooks
from kvarts.audit.finding import AuditError, Finding, Findings
from kvarts.audit.known import KnownRequest
from kvarts.audit.resident import LOST, ResidentPages
from kvarts.audit.signals import Block, LedgerError
from kvarts.audit.tiers import TierBooks
from kvarts.content import Content
from kvarts.events import (
    Admitted,
    Arrived,
    CacheCleared,
    Cancelled,
    ChunkComputed,
    CopiesRemoved,
    DraftJudged,
    DraftTaken,
    Event,
    Finished,
    LoadAwaited,
    LoadStarted,
    LoadWeighed,
    PagesPinned,
    PagesRemoved,
    PagesReserved,
    PagesStored,
    PagesUnpinned,
    Preemption,
    StepEnded,
    StepStarted,
    StoreStarted,
    TransferEnded,
)

__all__ = ["AuditError", "Auditor", "Finding", "PageAccount"]


class Auditor:
    """A reader of the events of one engine with `num_pages` pages, from its beginning. `findings` grows.

    `safe_first`: the engine evicts first what a tier below has as well. `is_lru`: which page goes is known; under any
    other order it is taken from what the engine says, and checked. `full_prompt_hits`: a load may bring a whole prompt.
    `page_counts`: answers what the engine says of its pages; where it is given, `observe` compares with it, and nothing
    else has to. Nothing is repaired.
    """

    wants_details = True

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        safe_first: bool = False,
        is_lru: bool = True,
        full_prompt_hits: bool = False,
        page_counts: Callable[[], PageAccount] | None = None,
    ) -> None:
        self._page_counts = page_counts
        self._found = Findings()
        self._books = TierBooks(full_prompt_hits=full_prompt_hits)
        self._digests = PageDigests()
        self._pages = ResidentPages(
            num_pages,
            page_size,
            self._digests,
            self._found,
            books=self._books if safe_first else None,
            is_told=safe_first or not is_lru,
        )
        self.ledger = self._pages.ledger
        self._leaders: dict[int, int] = {}
        """The request of each load under way."""
        self._page_size = page_size
        self._requests: dict[int, KnownRequest] = {}
        self._decoding: dict[int, None] = {}
        """In admission order."""
        self._completing: list[int] = []
        self._takers: list[int] = []
        """Decodes that still need their page in this step."""
        self._is_served = True
        """Whether the decodes of the step were asked whether they need one."""
        self._is_settled = True
        """Whether the decodes of the step have computed their tokens."""
        self._num_admitted = 0
        self._loaded: list[int] = []
        """Requests with a load that has ended since the last step began."""
        self._with_own_pages: set[int] = set()
        self._beside = PagesBeside(self._pages, self._digests, self._found)
        self._drafts = DraftBooks(self._pages, self._found, page_size)

    @property
    def findings(self) -> list[Finding]:
        """What does not add up, so far."""
        return self._found.all

    # Events -----------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Check `events` against the ledger. Raise AuditError for what does not add up, if page counts are compared."""
        self._pages.hear(events)
        for event in events:
            try:
                self._follow(event)
            except LedgerError as error:
                self._find(str(error))
        self._pages.compare_events()
        if self._page_counts is not None:
            self.compare(self._page_counts())

    def _follow(self, event: Event) -> None:
        match event:
            case PagesStored() if event.medium == "device":
                self._pages.hear_stored(event)
            case PagesStored():
                for page in range(event.start_page, event.end_page):
                    if not self._books.add(event.medium, self._digest(event.content, page)):
                        self._find(f"was stored in {event.medium} a second time", event.content.owner, page)
            case PagesRemoved() if event.medium != "device":
                for page in range(event.start_page, event.end_page):
                    if not self._books.remove(event.medium, self._digest(event.content, page)):
                        self._find(f"was removed from {event.medium}, and was not there", event.content.owner, page)
            case PagesRemoved() | CopiesRemoved():
                what = "copy removed"
                if isinstance(event, PagesRemoved):
                    what = LOST if event.is_held else "removed"
                self._pages.hear_gone(what, event)
            case CacheCleared():
                self._settle()
                self.ledger.clear()
            case StoreStarted():
                self._keep(event)
            case TransferEnded():
                self._end_transfer(event)
            case PagesReserved():
                self._settle()
                self._beside.reserve(event.num_pages)
            case PagesPinned():
                self._settle()
                self._beside.pin(event)
            case PagesUnpinned():
                # In a step, for a decode that found no free page, or for what is planned after the decodes.
                self._serve()
                self._beside.unpin(event.pin)
                self._serve_takers()
            case Arrived() if event.has_own_pages:
                self._with_own_pages.add(event.request)
            case Arrived():
                self._requests[event.request] = KnownRequest(event.content, event.num_prompt_tokens)
            case Finished() | Cancelled() if event.request in self._with_own_pages:
                self._with_own_pages.remove(event.request)
            case Admitted() | ChunkComputed() if event.request in self._with_own_pages:
                pass  # the pages it brought are reserved
            case StepStarted():
                self._pass_steps(event.step - 1)
                self._begin(event.step)
            case StepEnded():
                self._pass_steps(event.step)
                for request in self._completing:
                    if request in self._requests:
                        self._requests[request].known += 1
                        self._decoding[request] = None
                self._completing = []
            case Preemption():
                self._serve()
                self._preempt(event)
            case Admitted():
                self._settle()
                self._admit(event)
            case LoadWeighed():
                self._settle()
                self._weigh(event)
            case LoadAwaited():
                self._settle()
                self._await(event)
            case LoadStarted():
                self._settle()
                self._load(event)
            case ChunkComputed():
                self._settle()
                self._compute(event)
            case DraftTaken():
                self._settle()
                known = self._requests[event.request]
                is_decoding = event.request in self._decoding
                self._take(known, self._drafts.take(known, event, is_decoding=is_decoding))
            case DraftJudged():
                self._drafts.judge(self._requests[event.request], event)
            case Finished():
                self._release(event.request)
                del self._requests[event.request]
            case Cancelled():
                self._cancel(event.request)
            case _:
                pass

    # Steps ------------------------------------------------------------------------------------------------

    def _pass_steps(self, last: int) -> None:
        """Account for all steps up to `last`, which have been planned: in those not told of, requests only decoded."""
        self._settle()
        while self._found.step < last:
            self._begin(self._found.step + 1)
            self._settle()

    def _begin(self, step: int) -> None:
        self._found.step = step
        self._is_settled = self._is_served = False
        loaded, self._loaded = self._loaded, []
        for request in loaded:
            known = self._requests[request]
            assert known.load is not None
            self._pages.fill(known, known.load.stop)
            if known.is_cancelled:
                self._release(request)
                del self._requests[request]

    def _serve(self) -> None:
        """Take the pages of the decodes: after what loads brought, before all else and what is stored from now on."""
        if self._is_served:
            return
        self._is_served = True
        size = self._page_size
        requests = self._requests
        self._takers = [request for request in self._decoding if requests[request].computed % size == 0]
        self._serve_takers()

    def _serve_takers(self) -> None:
        takers = self._takers
        while takers and self.ledger.num_free:
            self._take(self._requests[takers.pop(0)], 1)

    def _settle(self) -> None:
        """Count the token that each decode of this step computes."""
        if self._is_settled:
            return
        self._serve()
        self._is_settled = True
        for request in self._takers:
            place = request, len(self._requests[request].blocks)
            self._find("needs a page, none is free, and no request was preempted", *place)
        self._takers = []
        filled = []
        for request in self._decoding:
            known = self._requests[request]
            self._drafts.look(request, known)
            known.computed += 1
            known.known += 1
            if known.computed % self._page_size == 0:
                filled.append(known)
        # Of two that fill the same page, the one that is further along and was admitted first goes first.
        filled.sort(key=lambda known: (-known.computed, known.admission))
        for known in filled:
            self._pages.fill(known, min(known.computed // self._page_size, known.content.num_known_pages))

    # Requests ---------------------------------------------------------------------------------------------

    def _admit(self, event: Admitted) -> None:
        known = self._requests[event.request]
        known.admission = self._num_admitted
        self._num_admitted += 1
        if known.load is None:
            self._hit(known, event.request, event.num_hit_pages)
            below = self._found_below(known, known.num_full)
            if below and known.offer != (known.num_full, ()):
                self._find(f"is in {below[0][0]} and was not loaded", event.request, known.num_full)
        elif event.num_hit_pages != known.load.stop:
            self._find(f"was hit {event.num_hit_pages} pages far; it had {known.load.stop}", event.request)
        known.load = known.offer = None
        self._check_awaited(known, event.request)
        # Where a load brought the whole prompt, its last token is computed again.
        known.computed = min(known.num_full * self._page_size, known.known - 1)

    def _hit(self, known: KnownRequest, request: int, num_hit_pages: int) -> None:
        blocks: list[Block] = []
        for page in range(num_hit_pages):
            copies = self._pages.copies.get(self._digest(known.content, page))
            if not copies:
                self._find("was hit and is not resident", request, page)
                break
            blocks.append(copies[0])
        limit = (known.known - 1) // self._page_size
        hit = len(blocks)
        if hit == num_hit_pages < limit and self._pages.copies.get(self._digest(known.content, hit)):
            self._find("is resident and was not hit", request, hit)
        if not self.ledger.use(blocks):
            self._find("was hit where there is no room for it", request, 0)
        known.blocks = blocks
        known.num_full = hit

    def _cancel(self, request: int) -> None:
        known = self._requests[request]
        if known.load is not None and (request in self._loaded or known.num_full < known.load.stop):
            known.is_cancelled = True  # a transfer still writes to its pages, or just did
            return
        self._release(request)
        self._completing = [other for other in self._completing if other != request]
        del self._requests[request]

    def _compute(self, event: ChunkComputed) -> None:
        known = self._requests[event.request]
        if event.start != known.computed or event.num_known_tokens != known.known:
            self._find(
                f"computes tokens from {event.start} of {event.num_known_tokens}, and had "
                f"{known.computed} of {known.known}",
                event.request,
                event.start // self._page_size,
            )
        self._take(known, -(-event.end // self._page_size) - len(known.blocks))
        known.computed = event.end
        self._pages.fill(known, min(event.end // self._page_size, known.content.num_known_pages))
        if event.end == event.num_known_tokens:
            self._completing.append(event.request)

    def _preempt(self, event: Preemption) -> None:
        if event.num_used_pages != self.ledger.num_used:
            self._find(f"request {event.asker} saw {event.num_used_pages} pages used; they are {self.ledger.num_used}")
        if event.num_pages_asked <= self.ledger.num_free:
            self._find(
                f"request {event.victim} gave way to {event.num_pages_asked} pages for {event.asker} that were free"
            )
        self._release(event.victim)
        known = self._requests[event.victim]
        if event.num_computed_tokens != known.computed:
            self._find(f"request {event.victim} lost {event.num_computed_tokens} tokens; it had {known.computed}")
        known.computed = 0
        if event.victim == event.asker and not event.model:
            # As in vLLM, that ends the step: decodes that were admitted later compute nothing, and chunks follow.
            for request in [other for other in self._decoding if self._requests[other].admission > known.admission]:
                del self._decoding[request]
        self._takers = [request for request in self._takers if request in self._decoding]
        self._serve_takers()

    def _release(self, request: int) -> None:
        known = self._requests[request]
        self._decoding.pop(request, None)
        self._pages.fill(known, known.computed // self._page_size)
        full, partial = known.blocks[: known.num_full], known.blocks[known.num_full :]
        known.blocks = []
        known.num_full = 0
        self.ledger.deref(full)
        self.ledger.destroy(partial)

    # Transfers --------------------------------------------------------------------------------------------

    def _found_below(self, known: KnownRequest, start: int) -> tuple[tuple[str, int], ...]:
        last_token = 0 if self._books.full_prompt_hits else 1
        limit = min((known.known - last_token) // self._page_size, known.content.num_known_pages)
        return self._books.found([self._digest(known.content, page) for page in range(start, limit)])

    def _load(self, event: LoadStarted) -> None:
        known = self._requests[event.request]
        self._hit(known, event.request, event.num_hit_pages)
        self._take(known, event.num_held_pages - len(known.blocks))
        below = self._found_below(known, event.num_hit_pages)
        if known.offer is not None and known.offer[0] == event.num_hit_pages:
            below = known.offer[1]
        known.offer = None
        self._check_awaited(known, event.request)
        self._leaders[event.transfer] = event.request
        if below != event.by_tier:
            self._find(f"{event.by_tier} pages are loaded, and {below} are below", event.request, event.num_hit_pages)
        known.load = range(event.num_hit_pages, event.num_hit_pages + sum(count for _, count in event.by_tier))

    def _weigh(self, event: LoadWeighed) -> None:
        """Take note that not all that is below is loaded; `offer` is what is, from which page on."""
        known = self._requests[event.request]
        below = self._found_below(known, event.num_hit_pages)
        if below != event.by_tier:
            self._find(f"{event.by_tier} pages were weighed, and {below} are below", event.request, event.num_hit_pages)
        if event.num_pages == 0 and event.load_ns <= event.worth_ns:
            what = f"is computed, though loading takes {event.load_ns} ns and is worth {event.worth_ns}"
            self._find(what, event.request, event.num_hit_pages)
        taken = []
        num_left = event.num_pages
        for medium, num_pages in below:
            if num_left:
                taken.append((medium, min(num_left, num_pages)))
                num_left -= taken[-1][1]
        known.offer = event.num_hit_pages, tuple(taken)

    def _await(self, event: LoadAwaited) -> None:
        """Check that the load brings the page that the request needs next."""
        known, page = self._requests[event.request], event.num_hit_pages
        leader = self._requests.get(self._leaders.get(event.transfer, -1))
        known.awaited = event.transfer
        if leader is None or leader.load is None or page not in leader.load:
            self._find(f"awaits transfer {event.transfer}, which does not bring it", event.request, page)
        elif self._digest(leader.content, page) != self._digest(known.content, page):
            self._find(f"awaits transfer {event.transfer}, which brings another page", event.request, page)

    def _check_awaited(self, known: KnownRequest, request: int) -> None:
        if known.awaited in self._leaders:
            self._find(f"goes on before transfer {known.awaited} has ended, which it awaits", request)
        known.awaited = -1

    def _keep(self, event: StoreStarted) -> None:
        if event.medium != "host":
            return  # from host memory, which keeps its own pages
        for content, start, end in event.runs:
            for page in range(start, end):
                if not self._pages.kept.keep(event.transfer, self._digest(content, page)):
                    self._find("is to be stored and is not resident", content.owner, page)

    def _end_transfer(self, event: TransferEnded) -> None:
        self._pages.kept.end(event.transfer)
        self._leaders.pop(event.transfer, None)
        if event.request >= 0:
            known = self._requests[event.request]
            assert known.load is not None
            known.load = range(known.load.start, known.load.start + event.num_good_pages)
            self._loaded.append(event.request)

    # Pages ------------------------------------------------------------------------------------------------

    def _take(self, known: KnownRequest, count: int) -> None:
        for _ in range(count):
            block = self._pages.take()
            if block is None:
                self._find("was taken where none is free", known.content.owner, len(known.blocks))
                return
            known.blocks.append(block)

    # Comparing --------------------------------------------------------------------------------------------

    def compare(self, account: PageAccount) -> None:
        """Compare what the engine says of its pages with the ledger. Raise AuditError for all findings so far."""
        ledger = self.ledger
        num_used = ledger.num_used
        num_cached = ledger.num_evictable
        if account.num_used != num_used or account.num_cached != num_cached:
            self._find(
                f"the engine counts {account.num_used} pages used and {account.num_cached} cached, "
                f"the ledger {num_used} and {num_cached}"
            )
            # Name the pages that the engine and the ledger do not hold alike.
            find_different_pages(account, ledger, self._pages.copies, self._digests, self._find)
            find_different_private(account, ledger, self._requests, self._find)
        num_reserved = self._beside.num_pages
        if account.num_reserved != num_reserved:
            self._find(f"the engine counts {account.num_reserved} pages reserved or pinned, the ledger {num_reserved}")
        if self.findings:
            raise AuditError(self.findings)
        self._digests.forget()

    def _digest(self, content: Content, page: int) -> bytes:
        return self._digests.of(content, page)

    def _find(self, what: str, request: int | None = None, page: int | None = None) -> None:
        self._found.add(what, request, page)
