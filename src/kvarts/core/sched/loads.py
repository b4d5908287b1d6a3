"""Requests that wait for pages from a tier below the device.

A waiting request for which a tier has pages is LOADING: it has all pages of its known tokens and a place among the
running requests, and waits for a transfer to fill the first pages, or pages after a *front* that it computes meanwhile.
It is never a victim, since its pages could not be reused before the transfer ends. Then it is LOADED, and is admitted
before the waiting requests; with loads by layer earlier, into a step that ends after the transfer.

An example: a prompt of three pages. Page 0 is on the device, page 1 in host memory, page 2 is nowhere:

    page           0            1                2
                   resident     below            to be computed
    WAITING        found        offered, pinned
    LOADING        referenced   taken, filled    taken            other requests run steps meanwhile
    LOADED                      complete                          first in the next admission
    PREFILLING                                   computed, its last token always

If page 1 were nowhere and page 2 below, page 1 would be a front: the request computes it in steps of its own while page
2 is copied, and continues when both are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from kvarts.base.limits import MOST_COUNT
from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.events import LoadAwaited, LoadStarted, LoadUsed, LoadWeighed
from kvarts.core.kv.cache import BlockTable, Cache, Match
from kvarts.core.request import Request, RequestState
from kvarts.core.sched.lower_tiers import GroupOffers, LowerTiers
from kvarts.core.sched.policy import WaitingQueue
from kvarts.core.sched.running import Running

if TYPE_CHECKING:
    from kvarts.core.kv.transfer import Awaited, Loaded, Offer, Weighed

__all__ = ["AlignedTokens", "GroupOffers", "LoadUnderWay", "Loads", "LowerTiers", "Waits"]

AlignedTokens: TypeAlias = Callable[[Request, int, int, int], int]
"""Returns the tokens of the next chunk of a prompt, where chunks end at pages: AlignedChunks.num_tokens."""


class LoadUnderWay:
    """A load for `request`, which gets pages [start, end) by it; that should end at `end_ns`.

    The pages before `front_end` are computed meanwhile, the others are loaded `by_tier`. `loaded`: the result, once the
    transfer has ended.
    """

    __slots__ = ("by_tier", "end", "end_ns", "front_end", "loaded", "request", "start", "transfer")

    def __init__(
        self, request: Request, transfer: int, start: int, front_end: int, end: int, by_tier: tuple[int, ...]
    ) -> None:
        self.request = request
        self.transfer = transfer
        self.start = start
        self.front_end = front_end
        self.end = end
        self.by_tier = by_tier
        self.end_ns = 0
        self.loaded: Loaded | None = None


class Waits(ABC):
    """How requests wait for their loads: what they hold meanwhile, and when they go on. The strategy of Loads.

    `holds_seat`: a request that waits has a place, all pages of its known tokens, and the seniority of one that was
    admitted then. `settles_ends`: a request that ends, or is given up, first releases the pages that its windows have
    passed, as with a connector. `is_sync`: a request runs in the step that begins its load. `begins_anywhere`: a load
    begins in a step whose tokens reach no page end, where chunks of prompts end at pages.
    """

    __slots__ = (
        "aligned_tokens",
        "begins_anywhere",
        "holds_seat",
        "is_sync",
        "loads",
        "num_planned",
        "running",
        "settles_ends",
    )

    loads: Loads
    running: Running

    def __init__(
        self, *, holds_seat: bool, settles_ends: bool = False, is_sync: bool = False, begins_anywhere: bool = False
    ) -> None:
        self.holds_seat = holds_seat
        self.settles_ends = settles_ends
        self.is_sync = is_sync
        self.begins_anywhere = begins_anywhere
        self.aligned_tokens: AlignedTokens | None = None

    def connect(
        self, running: Running, num_planned: Callable[[Request], int], aligned_tokens: AlignedTokens | None
    ) -> None:
        """Take note of the scheduler's running requests, and of its rule for chunks that end at pages.

        `num_planned`: how many tokens a request computes in the step being planned.
        """
        self.running, self.num_planned, self.aligned_tokens = running, num_planned, aligned_tokens

    @abstractmethod
    def wanted(self, request: Request, match: Match, num_known: int, end: int, budget: int, num_kept: int = 0) -> int:
        """Return the blocks that must be free to begin the load of the pages after `match` up to `end`.

        `num_kept`: blocks to leave free.
        """

    @abstractmethod
    def fits(self, request: Request, match: Match, num_known: int, end: int, num_kept: int, budget: int) -> bool:
        """Return whether there is room to load pages up to `end`, with `num_kept` blocks to leave free."""

    @abstractmethod
    def weigh(
        self, request: Request, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the part of `offer` to load for `request`, which has `match`."""

    @abstractmethod
    def held(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> int:
        """Return the number of blocks that `request` has from the start of its load, which brings pages up to `end`."""

    @abstractmethod
    def open(self, request: Request, match: Match, num_known: int, num_front: int, end: int) -> BlockTable:
        """Take what `request` has from the start of its load, in addition to `match`, which is on the device."""

    @abstractmethod
    def begun(self, load: LoadUnderWay) -> None:
        """Take note that `load` has begun."""

    def take_ended(self) -> None:
        """Process the loads that have ended: their requests can run in the steps from now on."""
        self.loads.let_run()

    @abstractmethod
    def arrive(self, load: LoadUnderWay, loaded: Loaded) -> bool:
        """Make the loaded pages findable; return whether the request can compute from there on."""

    @property
    def is_stuck(self) -> bool:
        """Whether nothing runs and nothing is loaded, so that only requests whose loads have ended can go on."""
        return False

    def begin_turn(self, request: Request, loaded: Loaded) -> bool:
        """Let `request`, whose load has ended, have its turn; return False if it has nothing, and waits again."""
        return True

    def give_up_last(self) -> bool:
        """Give up a load that has ended, if others have; only requests without places need that."""
        return False

    def to_run(self, request: Request, budget: int) -> int:
        """Return the blocks that `request`, whose load has ended, lacks to compute its known tokens.

        `budget`: the most tokens that it may compute in the next step.
        """
        return 0

    @abstractmethod
    def resumed(self, request: Request) -> None:
        """Take note that `request` starts to run: what it waited with is its own."""

    @abstractmethod
    def begin_run(self, request: Request) -> None:
        """Release what `request`, which was admitted after its load, held only to compute its front."""

    @abstractmethod
    def cancelled(self, request: Request) -> None:
        """Take note that `request`, which was here, is cancelled."""


class Loads:
    """Owner of requests between waiting and running: their load is under way, or it has ended.

    Owner also of requests that wait for the load of another request, because it brings the pages that they would load;
    after that they return to `waiting`. `waits`: how requests wait. `offers`: what tiers offer in parts, for a cache
    with KV groups.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        cache: Cache,
        waiting: WaitingQueue,
        page_size: int,
        emit: Emit | None,
        waits: Waits,
        offers: GroupOffers | None = None,
    ) -> None:
        self.tiers = tiers
        self.offers = offers
        self._waits = waits
        self.holds_seat = waits.holds_seat
        self.settles_ends = waits.settles_ends
        self.is_sync = waits.is_sync
        self.begins_anywhere = waits.begins_anywhere
        self._cache = cache
        self._page_size = page_size
        self._emit = emit
        self._waiting = waiting
        self.loading: dict[int, LoadUnderWay] = {}
        """Loads under way by the index of their request, in the order of admission, ABANDONED ones included."""
        self._followers: dict[int, list[Request]] = {}
        """Requests that wait for a load under way, by the index of that load's request, or for write n of another
        engine, by -1 - n."""
        self.num_following = 0
        """Requests that wait for another request's load; they have neither pages nor a place."""
        self.num_short = 0
        """The pages that the last load that could begin lacked, besides those that other requests need."""
        self.is_short_of_tokens = False
        """Whether the last load that could begin lacked tokens: the request that runs after it reaches no page end."""
        self.is_blocking = False
        """Whether the requests behind a loaded one wait because it lacks memory or a place."""
        self.retried: Request | None = None
        """A request whose load brought nothing, if it has its turn before those in `loaded`."""
        self.loaded: list[tuple[Request, Loaded]] = []
        """Requests whose loads have ended, with these, in the order of the ends."""
        self.fronts: list[LoadUnderWay] = []
        """Loads whose requests have pages to compute before those that are loaded, in the order of admission."""
        self.ended: list[LoadUnderWay] = []
        """Loads that have ended, or can be used, and whose requests do not run yet."""
        self.early: list[LoadUnderWay] = []
        """Those under way whose requests can compute on in the planned step, while later layers are loaded."""
        self.num_abandoned = 0
        self._confirmed: list[tuple[Content, int, BlockTable]] = []
        """Contents that get full pages in the scheduled step, how many they have then, and their block tables."""
        waits.loads = self

    @property
    def num_requests(self) -> int:
        """The number of requests that wait for their load, or whose load ended since the last step."""
        if not self.loading:
            return len(self.loaded)
        return len(self.loading) - self.num_abandoned + len(self.loaded)

    @property
    def has_ended(self) -> bool:
        """Whether the next step must look at a load that has ended, or can be used."""
        return bool(self.ended)

    @property
    def num_waiting(self) -> int:
        """The number of requests here: with a load under way or ended, or waiting for another request's load."""
        return self.num_requests + self.num_following

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests here that were not cancelled: loading ones, then loaded ones, then followers."""
        for load in self.loading.values():
            if load.request.state is RequestState.LOADING:
                yield load.request
        yield from (request for request, _ in self.loaded)
        yield from self.following()

    def following(self) -> list[Request]:
        """Return the requests that wait for another request's load."""
        return [request for requests in self._followers.values() for request in requests]

    @property
    def is_stuck(self) -> bool:
        """Whether nothing runs and nothing is loaded, so that only requests whose loads have ended can go on."""
        return self._waits.is_stuck

    def give_up_last(self) -> bool:
        """Give up a load that has ended, if others have; only requests without places need that."""
        return self._waits.give_up_last()

    def note_arrived(self, request: Request) -> None:
        """Take note that a request waits: its content may be known to tiers that outlive the process."""
        if self.offers is not None:
            self.offers.recognise(request.content)

    def connect(
        self, running: Running, num_planned: Callable[[Request], int], aligned_tokens: AlignedTokens | None
    ) -> None:
        """Connect the strategy to the scheduler, as Waits.connect."""
        self._waits.connect(running, num_planned, aligned_tokens)

    def found(self, request: Request, match: Match) -> Match:
        """Return what the device and the load of `request` have together; for whole pages, what the device has."""
        return match if self.offers is None else self.offers.offered(request.index)

    def _limit(self, num_known: int) -> int:
        """Return the most pages that a request of `num_known` tokens gets by a load, and finds on the device."""
        return (num_known if self.tiers.full_prompt_hits else num_known - 1) // self._page_size

    def try_start(
        self,
        request: Request,
        match: Match,
        num_known: int,
        num_behind: int,
        now_ns: int,
        num_kept: int = 0,
        budget: int = 0,
    ) -> bool:
        """Begin to load the pages after `match` that the tiers have for `request`, or to wait for a load of them.

        Return False if the pages are to be computed: the tiers do not have them, or computing is faster; or, with
        `num_short`, if the load has to wait for memory. `num_behind` requests wait. `num_kept`: pages to leave free.
        `budget`: the most tokens that the request may compute in this step.
        """
        tiers = self.tiers
        self.num_short = 0
        self.is_short_of_tokens = False
        limit = self._limit(num_known)
        start = match.num_pages
        offer = tiers.lookup(request.index, request.content, start, limit)
        num_offered = 0 if offer is None else offer.num_pages
        coming = tiers.coming(request.content, start + num_offered, limit)
        if offer is None:
            if coming is None:
                return False
            from kvarts.core.kv.transfer import Offer

            offer = Offer(0, (0,) * len(tiers.tier_names))
        if num_behind:
            # Where running requests leave no memory for another one, those behind gain nothing by a load, which keeps
            # its memory meanwhile.
            num_left = self._cache.num_free + sum(num_pages for _, num_pages in self.tables())
            if num_left < 2 * self._cache.needs.to_compute(num_known, self._page_size):
                num_behind = 0
        leader, awaited = self._leader(request, start, limit) if self.loading else (None, None)
        if awaited is None and coming is not None:
            from kvarts.core.kv.transfer import Awaited

            awaited = Awaited(num_offered + coming.num_pages, coming.end_ns)
        weighed = self._waits.weigh(request, offer, match, num_known, num_behind, awaited)
        if weighed.is_awaited and leader is None:
            assert coming is not None
            tiers.forget(request.index)
            tiers.await_write(coming.write)
            self._followers.setdefault(-1 - coming.write, []).append(request)
            self.num_following += 1
            return True
        if weighed.is_awaited:
            assert leader is not None
            tiers.forget(request.index)
            if leader.loaded is None:  # else its request still computes the pages before those that were loaded
                tiers.follow(leader.transfer)
            self._followers.setdefault(leader.request.index, []).append(request)
            self.num_following += 1
            if self._emit is not None:
                self._emit(LoadAwaited(leader.transfer, request.index, start))
            return True
        if self._emit is not None and weighed.num_pages < offer.num_pages:
            offered = self._named(offer.by_tier)
            weights = weighed.num_pages, weighed.load_ns, weighed.worth_ns
            self._emit(LoadWeighed(request.index, request.content, start, offered, *weights))
        end = start + weighed.num_pages
        if not weighed.num_pages or not self._waits.fits(request, match, num_known, end, num_kept, budget):
            tiers.forget(request.index)
            return False
        if self._emit is not None:
            # Emitted before the evictions that make room for it.
            by_tier = self._named(weighed.by_tier)
            num_held = self._waits.held(request, match, num_known, weighed.num_front, end)
            self._emit(
                LoadStarted(
                    tiers.num_transfers,
                    request.index,
                    request.content,
                    start,
                    num_held,
                    by_tier,
                    num_front_pages=weighed.num_front,
                )
            )
        front_end = start + weighed.num_front
        load = LoadUnderWay(request, tiers.num_transfers, start, front_end, end, weighed.by_tier)
        self.loading[request.index] = load
        table = request.table = self._waits.open(request, match, num_known, weighed.num_front, end)
        self._cache.states.begin(table, max(request.num_prompt_tokens, num_known - 1))
        request.become(RequestState.LOADING)
        num_loaded = weighed.num_pages - weighed.num_front
        load.end_ns = tiers.start_load(
            request.index, request.content, front_end, num_loaded, table, weighed.num_front, weighed.wait_ns
        )
        request.num_computed = start * self._page_size
        if weighed.num_front:
            load.end_ns = max(load.end_ns, now_ns + weighed.front_ns)
            self.fronts.append(load)
        self._waits.begun(load)
        return True

    def num_to_load(self, request: Request, match: Match, num_known: int, budget: int, num_kept: int) -> int:
        """Return the blocks that must be free to load what the tiers have for `request`, with `num_kept` to leave free.

        Where groups keep less than all tokens, that may be fewer than computing takes. At least MOST_COUNT for whole
        pages, or if the tiers have nothing.
        """
        offers, tiers, waits = self.offers, self.tiers, self._waits
        if offers is None:
            return MOST_COUNT
        offer = tiers.lookup(request.index, request.content, match.num_pages, self._limit(num_known))
        if offer is None:
            return MOST_COUNT
        num_wanted = waits.wanted(request, match, num_known, match.num_pages + offer.num_pages, budget, num_kept)
        for depth in range(len(offer.by_tier) - 1, 0, -1):
            if any(offer.by_tier[:depth]):
                offers.offer_up_to(request.index, depth)
                end = match.num_pages + sum(offer.by_tier[:depth])
                num_wanted = min(num_wanted, waits.wanted(request, match, num_known, end, budget, num_kept))
        tiers.forget(request.index)
        return num_wanted

    def weigh(self, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None) -> Weighed:
        """Return the part of `offer` to load after `match`."""
        start = match.num_pages
        return self.tiers.weigh(offer, start, self._page_size, num_known, num_behind=num_behind, awaited=awaited)

    def weigh_without_front(
        self, offer: Offer, match: Match, num_known: int, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the same if no page of the offer is computed while others are loaded."""
        without = replace(offer, most_front=(0,) * len(offer.by_tier))
        return self.weigh(without, match, num_known, num_behind, awaited)

    def begin_front(self, table: BlockTable, start: int, num_in_flight: int) -> None:
        """Release parts of a front to which neither tokens from `start` on nor the `num_in_flight` before attend."""
        self._cache.incoming.begin_front(table, start, num_in_flight)

    def extend_front(self, table: BlockTable, end: int) -> None:
        """Make the pages findable that the tokens of a front up to `end` fill, before those that are loaded."""
        self._cache.incoming.extend_front(table, end)

    def begin_turn(self, request: Request, loaded: Loaded) -> bool:
        """Let `request`, whose load has ended, have its turn; return False if it has nothing, and waits again."""
        return self._waits.begin_turn(request, loaded)

    def num_to_run(self, request: Request, budget: int) -> int:
        """Return the pages that `request`, whose load has ended, lacks to compute its known tokens.

        `budget`: the most tokens that it may compute in the next step.
        """
        return self._waits.to_run(request, budget)

    def begin_run(self, request: Request) -> None:
        """Release the parts that `request`, which is admitted after its load, held only to compute its front."""
        self._waits.begin_run(request)

    def _leader(self, request: Request, start: int, limit: int) -> tuple[LoadUnderWay | None, Awaited | None]:
        """Return the load that brings the most pages of `request` from page `start` on, and those pages."""
        content = request.content
        best, most = None, start
        for load in self.loading.values():
            other = load.request.content
            if load.start <= start < load.end and other.salt == content.salt:
                end = content.common_pages(other, 0, min(limit, load.end))
                if end > most:
                    best, most = load, end
        if best is None:
            return None, None
        if self.offers is not None and most < best.end:
            return None, None  # a load brings windows for its end only
        from kvarts.core.kv.transfer import Awaited

        return best, Awaited(most - start, best.end_ns)

    def take_ended(self) -> None:
        """Process the loads that have ended."""
        self._waits.take_ended()

    def let_run(self) -> None:
        """Process the loads that have ended: their pages can be hit, and the requests that waited for them can run."""
        if not (self.ended or self.early or self.tiers.has_loaded):
            return
        ended, self.ended, self.early = self.ended, [], []
        for loaded in self.tiers.take_loaded():
            under_way = self.loading.get(loaded.request)
            if under_way is None:
                continue  # its request has run since its first layer was there
            if under_way.loaded is None:
                ended.append(under_way)
            under_way.loaded = loaded
        for load in ended:
            request, result = load.request, load.loaded
            assert result is not None
            has_front = request.num_computed < load.front_end * self._page_size
            is_abandoned = request.state is RequestState.ABANDONED
            if result.is_under_way or (has_front and not is_abandoned):
                self.ended.append(load)
                if not (has_front or is_abandoned):
                    self.early.append(load)
                continue
            del self.loading[request.index]
            if not has_front:
                self._count_front(load)
            can_go_on = not has_front and self._waits.arrive(load, result)
            if request.state is RequestState.ABANDONED:
                self.num_abandoned -= 1
                self.close(request)
            elif can_go_on:
                request.become(RequestState.LOADED)
                self.loaded.append((request, result))
            self.let_follow(request.index)
            if not can_go_on and request.state is RequestState.LOADING:
                if load.front_end > load.start:
                    self._count_lost_front(load)
                request.seniority = -1
                self.wait_again(request)

    def start_early(self) -> tuple[Request, Loaded]:
        """Let the first request of `early` run in the planned step, while its load is under way; return its pages.

        No other request uses them before that step has ended, which it does after the load.
        """
        load = self.early.pop(0)
        request, result = load.request, load.loaded
        assert result is not None
        self.ended.remove(load)
        del self.loading[request.index]
        self._count_front(load)
        if self._emit is not None:
            self._emit(LoadUsed(load.transfer, request.index))
        self.tiers.use_early(load.transfer)
        can_go_on = self._waits.arrive(load, result)
        assert can_go_on, "what is under way does not fail any more"
        request.become(RequestState.LOADED)
        self.let_follow(request.index)
        return request, result

    def end_wait(self, write: int) -> None:
        """Let the requests go on that wait for a write of another engine, which has ended, or failed."""
        self.let_follow(-1 - write)

    def let_follow(self, leader: int) -> None:
        """Return the followers of `leader` to the head of the waiting queue."""
        if followers := self._followers.pop(leader, None):
            self.num_following -= len(followers)
            for follower in reversed(followers):
                follower.goes_first = True
                self._waiting.push(follower)

    def _count_front(self, load: LoadUnderWay) -> None:
        """Count the tokens that were computed before those of a load, which are no hits."""
        request, start, end = load.request, load.start * self._page_size, load.front_end * self._page_size
        request.front_tokens = max(0, end - max(start, request.furthest_computed))
        request.recomputed_tokens += end - start - request.front_tokens

    def _count_lost_front(self, load: LoadUnderWay) -> None:
        """Count what a request found and computed before a load that failed, as if it had run and was preempted."""
        request, start, end = load.request, load.start * self._page_size, load.front_end * self._page_size
        request.cached_tokens += max(0, start - request.furthest_computed)
        request.furthest_computed = max(request.furthest_computed, end)
        request.front_tokens = 0
        request.has_lost_front = True

    def resume(self, request: Request, loaded: Loaded) -> int:
        """Count the loaded tokens of `request`, which starts to run; return the tokens that need no computing."""
        page_size = self._page_size
        self._waits.resumed(request)
        # If the whole prompt was found, its last token is computed again.
        hit_tokens = min(loaded.num_pages * page_size, request.num_known - 1)
        below = []
        start = (loaded.num_pages - sum(loaded.by_tier)) * page_size
        for num_pages in loaded.by_tier:
            end = start + num_pages * page_size
            below.append(max(0, min(end, hit_tokens) - max(start, request.furthest_computed)))
            start = end
        if any(below):
            so_far = request.cached_tokens_below or (0,) * len(below)
            request.cached_tokens_below = tuple(map(sum, zip(so_far, below, strict=True)))
        return hit_tokens

    def cancel(self, request: Request) -> None:
        """Drop a request that is here. Pages that a transfer fills are freed when it ends."""
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            self.num_following -= 1
            for leader, followers in self._followers.items():
                if request in followers:
                    followers.remove(request)
                    if not followers:
                        del self._followers[leader]
                    break
            request.become(RequestState.CANCELLED)
        elif request.state is RequestState.LOADING:
            request.become(RequestState.ABANDONED)
            self.num_abandoned += 1
            self.fronts = [load for load in self.fronts if load.request is not request]
            self.early = [load for load in self.early if load.request is not request]
        else:
            self.loaded = [entry for entry in self.loaded if entry[0] is not request]
            self.close(request)
        self._waits.cancelled(request)

    def add_computed(self, content: Content, num_full: int, table: BlockTable) -> None:
        """Record that the first `num_full` pages of `content` are complete when the scheduled step ends."""
        self._confirmed.append((content, num_full, table))

    def confirm(self) -> None:
        """Confirm complete pages to the tiers: the scheduled step has ended."""
        for content, num_full, table in self._confirmed:
            self.tiers.confirm(content, num_full, table)
        self._confirmed.clear()

    def by_name(self, loaded: Loaded) -> tuple[tuple[str, int], ...]:
        """Return the name of each tier with the number of pages loaded from it."""
        return self._by_name(loaded.by_tier)

    def tables(self) -> list[tuple[BlockTable, int]]:
        """Return the block table of each request here with its number of pages."""
        return [(table, table.num_pages) for request in self.requests() if (table := request.table) is not None]

    def requests(self) -> list[Request]:
        """Return the requests here that have pages, or get them from their load."""
        return [*(load.request for load in self.loading.values()), *(request for request, _ in self.loaded)]

    def _named(self, by_tier: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        return tuple((name, count) for name, count in self._by_name(by_tier) if count)

    def _by_name(self, by_tier: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.tiers.tier_names, by_tier, strict=True))

    def close(self, request: Request) -> None:
        """Release all pages of `request`, which never ran; pages found or loaded stay cached."""
        request.become(RequestState.CANCELLED)
        self.release(request)

    def wait_again(self, request: Request) -> None:
        """Release everything that `request` holds; it waits to be matched again, before others."""
        self.release(request)
        request.become(RequestState.WAITING)
        request.goes_first = True
        self._waiting.push(request)

    def release(self, request: Request) -> None:
        """Release everything that `request` holds; it never ran."""
        table = request.table
        assert table is not None
        self._cache.incoming.drop(table)
        request.table = None
