"""Requests that wait for pages from a tier below the device.

A waiting request for which a tier has pages is LOADING: it has all pages of its known tokens and a place among the
running requests, and waits for a transfer to fill the first pages. It is never a victim, since its pages could not be
given away before the transfer ends. Then it is LOADED, and admitted before the waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvarts.content import Content
from kvarts.event_log import Tell
from kvarts.events import LoadStarted
from kvarts.kv.cache import Holding, PageCache
from kvarts.kv.transfer import Loaded, Offer, Transfer, TransferReport, TransferTotals
from kvarts.kv.tree import Match, Path
from kvarts.request import Request, RequestState

__all__ = ["Loads", "LowerTiers"]


class LowerTiers(Protocol):
    """The tiers below one device, as scheduler and engine know them.

    Promises: pages that a transfer reads or writes are held until it ends, even if its request is cancelled; every load
    that was started is returned by `take_loaded` once.
    """

    tier_names: tuple[str, ...]
    full_prompt_hits: bool
    """Whether a load may cover a whole prompt, of which only the last token is then computed again."""

    num_transfers: int
    """The number of transfers begun so far, which is also the number of the next."""

    @property
    def has_work(self) -> bool:
        """Whether a transfer is under way or about to begin, or a load has ended and was not taken."""

    @property
    def has_loaded(self) -> bool:
        """Whether a load has ended and was not taken."""

    @property
    def is_due(self) -> bool:
        """Whether something is to be stored, or passed on to the next tier, whatever becomes of the device."""

    @property
    def next_ns(self) -> int:
        """The end of the next transfer to end, in virtual time; NEVER_NS without one."""

    def num_pages(self) -> tuple[int, ...]:
        """Return pages used and cached in each tier, one pair after the other."""

    def totals(self) -> TransferTotals:
        """Return what moved so far."""

    def plan_stores(self, now_ns: int) -> None:
        """Begin the stores of the step that starts at `now_ns`."""

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Take note that the first `num_pages` pages of `content`, in `holding`, are complete."""

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Pin and return what the tiers have of `content` in pages [start, limit); None if they have nothing."""

    def start_load(self, request: int, content: Content, start: int, num_pages: int, holding: Holding) -> None:
        """Begin to load `num_pages` pages of the offer to `request` into its pages from page `start` on."""

    def take_planned(self) -> tuple[Transfer, ...]:
        """Return the transfers that an executor has to begin with this step."""

    def take_loaded(self) -> list[Loaded]:
        """Return the loads that ended since the last call, in that order."""

    def pages_to_spare(self) -> int | None:
        """Return how many pages can be taken in steps alike before the tiers must act; None: in the next step."""

    def advance_to(self, now_ns: int) -> bool:
        """End the transfers that are due by `now_ns`; return whether there were any."""

    def report(self, reports: Sequence[TransferReport], now_ns: int) -> None:
        """Take in the reports of an executor on transfers at `now_ns`."""

    def holds(self) -> list[Path]:
        """Return the paths that transfers hold on the device."""

    def reset(self) -> None:
        """Forget the pages that the tiers hold."""

    def check(self) -> None:
        """Assert laws L1 to L3 in every tier below."""


class Loads:
    """Owner of requests between waiting and running: their load is under way, or it has ended."""

    def __init__(self, tiers: LowerTiers, cache: PageCache, page_size: int, tell: Tell | None) -> None:
        self.tiers = tiers
        self._cache = cache
        self._page_size = page_size
        self._tell = tell
        self._loading: dict[int, Request] = {}
        """Requests with a load under way by index, in the order of admission, ABANDONED ones included."""
        self.loaded: list[tuple[Request, Loaded]] = []
        """Requests with their loads that have ended, in that order."""
        self._num_abandoned = 0
        self._confirmed: list[tuple[Content, int, Holding]] = []
        """Contents that get full pages in the scheduled step, how many they have then, and their holdings."""

    @property
    def num_requests(self) -> int:
        """Requests that wait for a load, or have waited for one that ended since the last step."""
        return len(self._loading) - self._num_abandoned + len(self.loaded)

    def __iter__(self) -> Iterator[Request]:
        """Return the requests here that were not cancelled: those that wait for a load, then loaded ones."""
        yield from (request for request in self._loading.values() if request.state is RequestState.LOADING)
        yield from (request for request, _ in self.loaded)

    def try_start(self, request: Request, match: Match, num_known: int) -> bool:
        """Begin to load the pages that the tiers have for `request` after `match`; return False if they have none."""
        tiers = self.tiers
        limit = (num_known if tiers.full_prompt_hits else num_known - 1) // self._page_size
        offer = tiers.lookup(request.index, request.content, match.num_pages, limit)
        if offer is None:
            return False
        num_held = -(-num_known // self._page_size)
        if self._tell is not None:
            # Reported before the evictions that make room for it.
            by_tier = tuple((name, count) for name, count in self._by_name(offer.by_tier) if count)
            self._tell(
                LoadStarted(tiers.num_transfers, request.index, request.content, match.num_pages, num_held, by_tier)
            )
        holding = request.holding = self._cache.open(match)
        self._cache.grow(holding, num_held)
        request.become(RequestState.LOADING)
        self._loading[request.index] = request
        tiers.start_load(request.index, request.content, match.num_pages, offer.num_pages, holding)
        return True

    def take_ended(self) -> None:
        """Take in the loads that have ended: their pages can be hit, and the requests that waited for them can run."""
        for loaded in self.tiers.take_loaded():
            request = self._loading.pop(loaded.request)
            assert request.holding is not None
            self._cache.publish(request.holding, request.content, loaded.num_pages)
            if request.state is RequestState.ABANDONED:
                self._num_abandoned -= 1
                self._close(request)
            else:
                request.become(RequestState.LOADED)
                self.loaded.append((request, loaded))

    def resume(self, request: Request, loaded: Loaded) -> int:
        """Count the loaded tokens of `request`, which begins to run; return the tokens that need no computing."""
        page_size = self._page_size
        # Where the whole prompt was found, its last token is computed again.
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
        """Drop a request that is LOADING or LOADED. Pages that a transfer fills are freed when it ends."""
        if request.state is RequestState.LOADING:
            request.become(RequestState.ABANDONED)
            self._num_abandoned += 1
        else:
            self.loaded = [entry for entry in self.loaded if entry[0] is not request]
            self._close(request)

    def add_computed(self, content: Content, num_full: int, holding: Holding) -> None:
        """Take note that the first `num_full` pages of `content` are complete when the scheduled step ends."""
        self._confirmed.append((content, num_full, holding))

    def confirm(self) -> None:
        """Tell the tiers which pages are complete: the scheduled step has ended."""
        for content, num_full, holding in self._confirmed:
            self.tiers.confirm(content, num_full, holding)
        self._confirmed.clear()

    def by_name(self, loaded: Loaded) -> tuple[tuple[str, int], ...]:
        """Return the name of each tier with the number of pages that came from it."""
        return self._by_name(loaded.by_tier)

    def holdings(self) -> list[tuple[Holding, int]]:
        """Return the holding of each request here with its number of pages."""
        return [(holding, holding.num_pages) for request in self.requests() if (holding := request.holding) is not None]

    def requests(self) -> list[Request]:
        """Return the requests here."""
        return [*self._loading.values(), *(request for request, _ in self.loaded)]

    def _by_name(self, by_tier: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.tiers.tier_names, by_tier, strict=True))

    def _close(self, request: Request) -> None:
        """Give back all pages of `request`, which never ran; pages found or loaded stay cached."""
        request.become(RequestState.CANCELLED)
        holding = request.holding
        assert holding is not None
        num_full = holding.path[-1].end if holding.path else 0
        self._cache.close(holding, request.content, num_full, holding.num_pages)
        request.holding = None
