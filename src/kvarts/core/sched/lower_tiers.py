"""The tiers below one device, as scheduler, engine and drivers see them: a Protocol for each kind of caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvarts.core.content import Content
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.eviction import PinnedPages

if TYPE_CHECKING:
    from kvarts.core.kv.runs import RunMatch
    from kvarts.core.kv.transfer import (
        Awaited,
        Coming,
        Loaded,
        Offer,
        Transfer,
        TransferReport,
        TransferTotals,
        Weighed,
    )

__all__ = [
    "GroupOffers",
    "LowerTiers",
    "Offers",
    "Stores",
    "TiersBelow",
    "Transfers",
]


class Offers(Protocol):
    """What the tiers below have for requests, and the loads of it.

    Promises: every load that was started is returned by `take_loaded` once when it ends.
    """

    full_prompt_hits: bool
    """Whether a load may cover a whole prompt; only its last token is then computed again."""

    num_transfers: int
    """The number of transfers begun so far, which is also the number of the next."""

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Pin and return the pages [start, limit) of `content` that the tiers have; None if there are none."""

    def forget(self, request: int) -> None:
        """Release the pins of the offer to `request`."""

    def found(self, content: Content, start: int, limit: int) -> tuple[int, ...]:
        """Return how many of the pages [start, limit) of `content` each tier of this engine alone adds, in turn."""

    def elsewhere(self, content: Content, start: int, limit: int) -> Offer | None:
        """Return the parts that make pages from `start` on findable, and that another engine has; None without any.

        As an offer of one tier, in bytes on all devices of an engine. Nothing is pinned.
        """

    def coming(self, content: Content, start: int, limit: int) -> Coming | None:
        """Return the pages of `content` from `start` on that other engines are storing below; None without any."""

    def await_write(self, write: int) -> None:
        """Record that a request waits for a write of another engine."""

    def weigh(
        self, offer: Offer, start: int, page_size: int, num_known: int, *, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return the part of `offer` to load from page `start` on, for a request of `num_known` tokens.

        `num_behind`: requests behind it that do not wait for memory. `awaited`: the load under way that brings some of
        the same pages, if one does.
        """

    def start_load(
        self,
        request: int,
        content: Content,
        start: int,
        num_pages: int,
        table: BlockTable,
        num_front: int = 0,
        wait_ns: int | None = None,
    ) -> int:
        """Begin to load `num_pages` pages of the offer to `request` into its pages from page `start` on.

        They follow the first `num_front` pages of the offer. Return when the load should end. `wait_ns`: when it can be
        used, see Weighed.
        """

    def use_early(self, transfer: int) -> None:
        """Record that the planned step uses the pages of a load under way: no request waits for it any longer."""

    def follow(self, transfer: int) -> None:
        """Record that one more request waits for a load that is under way."""

    @property
    def has_loaded(self) -> bool:
        """Whether a load has ended and was not taken."""

    def take_loaded(self) -> list[Loaded]:
        """Return the loads that ended, or can be used from now on, since the last call, in that order."""


class Stores(Protocol):
    """What is to be stored below: pages that are complete, and the states of requests that wait again."""

    def begin_step(self, now_ns: int) -> None:
        """Take note that the step that starts at `now_ns` is planned."""

    def plan_stores(self, now_ns: int) -> None:
        """Begin the stores of the step that starts at `now_ns`, which has taken its pages."""

    def confirm(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Record that the first `num_pages` pages of `content`, in `table`, are complete."""

    def preempted(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Record that a request lost the first `num_pages` pages of `content`, in `table`, and waits again."""

    def keep_state(self, content: Content, num_tokens: int, table: BlockTable) -> bool:
        """Return whether the state of a request that is about to be preempted, after `num_tokens`, is kept for it."""

    def resumed(self, content: Content) -> None:
        """Record that a request whose state was kept runs again, from that state or without it."""

    def ended(self, content: Content) -> None:
        """Record that the request of `content`, which was preempted before, has ended."""

    def pages_to_spare(self) -> int | None:
        """Return the pages that identical steps can take before the tiers must act; None if they must in the next."""

    @property
    def is_due(self) -> bool:
        """Whether pages must be stored, or spilled to the next tier, whatever happens on the device."""


class Transfers(Protocol):
    """The transfers under way, as a driver and an executor see them.

    Promises: pages that a transfer reads or writes are held until it ends, even if its request is cancelled.
    """

    def take_planned(self) -> tuple[Transfer, ...]:
        """Return the transfers that an executor has to begin with this step."""

    def report(self, reports: Sequence[TransferReport], now_ns: int) -> None:
        """Process an executor's reports on transfers at `now_ns`."""

    def ends(self, transfer: int, end_ns: int) -> None:
        """Record when `transfer` ends, if that was not known when it began."""

    def fails_last(self, transfer: int, end_ns: int) -> None:
        """Record that the pages of a load from the last tier do not arrive; pages from other tiers do."""

    def expire(self, now_ns: int) -> None:
        """End as failed the transfers that no executor has reported before their deadline."""

    def abort(self, now_ns: int) -> None:
        """End all transfers under way as failed, in virtual time."""


class TiersBelow(Protocol):
    """The tiers below one device, as a driver in virtual time and a report see them.

    They are transfers under way, and how long steps take beside them.
    """

    @property
    def has_work(self) -> bool:
        """Whether a transfer is under way or about to begin, or a load has ended and was not taken."""

    @property
    def next_ns(self) -> int:
        """The end of the next transfer to end, in virtual time; NEVER_NS without one."""

    def advance_to(self, now_ns: int) -> bool:
        """End the transfers that are due by `now_ns`; return whether there were any."""

    def step_ns(self, now_ns: int, duration_ns: int) -> int:
        """Return the duration of the planned step, which starts at `now_ns` and would take `duration_ns` alone."""

    def measure(self, num_tokens: int, num_decodes: int, duration_ns: int) -> None:
        """Record the duration of a real executor's step without transfers; `num_tokens`: computed prompt tokens."""

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Their names, the fastest first."""

    def num_pages(self) -> tuple[int, ...]:
        """Return the used and cached pages of each tier, as consecutive pairs."""

    def totals(self) -> TransferTotals:
        """Return the totals of transfers so far."""


class LowerTiers(Offers, Stores, Transfers, TiersBelow, Protocol):
    """The tiers below one device, as used by scheduler and engine: a caller of one role needs no other."""

    @property
    def layout(self) -> object:
        """What transfers copy; below a device with KV groups, it is a GroupOffers."""

    def holds(self) -> list[PinnedPages]:
        """Return the pages of the device that transfers hold."""

    def reset(self) -> None:
        """Forget the pages that the tiers hold, and those that were to be stored: the device has lost its own."""

    def check(self, *, at_rest: bool = True) -> None:
        """Assert laws L1 to L3 in every tier below; unless `at_rest`, where enough has moved for it to be worth it."""


class GroupOffers(Protocol):
    """What tiers below a device with KV groups offer to requests, in parts.

    A load covers all that is offered when it begins, except its front.
    """

    def offered(self, request: int) -> RunMatch:
        """Return the longest prefix that every group could resume from with the parts offered to `request`."""

    def recognise(self, content: Content) -> None:
        """Make the parts of `content` that an earlier process stored findable. No match may be in use."""

    def offer_up_to(self, request: int, depth: int) -> None:
        """Offer to `request` what the device and the first `depth` tiers have, and nothing of slower ones."""

    def turn(self, request: int, *, is_used: bool) -> None:
        """Note that `request`, which waited without a place, has its turn after its load; not `is_used`: it left."""
