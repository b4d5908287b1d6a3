"""The seam between transfers and the contents of device and tiers, which depend on how pages are laid out.

A model in which every layer keeps every token has whole pages, found by a tree for the device and one for each tier
(`page_layout.py`). A model with KV groups has parts of pages, found by one tree (`part_layout.py`). Everything else is
the same for both, and in one place: `Offloader` decides when something is copied, how long it takes, and which requests
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from mypy_extensions import mypyc_attr

from kvarts.core.content import Content
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.eviction import PinnedPages
from kvarts.core.kv.transfer import Coming, Loaded, Offer, Weighed
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.store_policy import Backlog, PagePolicy, Spill
from kvarts.core.tiers.transfers import Copies, Loading

if TYPE_CHECKING:
    from kvarts.core.tiers.part_policy import PartPolicy

__all__ = ["ConnectedTier", "Layout", "Tier"]

TierT = TypeVar("TierT", bound="Tier")


class Tier(Protocol):
    """Memory or files below the device, as transfers and reports see it, in blocks: pages, or of the device's size."""

    name: str

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are pinned or coming."""

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found and are not pinned."""

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that were evicted to make room."""

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the keys of files to delete since the last call; empty for a tier without files."""

    def reset(self) -> None:
        """Drop everything. Running transfers end without effect."""


class ConnectedTier(Generic[TierT]):
    """A tier, and the channels to it and from it. `is_read_only`: nothing is stored there."""

    __slots__ = ("is_read_only", "read", "tier", "write")

    def __init__(self, tier: TierT, write: Channel, read: Channel, *, is_read_only: bool = False) -> None:
        self.tier: Final = tier
        self.write: Final = write
        self.read: Final = read
        self.is_read_only: Final = is_read_only


@mypyc_attr(allow_interpreted_subclasses=True)
class Layout(Generic[TierT]):
    """The contents of a device and of its tiers, and their changes by transfers.

    Promises: the source and the target of copies stay from their beginning to `end_store` or `end_load`, which is
    called once; nothing is findable in its target before that, except by `use_early`.

    `connected`: the tiers, the fastest first. `policy`: chooses what is stored. `block_bytes`, `page_bytes`: the bytes
    of a block, which tiers count, and of a page with all its parts. `is_stored`: see Backlog. `store_within_ns`: a
    channel that could not carry something within this time is behind. `with_page_ids`: copies name pages.
    """

    def __init__(
        self,
        connected: Sequence[ConnectedTier[TierT]],
        policy: PagePolicy | PartPolicy,
        *,
        block_bytes: int,
        page_bytes: int,
        is_stored: Callable[[int, Spill], bool],
        store_within_ns: int,
        with_page_ids: bool,
    ) -> None:
        self.can_split = True
        """Whether the first pages of an offer can be computed while the others are loaded."""
        self.spills_first = True
        """Whether spills begin before the stores of the same step, which might evict the same pages."""
        self.counts_blocks = False
        """Whether the event of the end of a transfer contains the number of blocks that arrived."""
        self.connected = connected
        self.policy = policy
        self.tiers = tuple(each.tier for each in connected)
        self.block_bytes = block_bytes
        self.page_bytes = page_bytes
        self.num_refused = 0
        """Pages that were to be stored and found no room."""
        self.own = tuple(each.tier for each in connected if not each.is_read_only)
        """The tiers that are written to, which are the first ones."""
        self.backlog = Backlog(len(self.own), is_stored)
        self._store_within_ns = store_within_ns
        self._with_page_ids = with_page_ids

    def begin_step(self) -> None:
        """Take note that what became complete in the last step is computed."""

    def confirm(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Record that the first `num_pages` pages of `content`, in `table`, are complete."""

    def preempted(self, content: Content, num_pages: int, table: BlockTable) -> None:
        """Record that a request lost the first `num_pages` pages of `content`, in `table`, and waits again."""

    def keep_state(self, content: Content, num_tokens: int, table: BlockTable) -> bool:
        """Return whether the state of a request that is about to be preempted, after `num_tokens`, is kept for it."""
        return False

    def resumed(self, content: Content) -> None:
        """Record that a request whose state was kept runs again, from that state or without it."""

    def ended(self, content: Content) -> None:
        """Record that the request of `content`, which was preempted before, has ended."""

    # Stores and spills ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether something is to be stored, independent of later changes on the device."""
        return not self.backlog.is_behind[0] and self.policy.has_work

    def pages_to_spare(self) -> int | None:
        """Return how many pages can be taken in identical steps before the tiers must act; None: in the next step."""
        raise NotImplementedError

    def store(self, now_ns: int, is_moving: Callable[[], bool]) -> Copies | None:
        """Choose and pin pages to store in the first tier, which is not behind, in this step; None without any.

        `is_moving`: whether something is on its way to a tier, or is to be: after it there may be room.
        """
        raise NotImplementedError

    def spill(self, place: int, now_ns: int) -> Copies | None:
        """Choose and pin pages to copy from the tier at `place` to the next; None without any."""
        raise NotImplementedError

    def _room(self, place: int, now_ns: int) -> int:
        """Return how many blocks the channel to the tier at `place` could carry in time."""
        return self.connected[place].write.num_within(now_ns, self._store_within_ns, self.block_bytes)

    def end_store(self, copies: Copies, *, is_stored: bool, is_given_up: bool) -> None:
        """Make stored or spilled copies findable, unless that failed, and unpin them."""
        raise NotImplementedError

    def holds(self, copies: Copies) -> list[PinnedPages]:
        """Return the pages that `copies` hold on the device."""
        raise NotImplementedError

    def num_idle(self, copies: Copies) -> int:
        """Return the blocks of the device that a store holds and no request does."""
        raise NotImplementedError

    # Loads ----------------------------------------------------------------------------------------------------

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Return the pages [start, limit) of `content` that the tiers have; None without usable ones.

        They are pinned for `request`, in place of its previous pins.
        """
        raise NotImplementedError

    def found(self, content: Content, start: int, limit: int) -> tuple[int, ...]:
        """Return how many of the pages [start, limit) of `content` each tier that is not elsewhere adds, in turn."""
        raise NotImplementedError

    def elsewhere(self, content: Content, start: int, limit: int) -> Offer | None:
        """Return the parts that make pages from `start` on findable, and that another engine has; None without any.

        As an offer of one tier, in bytes on all devices of an engine.
        """
        return None

    def forget(self, request: int) -> None:
        """End the pins of the offer to `request`."""
        raise NotImplementedError

    def coming(self, content: Content, start: int, limit: int, now_ns: int) -> Coming | None:
        """Return the pages from `start` on that other engines are storing in the last tier; None without any."""
        return None

    def await_write(self, write: int) -> None:
        """Note that a request waits for a write of another engine to the last tier."""
        raise NotImplementedError

    def num_gaining(self, num_behind: int) -> int:
        """Return how many of `num_behind` waiting requests gain by the load of one that is before them."""
        return num_behind

    def weighed(self, offer: Offer, weighed: Weighed, now_ns: int) -> None:
        """Note which part of the newest `offer` is to be loaded, if there is room, from `now_ns` on."""

    def load(
        self, request: int, content: Content, start: int, num_pages: int, table: BlockTable, num_front: int
    ) -> Loading:
        """Pin `num_pages` pages of the offer to `request`, after its first `num_front`, for a load into `table`."""
        raise NotImplementedError

    def use_early(self, loading: Loading) -> None:
        """Make the pages of a load under way findable: the planned step uses them, and ends after the load."""

    def end_load(self, loading: Loading, num_good: int, emit_ended: Callable[[int], None]) -> Loaded:
        """End a load whose first `num_good` blocks arrived, and return the pages that its request has now.

        `emit_ended` is called with the number of pages that arrived.
        """
        raise NotImplementedError

    # All of it ------------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, int]:
        """Return totals of this layout, by name."""
        return {}

    def reset(self) -> None:
        """Drop everything below, and store nothing of earlier steps. Running transfers end as they would have."""
        self.backlog.clear()
        self.policy.forget()
        for tier in self.tiers:
            tier.reset()

    def check(self, under_way: Sequence[Copies], *, at_rest: bool = True) -> None:
        """Assert laws L1 to L3 in every tier, given the copies under way; unless `at_rest`, only if much has moved."""
        raise NotImplementedError
