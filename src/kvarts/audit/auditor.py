"""Checks an engine against a `Ledger`: a second bookkeeping of the same events, which reports every difference.

The auditor knows the engine only by its events: requests that arrived, were admitted with a number of hit pages, were
preempted or ended; tokens that were computed; steps that began and ended. From these it derives, part by part, the
parts that every request must hold, and the parts that must be found, stored and evicted, in order. Releases by windows
are taken from the events and must be exactly the parts that no later token sees. The auditor compares the result with
the page events of the engine, one by one, with the counts of each step, and with the engine's account of its memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from kvarts.audit.ledger import (
    LOST,
    AuditError,
    Finding,
    Findings,
    Happened,
    Keep,
    Ledger,
    LedgerError,
    LedgerGroup,
    LedgerPart,
)
from kvarts.audit.request_parts import KnownRequest, PageDigests, RequestParts
from kvarts.audit.tiers import EvictionsTold, OrderWatch, PartsBelow, TierBooks, Told
from kvarts.columns import Column
from kvarts.content import Content
from kvarts.events import (
    Admitted,
    Arrived,
    AtRest,
    CacheCleared,
    Cancelled,
    ChunkComputed,
    ChunkPlanned,
    CopiesRemoved,
    DecodesStalled,
    DraftJudged,
    DraftTaken,
    Event,
    Finished,
    LoadAwaited,
    LoadGivenUp,
    LoadStarted,
    LoadUsed,
    LoadWeighed,
    PagesPinned,
    PagesRemoved,
    PagesReserved,
    PagesStored,
    PagesUnpinned,
    PartsGivenBack,
    Preemption,
    PromptHeld,
    PromptReleased,
    StepDone,
    StepEnded,
    StepStarted,
    StoreStarted,
    TransferEnded,
)
from kvarts.kv.cache import Cache

__all__ = [
    "AuditError",
    "Auditor",
    "Finding",
    "expect_same",
    "find_different_pages",
    "find_different_private",
]

OF_A_REQUEST = (
    Admitted,
    ChunkComputed,
    ChunkPlanned,
    DecodesStalled,
    DraftTaken,
    DraftJudged,
    Preemption,
    Finished,
    Cancelled,
    LoadAwaited,
    LoadGivenUp,
    LoadStarted,
    LoadUsed,
    LoadWeighed,
    PromptHeld,
    PromptReleased,
)
"""Events that only a request between its arrival and its end can have."""
WORKER = "worker"
"""The medium of prompts that another engine sends."""
WHOLE_PAGES = (LedgerGroup("full", 1),)
WORDS = {LOST: "removed while a transfer kept it"}


class Auditor:
    """A reader of the events of one engine with `num_blocks` blocks, from its beginning. `findings` grows.

    `groups`: its KV groups; by default pages are whole, and a block is a page. `keeps_all`: parts released by windows
    stay cached; otherwise only the tails of prompts and requests do. `safe_first`: the engine evicts first the pages
    that a tier below also holds; `stores_go_first`: with KV groups, it evicts next the parts stored below. `is_lru`:
    the eviction order is known; under any other order, the evicted part is taken from the events and checked. `watch`:
    records the runs that such an order named. `tiers`: names of the tiers below, the fastest first. `full_prompt_hits`:
    a load may bring a whole prompt. `at_branches`: snapshots of states are also made where prompts leave others.
    `plans_ahead`: a step is planned while the step before it runs. A request that has ended then keeps its parts until
    the next plan is made; a page that a decode fills is published a step later, and a part that a window has passed is
    released a step later. `finds_prefixes`: requests find cached pages. `loads_have_turns`: loaded pages become
    findable when their request has its turn, and not before the step after their load. `account`: returns the engine's
    account of its memory; if given, `observe` compares it with the ledger and raises AuditError. Nothing is repaired.
    """

    wants_details = True

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        *,
        groups: tuple[LedgerGroup, ...] = (),
        keeps_all: bool = True,
        safe_first: bool = False,
        stores_go_first: bool = False,
        is_lru: bool = True,
        watch: OrderWatch | None = None,
        tiers: Sequence[str] = ("host", "disk"),
        full_prompt_hits: bool = False,
        at_branches: bool = False,
        plans_ahead: bool = False,
        finds_prefixes: bool = True,
        loads_have_turns: bool = False,
        account: Callable[[], Cache] | None = None,
    ) -> None:
        self._account = account
        self._watch = watch
        self._loads_have_turns = loads_have_turns
        self._page_size = page_size
        self._has_groups = bool(groups)
        self._unit = "blocks" if groups else "pages"
        self._digests = PageDigests()
        self._found = Findings()
        self._first_tier = tiers[0] if tiers else ""
        self._books = TierBooks(tiers, full_prompt_hits=full_prompt_hits)
        self._evictions: EvictionsTold | None = None
        if safe_first or not is_lru:
            books = self._books if safe_first else None
            # An engine in which stores go first evicts the parts that tiers hold, whichever run the order names.
            named = None if stores_go_first else watch
            self._evictions = EvictionsTold(books, self._find_page, self._digests, named)
        choose = None if self._evictions is None else self._evictions.choose
        # Of parts in groups one may outlive that before it: a window goes on from what a full group has lost.
        self.ledger = Ledger(
            groups or WHOLE_PAGES, num_blocks, keeps_all=keeps_all, keeps_prefixes=not groups, choose=choose
        )
        if self._evictions is not None:
            self._evictions.ledger = self.ledger
        self._has_states = any(group.is_state for group in groups)
        self._finds_branches = at_branches and self._has_states
        self._page_blocks = sum(group.part_blocks for group in self.ledger.groups if not group.is_state)
        self._held = RequestParts(self.ledger, self._digests, self._found, page_size, names_private=self._has_groups)
        self._below = PartsBelow(
            self._held,
            self.ledger,
            self._digests,
            self._found,
            page_size,
            tiers=tiers,
            goes_first=stores_go_first,
            has_turns=loads_have_turns,
        )
        self._pinned: dict[int, list[list[LedgerPart]]] = {}
        """Parts of each pin, group by group, in order of position."""
        self._num_pins: Counter[LedgerPart] = Counter()
        """Pins of each part that has any."""
        self._num_pinned = 0
        """Blocks of these parts."""
        self._kept: dict[int, list[Keep]] = {}
        """Pages that each transfer reads."""
        self._leaders: dict[int, int] = {}
        """Requests of the loads in progress, by transfer."""
        self._loaded: list[int] = []
        """Requests with a load that has ended since the last step began."""
        self._used: dict[int, int] = {}
        """Transfers under way that the last step used, and their pages: they must end before the next one begins."""
        self._copies: dict[int, int] = {}
        """Requests whose prompt another engine sends, by the number of the copy, until it has arrived."""
        self._received: set[int] = set()
        """Requests that wait with the pages of a prompt that another engine has sent."""
        self._with_own_pages: set[int] = set()
        """Requests that bring their own pages, which are reserved."""
        self._requests: dict[int, KnownRequest] = {}
        self._holders: dict[int, KnownRequest] = {}
        """The same requests by the owner of their content. The turns of a session share one, and run one at a time."""
        self._num_admitted = 0
        self._decoding: dict[int, None] = {}
        """In the order in which they computed their prompts: not that of admission, if long prompts are bounded."""
        self._completing: list[int] = []
        self._plans_ahead = plans_ahead
        self._finds_prefixes = finds_prefixes
        self._lags = int(plans_ahead)
        self._filled: deque[tuple[int, KnownRequest]] = deque()
        """Decodes that fill a page in this step and have not published it, with the tokens that they compute."""
        self._stalled: list[KnownRequest] = []
        """Decodes of the last step that compute nothing in this one, if pages are published late."""
        self._ended: list[int] = []
        """Requests that have generated their last token and keep their parts, if steps are planned ahead."""
        self._takers: list[int] = []
        """Decodes that still need parts for a page in this step."""
        self._is_served = self._is_settled = True
        """Whether the decodes of the step have taken the parts they need, and have computed their tokens."""
        self._last_looked = -1
        """The last step after which the parts held by its requests were checked."""
        self._mark: tuple[int, tuple[int, ...]] = -1, ()
        """Used blocks, and parts of each group, at the peak of this step."""

    @property
    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._found.all

    # Events -----------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Check `events` against the ledger. With an account, raise AuditError if there are findings."""
        if self._evictions is not None:
            self._look_ahead(self._evictions, events)
        for event in events:
            try:
                self._follow(event)
            except LedgerError as error:
                self._find(str(error))
        self._expect_nothing()
        if self._account is not None:
            self.compare(self._account())
        if self._watch is not None:
            self._watch.named.clear()
        self._digests.forget()

    def _look_ahead(self, evictions: EvictionsTold, events: Sequence[Event]) -> None:
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
            digests = self._digests.upto(event.content, event.end_page)
            for page in range(event.end_page - 1, event.start_page - 1, -1):
                evictions.told.append(Told(event.group or 0, digests[page], copy, event.content, page))

    def _follow(self, event: Event) -> None:
        match event:
            case PagesStored(medium="device"):
                self._hear_stored(event)
                return
            case PagesStored() | PagesRemoved() if event.medium != "device":
                if self._has_groups:
                    self._below.hear(event)
                else:
                    self._hear_below(event)
                return
            case PagesRemoved() | CopiesRemoved():
                self._hear_gone(event)
                return
            case PartsGivenBack():
                self._serve_before(event.content.owner)
                self._expect_nothing()
                self._give_back(event)
                return
            case _:
                self._expect_nothing()
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
                known = KnownRequest(event.content, event.num_prompt_tokens, len(self.ledger.groups), event.max_tokens)
                known.stops = event.stops and self._lags > 0
                known.known += event.num_generated
                self._requests[event.request] = self._holders[event.content.owner] = known
            case StepStarted():
                self._pass_steps(event.step - 1)
                self._begin(event.step)
                self._below.drop_ended()
            case StepDone():
                self._pass_steps(event.step - 1)
                if self._found.step < event.step:
                    self._begin(event.step)
                self._settle()
                self._name_stalled()
                self._check_step(event)
            case StepEnded():
                self._pass_steps(event.step)
                self._end_step()
            case Preemption():
                self._serve()
                self._preempt(event)
            case ChunkPlanned():
                self._serve()
                self._held.take_pages(self._requests[event.request], event.end)
            case DecodesStalled():
                self._stall_after(self._requests[event.request])
            case DraftJudged():
                self._held.judge(self._requests[event.request], event)
            case Finished():
                if self._plans_ahead:
                    self._settle()
                    self._name_stalled()
                    self._look()
                self._finish(event.request)
            case Cancelled():
                if self._plans_ahead:
                    self._settle()
                    self._look()
                self._cancel(event.request)
            case PromptHeld():
                self._hold(event.request)
            case PromptReleased():
                self._close(event.request, self._requests.pop(event.request))
            case TransferEnded() if event.transfer in self._copies:
                self._receive(event)
            case PagesUnpinned():
                # In a step: for a decode that found no free page, or for requests planned after the decodes.
                self._serve()
                self._unpin(event.pin)
            case StoreStarted() if self._has_groups:
                self._below.begin_store(event)
            case StoreStarted():
                self._keep(event)
            case TransferEnded(is_given_up=True):
                # As a pin that is given up.
                self._serve()
                if self._has_groups:
                    self._below.end(event)
                else:
                    self._end_transfer(event)
            case TransferEnded() if self._has_groups:
                self._settle()
                if event.transfer in self._used:
                    if event.num_good_blocks < (num_blocks := self._used.pop(event.transfer)):
                        what = f"used {num_blocks} loaded blocks, and {event.num_good_blocks} arrived"
                        self._find(what, event.request)
                else:
                    self._below.end(event)
            case TransferEnded():
                self._end_transfer(event)
            case AtRest():
                self._rest()
            case _:
                self._follow_settled(event)

    def _follow_settled(self, event: Event) -> None:
        """Follow an event that happens after the decodes of a step have computed their tokens."""
        match event:
            case Admitted():
                self._settle()
                self._admit(event)
            case LoadWeighed() if not self._has_groups:
                self._settle()
                self._weigh(event)
            case LoadAwaited() if not self._has_groups:
                self._settle()
                self._await(event)
            case LoadStarted() if [medium for medium, _ in event.by_tier] == [WORKER]:
                self._settle()
                self._reserve(event)
            case LoadStarted() if self._has_groups:
                self._settle()
                self._below.begin_load(self._requests[event.request], event)
            case LoadStarted():
                self._settle()
                self._load(event)
            case LoadGivenUp() if self._has_groups:  # whole pages are promised until all known tokens have theirs
                self._settle()
                self._below.give_up(event.request)
            case LoadUsed() if self._has_groups and self._loads_have_turns:
                self._settle()
                self._below.turn(event.request)
            case LoadUsed() if self._has_groups:
                self._settle()
                self._used[event.transfer] = self._below.use(event.request)
            case LoadUsed():
                self._settle()
                self._use(event)
            case ChunkComputed():
                self._count_decodes()
                known = self._requests[event.request]
                self._name_filled(known.admission if known.is_running else None)
                self._compute(event)
            case DraftTaken():
                self._settle()
                self._held.draft(self._requests[event.request], event, is_decoding=event.request in self._decoding)
            case PagesReserved():
                self._settle()
                if not self.ledger.reserve(event.num_pages):
                    self._find(f"{self._unit} were reserved where none is free")
            case PagesPinned():
                self._settle()
                self._pin(event)
            case CacheCleared():
                self._settle()
                self.ledger.clear()
            case _:
                pass

    # Page events ------------------------------------------------------------------------------------------

    def _hear_stored(self, event: PagesStored) -> None:
        if not self.ledger.happened:
            self._count_decodes()
            self._name_filled(until_stored=True)
        if not self.ledger.happened:
            self._name_stalled()
        content, start = event.content, event.start_page
        if start:
            before = self._digest(content, start - 1)
            parent = None if event.parent is None else self._digest(event.parent, start - 1)
            if parent != before:
                other = "no page" if parent is None else "page {1} of request {0}".format(*self._digests.place(parent))
                self._find(f"was stored after {other}, which does not precede it", content.owner, start)
        self._compare("stored", event.group, content, range(start, event.end_page), None)

    def _hear_gone(self, event: PagesRemoved | CopiesRemoved) -> None:
        what = "dropped" if event.is_dropped else "evicted"
        copy = None
        if isinstance(event, CopiesRemoved):
            copy = event.copy
        elif event.is_held:
            what = LOST
        self._compare(what, event.group, event.content, range(event.end_page - 1, event.start_page - 1, -1), copy)

    def _hear_below(self, event: PagesStored | PagesRemoved) -> None:
        """Record pages that a tier below has stored or removed."""
        content, medium = event.content, event.medium
        for page in range(event.start_page, event.end_page):
            digest = self._digest(content, page)
            if isinstance(event, PagesStored):
                if not self._books.add(medium, digest):
                    self._find(f"was stored in {medium} a second time", content.owner, page)
            elif not self._books.remove(medium, digest):
                self._find(f"was removed from {medium}, and was not there", content.owner, page)

    def _compare(self, what: str, group: int | None, content: Content, pages: range, copy: int | None) -> None:
        """Compare an event about the parts of `pages` with the next entries of the ledger."""
        if group is None and not self._has_groups:
            group = 0
        digests = self._digests.upto(content, max(pages, default=-1) + 1)
        happened, num_resident, where = self.ledger.happened, self.ledger.num_resident, self._digests.where
        for page in pages:
            digest = digests[page]
            if not happened and what != "stored":
                self._begin_serving()
                self._serve_takers(until_evicted=True)
            first = happened[0] if happened else None
            if first is None or first.name != digest or (first.what, first.group, first.copy) != (what, group, copy):
                self._find_told(what, group, content, page, copy)
                continue
            happened.popleft()
            if digest not in num_resident:
                where.pop(digest, None)

    def _find_told(self, what: str, group: int | None, content: Content, page: int, copy: int | None) -> None:
        """Report an event about a part that is not the ledger's next entry."""
        happened, request = self.ledger.happened, content.owner
        said = f"was {WORDS.get(what, what)}{self.ledger.words(group)}{_of(copy)}"
        copies = [] if group is None else self.ledger.copies.get((group, self._digest(content, page)), [])
        if what != "stored" and copies and all(part.refs for part in copies):
            self._find(f"{said} while it is in use", request, page)
        elif happened and what == happened[0].what:
            turn = happened.popleft()
            other, page_of_other = self._digests.place(turn.name)
            was = f"page {page_of_other} of request {other}{self.ledger.words(turn.group)}{_of(turn.copy)}"
            self._find(f"{said}, and it was the turn of {was}", request, page)
        else:
            self._find(f"{said}, says an event, and should not have been", request, page)

    def _expect_nothing(self) -> None:
        """Report ledger entries for which no event was emitted."""
        happened = self.ledger.happened
        while happened:
            self._find_untold(happened.popleft())

    def _find_untold(self, one: Happened) -> None:
        what = f"was {WORDS.get(one.what, one.what)}{self.ledger.words(one.group)}{_of(one.copy)} and no event says so"
        self._find(what, *self._digests.place(one.name))

    # Steps ------------------------------------------------------------------------------------------------

    def _pass_steps(self, last: int) -> None:
        """Account for all planned steps up to `last`. In steps without events, requests only decoded.

        A part that one of their tokens does not see is seen by no later one, so the last one stands for all.
        """
        self._settle()
        while self._found.step < last:
            self._begin(self._found.step + 1)
            self._settle()
        if self._last_looked < last:
            self._last_looked = last
            self._look_at_held()

    def _begin(self, step: int) -> None:
        self._held.end_drafts()
        self._found.step = step
        self._is_settled = self._is_served = False
        self._mark = -1, ()
        for transfer in self._used:
            self._find(f"uses transfer {transfer}, which ends after it")
        self._used.clear()
        loaded, self._loaded = self._loaded, []
        for request in loaded:
            known = self._requests[request]
            assert known.load is not None
            if self._loads_have_turns and not known.is_cancelled:
                known.has_arrived = True  # it has its turn in this step or later
                continue
            has_front = known.computed < known.load.start * self._page_size
            if has_front and not known.is_cancelled:
                self._loaded.append(request)  # what is before the loaded pages is still to be computed
                continue
            if not has_front and not self._loads_have_turns:
                self._held.name(known, known.load.stop)
            self._end_lead(request)
            if known.is_cancelled:
                self._close(request, self._requests.pop(request))

    def _end_lead(self, request: int) -> None:
        self._leaders = {transfer: other for transfer, other in self._leaders.items() if other != request}

    def _serve(self) -> None:
        """Take the parts for all decodes that begin a page, as far as there is room."""
        self._begin_serving()
        self._serve_takers()

    def _begin_serving(self) -> None:
        """List the decodes that begin a page in this step, in the order of admission.

        That is after pages arrived by loads, and before everything else.
        """
        if self._is_served:
            return
        self._is_served = True
        size, requests = self._page_size, self._requests
        decoding = chain(self._decoding, self._stopped())
        takers = [request for request in decoding if requests[request].computed % size == 0]
        self._takers = sorted(takers, key=lambda request: requests[request].admission)

    def _stopped(self) -> list[int]:
        """Return the requests that compute the token that ended them in this step."""
        if not self._lags:
            return []
        known = [(request, self._requests[request]) for request in self._ended]
        return [request for request, each in known if each.stops and each.is_running]

    def _serve_takers(self, before: int | None = None, *, until_evicted: bool = False) -> None:
        """Take parts for decodes in turn: those admitted before `before`; the others take theirs later.

        `until_evicted`: only until the ledger has evicted something.
        """
        while self._takers and self._page_blocks <= self.ledger.num_free:
            known = self._requests[self._takers[0]]
            if (before is not None and known.admission >= before) or (until_evicted and self.ledger.happened):
                return
            del self._takers[0]
            self._held.take_pages(known, known.computed + 1)

    def _serve_before(self, owner: int) -> None:
        """Take parts for the decodes that have taken theirs when the request of `owner` releases some."""
        if self._is_settled:
            return
        known = self._holders.get(owner)
        self._begin_serving()
        decoding = chain(self._decoding, self._stopped())
        is_decoding = known is not None and any(self._requests[request] is known for request in decoding)
        self._serve_takers(known.admission if known is not None and is_decoding else None)

    def _settle(self) -> None:
        """Count the token that each decode of this step computes, and publish all pages that they fill."""
        self._count_decodes()
        self._name_filled()

    def _name_filled(self, before: int | None = None, *, until_stored: bool = False) -> None:
        """Publish the pages that decodes fill, in the order of admission: of those admitted before `before`.

        `until_stored`: only until the ledger has stored something.
        """
        filled = self._filled
        while filled and (before is None or filled[0][1].admission < before):
            if until_stored and self.ledger.happened:
                return
            num_computed, known = filled.popleft()
            self._held.name(known, num_unread=self._lags - (num_computed - known.computed))

    def _count_decodes(self) -> None:
        if self._is_settled:
            return
        self._serve()
        self._is_settled = True
        for request in self._takers:
            page = self._requests[request].computed // self._page_size
            what = f"needs a page{'' if not self._has_groups else ' in every group'}, there is no room"
            self._find(f"{what}, and no request was preempted", request, page)
        self._takers = []
        filled = [(known.computed + 1, known) for known in (self._requests[request] for request in self._stopped())]
        for request in self._decoding:
            known = self._requests[request]
            known.began, known.before = known.computed, known.began
            known.computed += 1
            known.known += 1
            known.is_unread = True
            if (known.computed - self._lags) % self._page_size == 0:
                filled.append((known.computed, known))
        # Requests that fill a page publish it in the order of admission, as in vLLM.
        self._filled.extend(sorted(filled, key=lambda each: each[1].admission))

    def _name_stalled(self) -> None:
        """Publish the pages that stalled requests had filled, at the end of the plan: their tokens are known then."""
        stalled, self._stalled = self._stalled, []
        for known in stalled:
            known.is_unread = False
            if known.is_running:
                self._held.name(known)

    def _end_step(self) -> None:
        for request in self._completing:
            if request in self._requests:
                self._requests[request].known += 1
                self._decoding[request] = None
        self._completing = []
        if self._plans_ahead:
            for request in [one for one in self._decoding if self._requests[one].known == self._requests[one].last]:
                del self._decoding[request]
                self._ended.append(request)

    def _look(self) -> None:
        num_used = self.ledger.num_used
        if num_used > self._mark[0]:
            self._mark = num_used, self.ledger.counts()

    def _check_step(self, event: StepDone) -> None:
        self._look()
        num_used, parts = self._mark
        told = event.tiers[-2 * len(self.ledger.groups) :]
        if event.num_used != num_used or (self._has_groups and told != parts):
            counts = f"{event.num_used} {self._unit} used, and parts {told}; the ledger {num_used} and {parts}"
            if not self._has_groups:
                counts = f"{event.num_used} pages used, the ledger {num_used}"
            self._find(f"the step counts {counts}")

    def _rest(self) -> None:
        num_left = self.ledger.num_used - self._num_beside() - self._below.num_blocks
        if num_left and not self._kept:
            self._find(f"{num_left} {self._unit} are in use, and no request runs")

    # Requests ---------------------------------------------------------------------------------------------

    def _admit(self, event: Admitted) -> None:
        known, size = self._requests[event.request], self._page_size
        if known.is_running:
            self._find("was admitted, and runs already", event.request)
        known.admission = self._num_admitted
        self._num_admitted += 1
        if event.request in self._received:
            self._join(known, event)
            return
        if self._has_groups and event.by_tier is not None:
            self._admit_loaded(known, event)
            return
        if known.load is None:
            self._hit(known, event.request, event.num_hit_pages, event.reach if self._has_groups else None)
            below = self._found_below(known, known.num_named)
            if below and known.offer != (known.num_named, ()):
                self._find(f"is in {below[0][0]} and was not loaded", event.request, known.num_named)
        elif event.num_hit_pages != known.load.stop:
            self._find(f"was hit {event.num_hit_pages} pages far; it had {known.load.stop}", event.request)
        known.load = known.offer = None
        self._check_awaited(known, event.request)
        # After a load of the whole prompt, its last token is computed again.
        known.computed = min(known.num_named * size, known.known - 1)
        self._held.resume(known)
        known.is_running = True

    def _admit_loaded(self, known: KnownRequest, event: Admitted) -> None:
        num_pages = self._below.admit(event.request)
        if event.num_hit_pages != num_pages:
            self._find(f"{num_pages} pages were loaded and found, and {event.num_hit_pages} were hit", event.request)
        known.num_named = num_pages
        known.computed = num_pages * self._page_size
        self._held.resume(known)
        known.began = min(known.began, known.computed)  # its step may compute none of its tokens
        known.branch = 0
        known.is_running = True

    def _hit(self, known: KnownRequest, request: int, num_hit: int, reach: tuple[int, ...] | None) -> None:
        # The last token is always computed.
        num_pages = (known.known - 1) // self._page_size if self._finds_prefixes else 0
        digests = self._digests.upto(known.content, num_pages)[:num_pages]
        longest, by_group = self.ledger.reach(digests, self._page_size)
        if num_hit < longest:
            self._find(f"could be hit, {longest} pages far, and {num_hit} pages were", request, num_hit)
        if reach is not None and tuple(by_group) != reach:
            self._find(f"groups could go on from {by_group} pages, and the engine says {reach}", request)
        self._held.hit(known, num_hit)
        branch = self.ledger.branch(digests) if self._finds_branches else 0
        known.branch = branch * self._page_size if branch > num_hit else 0

    def _compute(self, event: ChunkComputed) -> None:
        known, size = self._requests[event.request], self._page_size
        is_front = known.load is not None and event.end <= known.load.start * size
        is_next = (event.start, event.num_known_tokens) == (known.computed, known.known)
        if not (is_next and (known.is_running or is_front)):
            self._find(
                f"computes tokens from {event.start} of {event.num_known_tokens}, and had {known.computed} of "
                f"{known.known}",
                event.request,
                event.start // size,
            )
        if not event.start < event.end <= event.num_known_tokens:
            self._find(f"computes tokens {event.start} to {event.end} of {event.num_known_tokens}", event.request)
        known.before = min(known.began, event.start)  # more before a preemption
        known.computed = known.began = event.start
        known.is_unread = known in self._stalled
        if known.is_unread:
            self._stalled.remove(known)
        is_last = event.end == event.num_known_tokens
        is_end = is_last and not known.has_decoded
        page_end = event.end // size * size
        if is_front and self._has_groups:
            self._below.begin_front(event.request)
        if self._has_states:
            self._held.take_pages(known, event.end)  # all its pages first: they evict no snapshot of its own
        if known.computed < known.branch <= event.end:
            self._held.grow(known, known.branch, is_end=True, is_midway=True)
        if is_end and self._has_states and known.computed < page_end < event.end:
            self._held.grow(known, page_end, is_end=True, is_midway=True)
        self._held.grow(known, event.end, is_end=is_end, num_unread=int(known.is_unread))
        if is_front and self._has_groups:
            self._below.end_front(event.request)
        if is_last:
            self._completing.append(event.request)

    def _give_back(self, event: PartsGivenBack) -> None:
        known = self._holders.get(event.content.owner)
        index, request = event.group, event.content.owner
        words = self.ledger.words(index)
        if known is None or index >= len(known.parts):
            self._find(f"was given back{words}, and was not held", request, event.start_page)
            return
        needed = self.ledger.groups[index].needed(known.computed, self._page_size)
        for page in range(event.end_page - 1, event.start_page - 1, -1):
            part = known.parts[index].get(page)
            if part is None:
                self._find(f"was given back{words}, and was not held", request, page)
                continue
            if any(page in pages for pages in needed):
                self._find(f"was given back{words}, and a later token sees it", request, page)
            self.ledger.release(known.parts[index].pop(page), is_passed=True)

    def _look_at_held(self) -> None:
        """Report parts held by running requests that no later token sees."""
        for request, known in self._requests.items():
            if known.is_running and request not in self._ended:
                self._held.look_at(known, known.before if self._lags else known.began)

    def _preempt(self, event: Preemption) -> None:
        ledger, known, unit = self.ledger, self._requests[event.victim], self._unit
        self._look()
        if not known.is_running:
            self._find("was preempted, and does not run", event.victim)
        if event.num_used_pages != ledger.num_used:
            self._find(f"request {event.asker} saw {event.num_used_pages} {unit} used; they are {ledger.num_used}")
        if event.num_pages_asked <= ledger.num_free:
            asked = f"{event.num_pages_asked} {unit} for {event.asker} that were free"
            self._find(f"request {event.victim} gave way to {asked}")
        if event.num_computed_tokens != known.computed:
            self._find(f"request {event.victim} lost {event.num_computed_tokens} tokens; it had {known.computed}")
        has_turn = known.stops or event.victim not in self._ended
        had_turn = has_turn and known.admission < self._requests[event.asker].admission
        num_unread = self._lags and known.is_unread and not had_turn
        self._close(event.victim, known, num_unread=num_unread, keeps_state=event.keeps_state)
        known.computed = 0
        known.has_decoded = False
        if event.victim == event.asker and not event.model:
            # As in vLLM, self-preemption ends the decodes: those admitted later compute nothing, and chunks follow.
            self._stall_after(known)
            for other in self._stopped():
                if self._requests[other].admission > known.admission:
                    self._requests[other].stops = False  # not in this step, and in no later one
        stopped = self._stopped()
        self._takers = [request for request in self._takers if request in self._decoding or request in stopped]

    def _stall_after(self, known: KnownRequest) -> None:
        """Take what was admitted after `known` off the decodes: chunks follow."""
        for request in [other for other in self._decoding if self._requests[other].admission > known.admission]:
            del self._decoding[request]
            self._requests[request].has_decoded = True
            if self._lags:
                self._stalled.append(self._requests[request])

    def _finish(self, request: int) -> None:
        known = self._requests.pop(request)
        if request in self._ended:
            self._ended.remove(request)
        elif request not in self._decoding:
            self._find(f"finished with {known.computed} of {known.known} known tokens computed", request)
        self._close(request, known)

    def _cancel(self, request: int) -> None:
        known = self._requests[request]
        load = None if self._has_groups else known.load
        if load is not None and known.has_arrived:
            self._end_lead(request)
        elif load is not None and (request in self._loaded or known.num_named < load.stop):
            known.is_cancelled = True  # a transfer still writes to its pages, or has just ended
            return
        self._completing = [other for other in self._completing if other != request]
        self._ended = [other for other in self._ended if other != request]
        self._received.discard(request)
        self._copies = {copy: other for copy, other in self._copies.items() if other != request}
        known = self._requests.pop(request)
        if self._below.cancel(request):
            self._holders.pop(known.content.owner, None)
        else:
            self._close(request, known, num_unread=self._lags and known.is_unread)

    def _close(self, request: int, known: KnownRequest, *, num_unread: int = 0, keeps_state: bool = False) -> None:
        self._decoding.pop(request, None)
        self._held.close(known, num_unread=num_unread, keeps_state=keeps_state)
        if request not in self._requests:
            self._holders.pop(known.content.owner, None)

    # Requests that another engine begins or continues -------------------------------------------------------

    def _hold(self, request: int) -> None:
        """Let a request that has computed its prompt keep its parts, until another engine has copied them."""
        known = self._requests[request]
        if request not in self._decoding:
            self._find(f"is held with {known.computed} of {known.known} known tokens computed", request)
        self._decoding.pop(request, None)
        known.is_running = False

    def _reserve(self, event: LoadStarted) -> None:
        """Take the pages of a prompt that another engine sends; resident ones are shared, the last page included."""
        known = self._requests[event.request]
        num_pages = known.known // self._page_size if self._finds_prefixes else 0
        longest, _ = self.ledger.reach(self._digests.upto(known.content, num_pages)[:num_pages], self._page_size)
        if event.num_hit_pages != longest:
            what = f"shares {event.num_hit_pages} pages of its prompt, and {longest} are resident"
            self._find(what, event.request, event.num_hit_pages)
        self._held.hit(known, event.num_hit_pages)
        self._held.take_pages(known, event.num_held_pages * self._page_size)
        known.computed = event.num_hit_pages * self._page_size
        self._copies[event.transfer] = event.request

    def _receive(self, event: TransferEnded) -> None:
        """Publish the pages of a prompt that has arrived."""
        request = self._copies.pop(event.transfer)
        known = self._requests[request]
        known.computed = known.known
        self._held.name(known)
        self._received.add(request)

    def _join(self, known: KnownRequest, event: Admitted) -> None:
        """Let a request run whose prompt has arrived: its last token is computed again."""
        self._received.remove(event.request)
        num_pages = known.known // self._page_size
        if event.num_hit_pages != num_pages:
            self._find(f"has received {num_pages} pages, and {event.num_hit_pages} were hit", event.request)
        known.computed = known.known - 1
        known.is_running = True

    # Transfers --------------------------------------------------------------------------------------------

    def _found_below(self, known: KnownRequest, start: int) -> tuple[tuple[str, int], ...]:
        last_token = 0 if self._books.full_prompt_hits else 1
        limit = (known.known - last_token) // self._page_size
        return self._books.found(self._digests.upto(known.content, limit)[start:limit])

    def _load(self, event: LoadStarted) -> None:
        known = self._requests[event.request]
        self._hit(known, event.request, event.num_hit_pages, None)
        self._held.take_pages(known, event.num_held_pages * self._page_size)
        below = self._found_below(known, event.num_hit_pages)
        if known.offer is not None and known.offer[0] == event.num_hit_pages:
            below = known.offer[1]
        known.offer = None
        below = _after(below, event.num_front_pages)
        self._check_awaited(known, event.request)
        self._leaders[event.transfer] = event.request
        if below != event.by_tier:
            self._find(f"{event.by_tier} pages are loaded, and {below} are below", event.request, event.num_hit_pages)
        known.front, start = event.num_hit_pages, event.num_hit_pages + event.num_front_pages
        known.computed = event.num_hit_pages * self._page_size
        known.load = range(start, start + sum(count for _, count in event.by_tier))

    def _weigh(self, event: LoadWeighed) -> None:
        """Record that only a part of the match below is loaded. `offer` holds its first page and its pages per tier."""
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
        if leader is None or leader.load is None or page not in range(leader.front, leader.load.stop):
            self._find(f"awaits transfer {event.transfer}, which does not bring it", event.request, page)
        elif self._digest(leader.content, page) != self._digest(known.content, page):
            self._find(f"awaits transfer {event.transfer}, which brings another page", event.request, page)

    def _check_awaited(self, known: KnownRequest, request: int) -> None:
        if known.awaited in self._leaders:
            self._find(f"goes on before transfer {known.awaited} has ended, which it awaits", request)
        known.awaited = -1

    def _use(self, event: LoadUsed) -> None:
        """Publish the pages of a load under way: the step in progress must end after it."""
        known = self._requests[event.request]
        if known.load is None or self._leaders.get(event.transfer) != event.request:
            self._find(f"uses transfer {event.transfer}, which is not its load", event.request)
            return
        if known.computed < known.load.start * self._page_size:
            self._find("runs before it has computed what precedes its loaded pages", event.request)
        self._end_lead(event.request)
        if not known.has_arrived:
            self._used[event.transfer] = len(known.load)
        known.has_arrived = False
        if known.load.stop:
            self._held.name(known, known.load.stop)
        else:  # nothing arrived, and nothing was found before: it waits again
            self._close(event.request, known)
            known.load = None

    def _keep(self, event: StoreStarted) -> None:
        if event.medium != self._first_tier:
            return  # read from the tier above, which holds its own pages
        for content, start, end in event.runs:
            for page in range(start, end):
                kept = self.ledger.keep(0, self._digest(content, page))
                if kept is None:
                    self._find("is to be stored and is not resident", content.owner, page)
                else:
                    self._kept.setdefault(event.transfer, []).append(kept)

    def _end_transfer(self, event: TransferEnded) -> None:
        for kept in self._kept.pop(event.transfer, ()):
            self.ledger.end_keep(kept)
        if event.transfer in self._used:
            if event.num_good_pages < (num_pages := self._used.pop(event.transfer)):
                self._find(f"used {num_pages} loaded pages, and {event.num_good_pages} arrived", event.request)
        elif event.request >= 0:
            known = self._requests[event.request]
            assert known.load is not None
            known.load = range(known.load.start, known.load.start + event.num_good_pages)
            self._loaded.append(event.request)

    # Memory in use other than that of requests --------------------------------------------------------------

    def _num_beside(self) -> int:
        """Return the number of blocks that are reserved or belong to pinned parts."""
        return self.ledger.num_reserved + self._num_pinned

    def _pin(self, event: PagesPinned) -> None:
        """Hold the parts from which every group can resume after the pinned pages: the copies that a lookup finds."""
        holder = KnownRequest(event.content, 0, len(self.ledger.groups))
        self._held.hit(holder, event.num_pages, how="pinned")
        self._pinned[event.pin] = [list(parts.values()) for parts in holder.parts]
        for part in chain(*self._pinned[event.pin]):
            self._num_pins[part] += 1
            if self._num_pins[part] == 1:
                self._num_pinned += self.ledger.groups[part.group].part_blocks

    def _unpin(self, pin: int) -> None:
        """Drop the references of a pin, the last page first. Another sequence may resume from its parts."""
        for parts in self._pinned.pop(pin):
            for part in reversed(parts):
                part.stays = True
                self.ledger.release(part)
                self._num_pins[part] -= 1
                if not self._num_pins[part]:
                    del self._num_pins[part]
                    self._num_pinned -= self.ledger.groups[part.group].part_blocks

    # Comparing --------------------------------------------------------------------------------------------

    def compare(self, account: Cache) -> None:
        """Compare the engine's account of its memory with the ledger. Raise AuditError with all findings so far."""
        ledger = self.ledger
        num_used, num_cached = ledger.num_used, ledger.num_cached
        theirs, mine = account.counts(), ledger.counts()
        what = ""
        if self._has_groups and theirs != mine:
            what = f"the engine counts {theirs} parts used and cached, group by group; the ledger {mine}"
        elif account.num_used != num_used or account.num_cached != num_cached:
            counts = f"{account.num_used} {self._unit} used and {account.num_cached} cached"
            what = f"the engine counts {counts}, the ledger {num_used} and {num_cached}"
        if what:
            self._find(what)
            # Name the pages that differ between the engine and the ledger.
            find_different_pages(account, ledger, self._digests, self._find)
            find_different_private(account, ledger, self._requests.values(), self._find)
        num_reserved = self._num_beside()
        if account.num_reserved != num_reserved:
            counts = f"{account.num_reserved} {self._unit} reserved or pinned"
            self._find(f"the engine counts {counts}, the ledger {num_reserved}")
        if self._found.all:
            raise AuditError(self._found.all)

    def _digest(self, content: Content, page: int) -> bytes:
        return self._digests.of(content, page)

    def _find_page(self, what: str, group: int, digest: bytes) -> None:
        self._find(f"{what}{self.ledger.words(group)}", *self._digests.place(digest))

    def _find(self, what: str, request: int | None = None, page: int | None = None) -> None:
        self._found.add(what, request, page)


def _of(copy: int | None) -> str:
    return "" if copy is None else f" (copy {copy})"


def _after(by_tier: tuple[tuple[str, int], ...], num_front: int) -> tuple[tuple[str, int], ...]:
    """Return the pages of each tier without the first `num_front` of all."""
    left = []
    for medium, num_pages in by_tier:
        num_left = max(0, num_pages - num_front)
        num_front = max(0, num_front - num_pages)
        if num_left:
            left.append((medium, num_left))
    return tuple(left)


def expect_same(
    requests: Mapping[str, Column],
    steps: Sequence[Mapping[str, Column]],
    plain_requests: Mapping[str, Column],
    plain_steps: Sequence[Mapping[str, Column]],
) -> None:
    """Compare an audited replay with a plain one: columns of its requests, and of the steps of each replica.

    An engine without readers of its events may only count pages that an audited one names. Raise AuditError for
    the first step and the first request that differ.
    """
    findings: list[Finding] = []
    of_steps = [_first_different(mine, theirs) for mine, theirs in zip(steps, plain_steps, strict=True)]
    different = [(found[0], replica, found[1]) for replica, found in enumerate(of_steps) if found is not None]
    if different:
        step, replica, words = min(different)
        findings.append(Finding(step, f"{words}{f' in replica {replica}' if len(steps) > 1 else ''}"))
    of_requests = _first_different(requests, plain_requests)
    if of_requests is not None:
        request, words = of_requests
        last = max(len(column) - 1 for of_replica in steps for column in of_replica.values())
        findings.append(Finding(last, f"of request {request}, {words}", request))
    if findings:
        raise AuditError(findings)


def _first_different(columns: Mapping[str, Column], plain: Mapping[str, Column]) -> tuple[int, str] | None:
    """Return the first row in which columns differ, with words for its first column that does; None if all agree."""
    first: tuple[int, str] | None = None
    for name, mine in columns.items():
        theirs = plain[name]
        num_both = min(len(mine), len(theirs))
        differs = mine[:num_both] != theirs[:num_both]
        row = int(differs.argmax()) if differs.any() else num_both
        if row < max(len(mine), len(theirs)) and (first is None or row < first[0]):
            said = [str(column[row]) if row < len(column) else "missing" for column in (mine, theirs)]
            first = row, f"{name} is {said[0]}, and {said[1]} in a replay that is not audited"
    return first


MAX_PAGES_NAMED = 20


def find_different_pages(
    account: Cache, ledger: Ledger, digests: PageDigests, find: Callable[[str, int | None, int | None], object]
) -> None:
    """Call `find` with text, request and page for each page that differs between the engine and the ledger."""
    theirs: Counter[tuple[int, bytes, int]] = Counter()
    for group, content, start, end, refs in account.runs():
        for page in range(start, end):
            theirs[group, digests.of(content, page), refs] += 1
    mine: Counter[tuple[int, bytes, int]] = Counter()
    for (group, digest), parts in ledger.copies.items():
        for part in parts:
            mine[group, digest, part.refs] += 1
    different = {(group, digest) for group, digest, _ in (theirs - mine) + (mine - theirs)}
    pages = sorted(different, key=lambda page: (digests.place(page[1]), page[0]))
    for group, digest in pages[:MAX_PAGES_NAMED]:
        says = [
            " and ".join(
                f"{refs} times"
                for (of_group, name, refs), count in sorted(counter.items())
                if (of_group, name) == (group, digest)
                for _ in range(count)
            )
            or "not at all"
            for counter in (theirs, mine)
        ]
        find(f"the engine holds it {says[0]}, the ledger {says[1]}{ledger.words(group)}", *digests.place(digest))
    if len(pages) > MAX_PAGES_NAMED:
        find(f"and {len(pages) - MAX_PAGES_NAMED} pages more", None, None)


def find_different_private(
    account: Cache,
    ledger: Ledger,
    requests: Iterable[KnownRequest],
    find: Callable[[str, int | None, int | None], object],
) -> None:
    """Call `find` for a page that only its request knows, if the engine and the ledger count such pages differently."""
    sizes = [group.part_blocks for group in ledger.groups]
    found = ledger.copies.values()
    mine = ledger.num_used - sum(sizes[part.group] for parts in found for part in parts if part.refs or part.keeps)
    only_kept = sum(sizes[part.group] for parts in found for part in parts if part.keeps and not part.refs)
    theirs = account.num_used - only_kept
    theirs -= sum((end - start) * sizes[group] for group, _, start, end, refs in account.runs() if refs)
    if theirs == mine:
        return
    for known in requests:
        if known.num_taken > known.num_named:
            what = f"the engine counts {theirs} blocks that nothing else can find, the ledger {mine}"
            find(f"{what}; this is one of them", known.content.owner, known.num_taken - 1)
