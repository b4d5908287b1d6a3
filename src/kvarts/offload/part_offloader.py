"""What goes on between a device with KV groups and the host memory below it.

As Offloader does it for runs of pages: stores wait when their lane is behind, loads are begun where they pay, what a
transfer reads or writes is held until it ends. A transfer moves parts of pages, each of one or several blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from kvarts.content import Content
from kvarts.kv.below import BelowPart
from kvarts.kv.cache import Holding
from kvarts.kv.node import HeldPages
from kvarts.kv.parts import GroupMatch, Part
from kvarts.kv.pool import PageId
from kvarts.kv.tiered_pages import HeldParts, LoadingHolding, TieredPages
from kvarts.kv.tiered_parts import Incoming
from kvarts.kv.transfer import Awaited, Direction, Loaded, Move, Offer, PrefillTimes, TransferTotals, Weighed
from kvarts.offload.channel import Channel
from kvarts.offload.part_policy import PartPolicy
from kvarts.offload.part_tier import PartTier
from kvarts.offload.transfers import Transfers
from kvarts.offload.under_way import ALL, UnderWay
from kvarts.offload.weigher import Weigher

__all__ = ["PartOffloader"]


MOST_IDLE = 16
IDLE_WITHIN_NS = 10_000_000
"""Of what nothing uses, stores hold at once as much as their lane carries in so long, or one in so many blocks."""


class PartsUnderWay(UnderWay):
    """Parts that are moved. `below`: they are pinned there. `above`: a store holds them on the device.

    `incoming`: a load fills them, so that its request begins with the `num_loaded` pages from its first on, of `match`.
    """

    below: tuple[BelowPart, ...] = ()
    above: tuple[Part, ...] = ()
    incoming: tuple[Incoming, ...] = ()
    num_loaded: int = 0
    num_idle: int = 0
    """Blocks of `above` that nothing used when their store began."""
    match: GroupMatch | None = None


class Offered(msgspec.Struct, eq=False):
    """What was offered to a request: `match` can be had with `parts` of the tier, which are pinned."""

    match: GroupMatch
    parts: list[BelowPart]


class PartOffloader(Transfers):
    """Owner of the tier below one device, of its channels, and of every transfer under way: LowerTiers for KV groups.

    `cache`: the device's. `write` and `read`: towards the tier, and back. `policy`: what is stored, and
    when. Others as in Offloader.
    """

    full_prompt_hits: bool = False

    def __init__(
        self,
        cache: TieredPages,
        tier: PartTier,
        policy: PartPolicy,
        *,
        write: Channel,
        read: Channel,
        prefill: PrefillTimes | None = None,
        store_within_ns: int = ALL,
        deadline_ns: int = ALL,
        workers: int = 1,
        fail_every: int = 0,
        with_page_ids: bool = False,
    ) -> None:
        super().__init__(
            [read],
            Weigher([read], cache.memory.page_bytes, prefill),
            deadline_ns=deadline_ns,
            workers=workers,
            fail_every=fail_every,
            with_page_ids=with_page_ids,
        )
        self._cache = cache
        self._parts = cache.tiered
        self.tier = tier
        self._policy = policy
        self.channels = (write, read)
        self._store_within_ns = store_within_ns
        self.tier_names: tuple[str, ...] = (tier.name,)
        self._block_bytes = cache.block_bytes
        self._num_stored = [0] * len(tier.part_blocks)
        self._num_loaded = list(self._num_stored)
        """Parts by group that arrived so far, below and above."""
        self._offered: dict[int, Offered] = {}
        self._least_idle = max(*tier.part_blocks, cache.pool.total // MOST_IDLE)
        self._num_idle = 0
        """Blocks that stores hold and that nothing used when these began."""
        self._is_behind = False
        """Whether the way down is behind: nothing is stored before a transfer has ended."""

    @property
    def is_due(self) -> bool:
        """Whether something is to be stored, whatever becomes of the device."""
        return self._policy.has_work and not self._is_behind

    def num_pages(self) -> tuple[int, ...]:
        """Return blocks used and cached in the tier."""
        return self.tier.num_used, self.tier.num_cached

    def totals(self) -> TransferTotals:
        """Return what moved so far."""
        counts = msgspec.structs.asdict(self.counts)
        for group, evicted in enumerate(self.tier.num_evicted_parts):
            counts[f"num_stored_parts_group{group}"] = self._num_stored[group]
            counts[f"num_loaded_parts_group{group}"] = self._num_loaded[group]
            counts[f"num_evicted_parts_group{group}"] = evicted
        return TransferTotals(
            counts,
            {channel.name: channel.num_bytes for channel in self.channels},
            {self.tier.name: self.tier.num_evicted},
            dict(self._waited_ns),
        )

    def pages_to_spare(self) -> int | None:
        """Return None: every step is scheduled."""
        return None

    def confirm(self, content: Content, num_pages: int, holding: Holding) -> None:
        """Do nothing: the cache tells what is complete."""

    # Stores -----------------------------------------------------------------------------------------------

    def plan_stores(self, now_ns: int) -> None:
        """Begin the store of the step that starts at `now_ns`."""
        self._now_ns = now_ns
        if self._is_behind:
            return
        write = self.channels[0]
        room: int | None = None
        above: list[Part] = []
        below: list[BelowPart] = []
        num_blocks = num_idle = idle_room = 0
        for part in self._policy.choose():
            name = part.name
            assert name is not None, "what cannot be found is to be stored"
            if self.tier.has(name, part.group):
                self._policy.passed(part)
                continue
            if room is None:
                room = write.num_within(now_ns, self._store_within_ns, self._block_bytes)
                soon = write.num_within(now_ns, IDLE_WITHIN_NS, self._block_bytes)
                idle_room = max(self._least_idle, soon) - self._num_idle
            blocks = self.tier.part_blocks[part.group]
            # What nothing uses is taken from those that want memory, for as long as it is copied.
            is_idle = not part.refs
            if room <= 0 or (is_idle and blocks > min(self._cache.num_free, idle_room)):
                self._is_behind = room <= 0
                break
            target = self.tier.place(name, part.group)
            self._policy.passed(part)
            if target is None:
                self.counts.num_pages_without_room += 1
                continue
            self._parts.hold((part,))
            if is_idle:
                num_idle += blocks
                idle_room -= blocks
            self._cache.count()
            above.append(part)
            below.append(target)
            num_blocks += blocks
            room -= blocks
        if not above:
            return
        num_bytes = num_blocks * self._block_bytes
        moves = []
        if self._with_page_ids:
            moves.append(Move(self.tier.name, _blocks_of(above), _blocks_of(below)))
        under_way = PartsUnderWay(Direction.STORE, num_blocks, self._workers(), above=tuple(above), below=tuple(below))
        under_way.lanes, under_way.num_idle = ((write, num_bytes),), num_idle
        self._num_idle += num_idle
        self._submit(under_way, write.submit(now_ns, num_bytes), moves)

    # Loads ------------------------------------------------------------------------------------------------

    def lookup(self, request: int, content: Content, start: int, limit: int) -> Offer | None:
        """Return how far every group can go on with what the tier has as well; None if that is no further than `start`.

        What the device lacks of it is pinned for `request`, in place of what was pinned for it before.
        """
        self.forget(request)
        match = self._parts.match_below(content, limit)
        if match.num_pages <= start:
            return None
        parts = []
        for group, needed in enumerate(self._parts.needed(match)):
            for page, part in needed.items():
                if part is None:
                    below = match.names[page].below
                    assert below is not None
                    found = below[group]
                    assert found is not None
                    parts.append(found)
        for found in parts:
            self.tier.pin(found)
        self._offered[request] = Offered(match, parts)
        num_pages = match.num_pages - start
        return Offer(num_pages, (num_pages,), (self._num_blocks(parts) * self._block_bytes,))

    def offered(self, request: int) -> GroupMatch:
        """Return how far every group can go on with what was offered to `request`."""
        return self._offered[request].match

    def weigh(
        self, offer: Offer, start: int, page_size: int, num_known: int, *, num_behind: int, awaited: Awaited | None
    ) -> Weighed:
        """Return whether to load all of `offer`, see LowerTiers.

        Only what is sooner there for the request itself: while it waits it holds memory, which is what requests behind
        it wait for most often.
        """
        return self._weigher.weigh(self._now_ns, offer, start, page_size, num_known, num_behind=0, awaited=awaited)

    def forget(self, request: int) -> None:
        """End the pins of what was offered to `request`."""
        offered = self._offered.pop(request, None)
        if offered is not None:
            for part in reversed(offered.parts):
                self.tier.unpin(part)

    def start_load(self, request: int, content: Content, start: int, num_pages: int, holding: Holding) -> int:
        """Begin to load what was offered to `request` into `holding`, which was opened for it.

        Return when that should end.
        """
        offered = self._offered.pop(request)
        parts = offered.parts
        incoming = cast(LoadingHolding, holding).incoming
        read = self.channels[1]
        num_blocks = self._num_blocks(parts)
        num_bytes = num_blocks * self._block_bytes
        moves = []
        if self._with_page_ids:
            moves.append(Move(self.tier.name, _blocks_of(parts), _blocks_of([part for _, part in incoming])))
        under_way = PartsUnderWay(
            Direction.LOAD, num_blocks, self._workers(), incoming=tuple(incoming), below=tuple(parts), request=request
        )
        under_way.start_page = start
        under_way.num_loaded, under_way.match = num_pages, offered.match
        end_ns = read.submit(self._now_ns, num_bytes)
        under_way.lane, under_way.since_ns, under_way.lanes = read.name, [self._now_ns], ((read, num_bytes),)
        self._submit(under_way, end_ns, moves)
        return end_ns

    def reset(self) -> None:
        """Forget what the tier holds. Transfers under way end as they would have; what they store is not kept."""
        self.tier.reset()

    # Ends -------------------------------------------------------------------------------------------------

    def _settle(self, transfer_id: int, under_way: UnderWay) -> None:
        self._is_behind = False
        assert isinstance(under_way, PartsUnderWay)
        if under_way.direction is Direction.STORE:
            is_stored = self._count_store(under_way)
            self._num_idle -= under_way.num_idle
            self.tier.settle(under_way.below, is_stored=is_stored)
            for part in under_way.below if is_stored else ():
                self._num_stored[part.group] += 1
            self._parts.unhold(under_way.above, go_first=is_stored and self._policy.goes_first)
        else:
            self._end_load(under_way)
        self._cache.count()

    def _end_load(self, under_way: PartsUnderWay) -> None:
        """Make what arrived findable. If something did not, the request looks again, and finds what did."""
        is_whole = under_way.num_good_pages >= under_way.num_pages
        num_left = under_way.num_good_pages
        good: list[Incoming] = []
        for arrived, part in zip(under_way.incoming, under_way.below, strict=True):
            num_left -= self.tier.part_blocks[part.group]
            if num_left >= 0:
                good.append(arrived)
                self._num_loaded[part.group] += 1
            else:
                self.tier.drop(part)
        self._parts.arrive(good)
        # All that it goes on from was used, also what the device had.
        assert under_way.match is not None
        for part in under_way.below:
            self.tier.unpin(part)
        self.tier.touch(self._below(under_way.match))
        self._count_load(under_way, is_whole=is_whole)
        num_pages = under_way.num_loaded if is_whole else 0
        end = under_way.start_page + num_pages if is_whole else 0
        self._loaded.append(Loaded(under_way.request, end, (num_pages,)))

    def _below(self, match: GroupMatch) -> list[BelowPart]:
        """Return what the tier has of all that a sequence needs after `match`."""
        found = []
        for group, needed in enumerate(self._parts.needed(match)):
            for page in needed:
                below = match.names[page].below
                if below is not None and (part := below[group]) is not None and part.is_here:
                    found.append(part)
        return found

    def _num_blocks(self, parts: Sequence[BelowPart]) -> int:
        return sum(self.tier.part_blocks[part.group] for part in parts)

    # Laws -------------------------------------------------------------------------------------------------

    def holds(self) -> list[HeldPages]:
        """Return what stores hold on the device."""
        return [HeldParts(cast(PartsUnderWay, under_way).above) for under_way in self._under_way.values()]

    def check(self) -> None:
        """Assert laws L1 and L2 in the tier."""
        pins = [part for offered in self._offered.values() for part in offered.parts]
        for under_way in self._under_way.values():
            pins += cast(PartsUnderWay, under_way).below
        self.tier.check(pins)
        if not self._under_way:
            assert not self._offered, "L2: an offer is pinned at rest"
            assert not self.tier.num_used, f"L2: {self.tier.num_used} blocks of {self.tier.name} held at rest"


def _blocks_of(parts: Sequence[Part] | Sequence[BelowPart]) -> tuple[PageId, ...]:
    return tuple(block for part in parts for block in part.blocks)
