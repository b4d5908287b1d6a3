"""Checks an engine against a `Ledger`: a second bookkeeping of the same events, which reports every difference.

The auditor knows the engine only by its events: requests that arrived, were admitted with a number of hit pages, were
preempted or ended; tokens that were computed; steps that began and ended. From these it derives, part by part, the
parts that every request must hold, and the parts that must be found, stored and evicted, in order. Releases by windows
are taken from the events and must be exactly the parts that no later token sees. The auditor compares the result with
the page events of the engine, one by one, with the counts of each step, and with the engine's account of its memory.

What it follows is in small parts, each with the laws that it checks:

    Facts        the ledger, the requests, the findings        ToldPages   each page event is the ledger's next entry
    Turns        decodes of a step: their pages, what is used  Lives       admission, chunks, preemption, the end
    PageLoads    transfers of whole pages                      PartsBelow  transfers of parts in KV groups
    Beside       pins and reserves                             comparing   the engine's account, a replay without audit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvarts.core.events import (
    Admitted,
    Arrived,
    AtRest,
    CacheCleared,
    Cancelled,
    ChunkComputed,
    ChunkPlanned,
    CopiesRemoved,
    CopiesStored,
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
from kvarts.core.kv.cache import Memory
from kvarts.proof.audit.comparing import compare_account, expect_same, find_different_pages, find_different_private
from kvarts.proof.audit.facts import Beside, EngineRules, Facts
from kvarts.proof.audit.ledger import AuditError, Finding, Findings, Ledger, LedgerError, LedgerGroup
from kvarts.proof.audit.lives import Lives
from kvarts.proof.audit.page_loads import PageLoads
from kvarts.proof.audit.request_parts import KnownRequest, PageDigests
from kvarts.proof.audit.tiers import EvictionsTold, OrderWatch, PartsBelow, TierBooks, TierRules
from kvarts.proof.audit.told_pages import ToldPages
from kvarts.proof.audit.turns import Turns

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
HOST_AND_DISK = TierRules()
PLAIN = EngineRules()

Follow = Callable[[Any], object]


class Auditor:
    """A reader of the events of one engine with `num_blocks` blocks, from its beginning. `findings` grows.

    `groups`: its KV groups; by default pages are whole, and a block is a page. `keeps_all`: parts released by windows
    stay cached; otherwise only the tails of prompts and requests do. `is_lru`: the eviction order is known; under any
    other order, the evicted part is taken from the events and checked. `watch`: records the runs that such an order
    named. `account`: returns the engine's account of its memory; if given, `observe` compares it with the ledger and
    raises AuditError. Nothing is repaired.
    """

    wants_details = True

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        *,
        groups: tuple[LedgerGroup, ...] = (),
        keeps_all: bool = True,
        is_lru: bool = True,
        watch: OrderWatch | None = None,
        tiers: TierRules = HOST_AND_DISK,
        rules: EngineRules = PLAIN,
        account: Callable[[], Memory] | None = None,
    ) -> None:
        self._account = account
        self._watch = watch
        stored = TierBooks(tiers.names, full_prompt_hits=tiers.full_prompt_hits)
        digests, found = PageDigests(), Findings()
        evictions: EvictionsTold | None = None
        if tiers.num_safe or not is_lru:
            # An engine in which stores go first evicts the parts that tiers hold, whichever run the order names.
            named = None if tiers.stores_go_first else watch
            evictions = EvictionsTold(stored, tiers.num_safe, self._find_page, digests, named)
        # Of parts in groups one may outlive that before it: a window goes on from what a full group has lost.
        self.ledger = Ledger(
            groups or WHOLE_PAGES,
            num_blocks,
            keeps_all=keeps_all,
            keeps_prefixes=not groups,
            choose=None if evictions is None else evictions.choose,
        )
        self._evictions = evictions
        """The evictions that the engine names, where the ledger does not know its order."""
        if evictions is not None:
            evictions.ledger = self.ledger
        facts = self._facts = Facts(
            self.ledger,
            digests,
            found,
            page_size,
            has_groups=bool(groups),
            rules=rules,
        )
        pages = PageLoads(facts, stored, tiers.names, loads_have_turns=tiers.loads_have_turns)
        parts = PartsBelow(
            facts.held,
            facts.ledger,
            facts.digests,
            facts.found,
            page_size,
            tiers=tiers.names,
            has_turns=tiers.loads_have_turns,
        )
        self._below: PageLoads | PartsBelow = parts if groups else pages
        self._turns = Turns(facts, self._below)
        self._told = ToldPages(facts, self._turns)
        self._lives = Lives(facts, self._turns, pages, parts)
        self._beside = Beside(facts)
        self._with_session_pages: set[int] = set()
        """Requests that bring their own pages, which are reserved."""
        self._table: dict[type, Follow] = {
            **self._of_steps(),
            **self._of_requests(),
            **(self._of_parts(parts) if groups else self._of_pages(pages)),
            TransferEnded: self._end_transfer,
            PagesReserved: self._after_decodes(self._beside.reserve),
            PagesPinned: self._after_decodes(self._beside.pin),
            # In a step: for a decode that found no free page, or for requests planned after the decodes.
            PagesUnpinned: self._after_serving(lambda event: self._beside.unpin(event.pin)),
            CacheCleared: self._after_decodes(lambda _: facts.ledger.clear()),
            AtRest: lambda _: self._rest(),
        }
        """What follows each event about anything but pages. Other events say nothing of memory."""

    def _of_steps(self) -> dict[type, Follow]:
        return {StepStarted: self._begin_step, StepDone: self._check_step, StepEnded: self._end_step}

    def _of_requests(self) -> dict[type, Follow]:
        facts, lives, requests = self._facts, self._lives, self._facts.requests
        return {
            Arrived: self._arrive,
            Admitted: self._after_decodes(lives.admit),
            ChunkComputed: self._compute,
            ChunkPlanned: self._after_serving(lambda event: facts.held.take_pages(requests[event.request], event.end)),
            DecodesStalled: lambda event: self._turns.stall_after(requests[event.request]),
            DraftTaken: self._after_decodes(
                lambda event: facts.held.draft(
                    requests[event.request], event, is_decoding=event.request in facts.decoding
                )
            ),
            DraftJudged: lambda event: facts.held.judge(requests[event.request], event),
            Preemption: self._after_serving(lives.preempt),
            Finished: self._finish,
            Cancelled: self._cancel,
            PromptHeld: lambda event: lives.hold(event.request),
            PromptReleased: lambda event: facts.close(event.request, requests.pop(event.request)),
        }

    def _of_pages(self, pages: PageLoads) -> dict[type, Follow]:
        # A load that is given up keeps its pages: they are promised until all known tokens have theirs.
        return {
            StoreStarted: pages.keep,
            LoadWeighed: self._after_decodes(pages.weigh),
            LoadAwaited: self._after_decodes(pages.wait),
            LoadStarted: self._after_decodes(self._or_receive(pages.load)),
            LoadUsed: self._after_decodes(pages.use),
        }

    def _of_parts(self, parts: PartsBelow) -> dict[type, Follow]:
        requests = self._facts.requests
        begin = self._or_receive(lambda event: parts.begin_load(requests[event.request], event))
        return {
            StoreStarted: parts.begin_store,
            LoadStarted: self._after_decodes(begin),
            LoadGivenUp: self._after_decodes(lambda event: parts.give_up(event.request)),
            LoadUsed: self._after_decodes(parts.use),
        }

    def _after_decodes(self, follow: Follow) -> Follow:
        """Return `follow` for events after the decodes of a step have computed their tokens."""

        def settled(event: Any) -> None:
            self._turns.settle()
            follow(event)

        return settled

    def _after_serving(self, follow: Follow) -> Follow:
        """Return `follow` for events after the decodes of a step have taken what has room."""

        def served(event: Any) -> None:
            self._turns.serve()
            follow(event)

        return served

    def _or_receive(self, follow: Follow) -> Follow:
        """Return `follow` for loads, unless what comes is a prompt of another engine."""

        def begun(event: LoadStarted) -> None:
            if [medium for medium, _ in event.by_tier] == [WORKER]:
                self._lives.reserve(event)
            else:
                follow(event)

        return begun

    def _find_page(self, what: str, group: int, digest: bytes) -> None:
        self._facts.find_page(what, group, digest)

    @property
    def findings(self) -> list[Finding]:
        """All findings so far."""
        return self._facts.found.all

    # Events -----------------------------------------------------------------------------------------------

    def observe(self, events: Sequence[Event]) -> None:
        """Check `events` against the ledger. With an account, raise AuditError if there are findings."""
        if self._evictions is not None:
            self._told.look_ahead(self._evictions, events)
        for event in events:
            try:
                self._follow(event)
            except LedgerError as error:
                self._facts.find(str(error))
        self._told.expect_nothing()
        if self._account is not None:
            self.compare(self._account())
        if self._watch is not None:
            self._watch.named.clear()
        self._facts.digests.forget()

    def compare(self, account: Memory) -> None:
        """Compare the engine's account of its memory with the ledger. Raise AuditError with all findings so far."""
        compare_account(self._facts, account, self._beside.num_blocks())
        if self.findings:
            raise AuditError(self.findings)

    def _follow(self, event: Event) -> None:
        match event:
            case PagesStored(medium="device"):
                self._name_ended(event.content.owner)
                self._told.hear_stored(event)
                return
            case PagesStored() | PagesRemoved() if event.medium != "device":
                self._below.hear(event)
                return
            case CopiesStored():  # the ledger has its own copies, which evictions are compared with
                return
            case PagesRemoved() | CopiesRemoved():
                self._told.hear_gone(event)
                return
            case PartsGivenBack():
                self._name_ended(event.content.owner)
                self._turns.serve_before(event.content.owner)
                self._told.expect_nothing()
                self._lives.give_back(event)
                return
        self._told.expect_nothing()
        request = event.victim if isinstance(event, Preemption) else getattr(event, "request", None)
        if request in self._with_session_pages and not isinstance(event, Arrived):
            if isinstance(event, Finished | Cancelled):
                self._with_session_pages.remove(request)
            elif isinstance(event, ChunkComputed):
                self._turns.serve()
            return
        if isinstance(event, OF_A_REQUEST) and request not in self._facts.requests:
            self._facts.find(f"is said to be {type(event).__name__}, and is not there", request)
            return
        follow = self._table.get(type(event))
        if follow is not None:
            follow(event)

    # Steps ------------------------------------------------------------------------------------------------

    def _begin_step(self, event: StepStarted) -> None:
        self._turns.pass_steps(event.step - 1)
        self._turns.begin(event.step)
        self._below.drop_ended()

    def _check_step(self, event: StepDone) -> None:
        turns = self._turns
        turns.pass_steps(event.step - 1)
        if self._facts.found.step < event.step:
            turns.begin(event.step)
        turns.settle()
        turns.name_stalled()
        turns.check_step(event)

    def _end_step(self, event: StepEnded) -> None:
        self._turns.pass_steps(event.step)
        self._turns.end_step()

    def _rest(self) -> None:
        """Law L2: at rest nothing is held but pins, reserves, and what transfers read."""
        num_left = self._below.num_left(self.ledger.num_used - self._beside.num_blocks())
        if num_left:
            self._facts.find(f"{num_left} {self._facts.unit} are in use, and no request runs")

    # Requests ---------------------------------------------------------------------------------------------

    def _arrive(self, event: Arrived) -> None:
        if event.has_session_pages:
            self._with_session_pages.add(event.request)
            return
        facts = self._facts
        known = KnownRequest(event.content, event.num_prompt_tokens, len(self.ledger.groups), event.max_tokens)
        known.stops = event.stops and facts.lags > 0
        known.known += event.num_generated
        facts.requests[event.request] = facts.holders[event.content.owner] = known

    def _compute(self, event: ChunkComputed) -> None:
        self._turns.count_decodes()
        known = self._facts.requests[event.request]
        self._turns.name_filled(known.admission if known.is_running else None)
        self._lives.compute(event)

    def _finish(self, event: Finished) -> None:
        if self._facts.plans_ahead:
            self._end_plan()
        self._lives.finish(event.request)

    def _end_plan(self) -> None:
        """Do what precedes the releases at the end of a plan that was made ahead."""
        self._turns.settle()
        self._turns.name_stalled()
        self._turns.look()

    def _name_ended(self, request: int) -> None:
        """Publish the last full pages of `request` if it has ended: with loads of a connector, windows release next.

        That precedes its end, and its last token is known.
        """
        known = self._facts.requests.get(request)
        if known is not None and not known.stops and request in self._turns.ended:
            self._end_plan()
            self._facts.held.name(known)

    def _cancel(self, event: Cancelled) -> None:
        if self._facts.plans_ahead:
            self._turns.settle()
            self._turns.look()
        self._lives.cancel(event.request)

    def _end_transfer(self, event: TransferEnded) -> None:
        if event.transfer in self._lives.copies:
            self._lives.receive(event)
            return
        if event.is_given_up:
            self._turns.serve()  # as a pin that is given up
        elif self._facts.has_groups:
            self._turns.settle()
        self._below.end(event)
