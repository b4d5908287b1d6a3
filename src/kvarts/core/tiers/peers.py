"""Pages in the host memory of other engines: a tier that is read, and that nothing is stored in.

A request finds there what another engine has in the first tier below its device, after its own tiers. The pages are
pinned there while they are read, and stay there. A load is from one engine: the one that has most pages. `Peers` is
what whole pages and parts in KV groups (`peer_parts.py`) have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.transfer import Offer, PeersGain, PrefillNs
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.index import TierRun
from kvarts.core.tiers.links import PeerLinks
from kvarts.core.tiers.offloader import Offloader
from kvarts.core.tiers.shared_store import SharedChannel, SharedTier, TierElsewhere
from kvarts.core.tiers.tier import MemoryTier, Pin
from kvarts.core.tiers.weigher import Weigher

__all__ = ["PEERS", "PeerMemory", "PeerView", "Peers"]

PEERS = "peers"


class PeerReads:
    """The reads of engine `worker` from the memory of others.

    `asked`: the engine that has the most of the last lookup; -1 without one. `loaded_from`: the number of loaded units,
    by the engine that had them. `unsent`: the sources of loads that no transfer carries yet.
    """

    __slots__ = ("asked", "loaded_from", "unsent", "worker")

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.asked = -1
        self.loaded_from: dict[int, int] = {}
        self.unsent: list[int] = []

    def loaded(self, source: int, count: int) -> None:
        """Count units that were loaded from `source`."""
        self.loaded_from[source] = self.loaded_from.get(source, 0) + count


HostT = TypeVar("HostT")
ViewT = TypeVar("ViewT")


class Peers(SharedTier[ViewT], Generic[HostT, ViewT]):
    """The host memory of all engines. `links`: carry it, in pages, or blocks of parts, of `unit_bytes` bytes each.

    Alone, a transfer takes `latency_ms` and has `bytes_per_s`. `before_change`: called with an engine before anything
    is pinned or released there for others.
    """

    def __init__(self, unit_bytes: int, links: PeerLinks, *, latency_ms: float, bytes_per_s: float) -> None:
        super().__init__(unit_bytes)
        self.links = links
        self._latency_ms = latency_ms
        self._bytes_per_s = bytes_per_s
        self.tiers: dict[int, HostT] = {}
        """The host memory of each engine that has any."""
        self.reads: dict[int, PeerReads] = {}
        """The reads of each engine."""
        self.before_change: Callable[[int], object] | None = None

    def will_change(self, source: int) -> None:
        """Note that what others read from engine `source` is about to be pinned or released there."""
        if self.before_change is not None:
            self.before_change(source)

    def reads_of(self, worker: int) -> PeerReads:
        """Return the reads of `worker`, which may be new."""
        return self.reads.setdefault(worker, PeerReads(worker))

    def num_loaded(self) -> dict[int, dict[int, int]]:
        """Return, by engine, the units that it has loaded, by the engine that had them."""
        return {worker: reads.loaded_from for worker, reads in self.reads.items()}

    def connect(self, worker: int, host: HostT) -> None:
        """Let others read from the host memory of `worker`."""
        self.tiers[worker] = host

    def gain(self, prefill: PrefillNs, page_size: int, tier: str) -> PeersGain:
        """Return what a worker saves that reads over idle links, instead of computing as in `prefill`.

        `tier`: the name of the memory that is read.
        """
        alone = Channel("peers", latency_us=self._latency_ms * 1e3, bytes_per_s=max(1, round(self._bytes_per_s)))
        return peers_gain(Weigher([alone], self.unit_bytes, prefill, splits=True), page_size, self.unit_bytes, tier)

    def open_channels(self, worker: int) -> tuple[PeerChannel, PeerChannel]:
        """Return the channel of `worker` from the memory of others, twice: nothing is stored there."""
        read = PeerChannel("peers_read", self.links, self.unit_bytes, self.reads_of(worker))
        return read, read

    def opened(self, worker: int, tiers: Offloader[Any]) -> None:
        """Let others read from the first tier of `worker`, if it has any."""
        if len(tiers.layout.own):
            self.connect(worker, tiers.layout.own[0])

    def leave(self, worker: int) -> bool:
        """Stop reading from `worker`, which was removed; return whether it was still registered."""
        return self.tiers.pop(worker, None) is not None

    def reached_from(self, worker: int) -> list[tuple[int, HostT]]:
        """Return the memory that `worker` can read from now, with the numbers of its engines."""
        reaches = self.links.reaches
        return [each for each in self.tiers.items() if each[0] != worker and reaches(each[0], worker)]


class PeerMemory(Peers[MemoryTier, "PeerView"]):
    """The host memory of all engines, in whole pages."""

    unit = "pages"
    """The unit of counts."""

    def open_view(self, worker: int, memory: GroupMemory | None, page_size: int, emit: Emit | None) -> PeerView:
        """Return the memory of the others as a tier of `worker`."""
        return PeerView(self, worker)


def peers_gain(weigher: Weigher, page_size: int, unit_bytes: int, tier: str) -> PeersGain:
    """Return what a worker saves that reads pages from others, as its tiers weigh it if nothing else is under way."""

    def saved_by(offer: Offer, start: int, num_tokens: int) -> float:
        weighed = weigher.weigh(0, offer, start, page_size, num_tokens, num_behind=0, awaited=None)
        if not weighed.num_pages or not weighed.worth_ns:
            return 0.0
        took_ns = max(weighed.front_ns, weighed.wait_ns or 0)
        return offer.num_pages * (weighed.worth_ns - took_ns) / weighed.worth_ns

    return PeersGain(tier, saved_by, unit_bytes)


class PinnedRead(Pin):
    """Pages that are pinned in `tier`, the memory of engine `source`."""

    __slots__ = ("source", "tier")

    def __init__(self, content: Content, start: int, end: int, run: TierRun, source: int, tier: MemoryTier) -> None:
        super().__init__(content, start, end, run, tier.index)
        self.source = source
        self.tier = tier


class PeerView(TierElsewhere):
    """The memory of the others as a tier of one engine, `worker`. It counts this engine's loads only."""

    def __init__(self, memory: PeerMemory, worker: int) -> None:
        super().__init__(PEERS, 0)
        self._reads = memory.reads_of(worker)
        self._memory = memory

    def lookup(self, holder: int, content: Content, start: int, limit: int) -> int:
        """Find the engine with most consecutive pages from `start` on, and pin them there for `holder`."""
        self.forget(holder)
        most, found = 0, None
        reads = self._reads
        for source, tier in self._memory.reached_from(reads.worker):
            num_pages = tier.find(content, start, limit)
            if num_pages > most or (num_pages == most > 0 and source < reads.asked):
                most, found, reads.asked = num_pages, tier, source
        if found is None:
            return 0
        self._memory.will_change(reads.asked)
        run = found.index.pin_stored(content, start, start + most)
        assert run is not None
        found.num_guests += 1
        self._pins[holder] = PinnedRead(content, start, start + most, run, reads.asked, found)
        return most

    def forget(self, holder: int) -> None:
        """End the pin of `lookup` for `holder`, if there is one."""
        pin = self._pins.get(holder)
        if pin is not None:
            read = _source_of(pin)
            self._memory.will_change(read.source)
            super().forget(holder)
            read.tier.num_guests -= 1

    def prepare_load(self, holder: int, num_pages: int | None = None, num_front: int = 0) -> Pin:
        """Begin to load the next `num_pages` pages that were offered to `holder` after the first `num_front`."""
        load = super().prepare_load(holder, num_pages, num_front)
        self._reads.unsent.append(_source_of(load).source)
        return load

    def complete_load(self, load: Pin, num_good_pages: int | None = None) -> None:
        """End a load. Pages that did not arrive are still where they were."""
        read = _source_of(load)
        self._memory.will_change(read.source)
        super().complete_load(load)
        read.tier.num_guests -= 1
        if num_good_pages is None or num_good_pages == load.num_pages:
            self._reads.loaded(read.source, load.num_pages)

    def check(self, is_above: Callable[[Content, int], bool]) -> None:
        """Do nothing: the engines that have the memory check it."""


def _source_of(pin: Pin) -> PinnedRead:
    assert isinstance(pin, PinnedRead)
    return pin


class PeerChannel(SharedChannel):
    """A Channel from the memory of others."""

    __slots__ = ("_links", "_reads")

    def __init__(self, name: str, links: PeerLinks, unit_bytes: int, reads: PeerReads) -> None:
        super().__init__(name, unit_bytes)
        self._links = links
        self._reads = reads

    def wait_ns(self, now_ns: int) -> int:
        """Return 0: a transfer waits for no other, and shares the links with them."""
        return 0

    def within_ns(self, now_ns: int, num_bytes: int) -> int:
        """Return how long a load of what was last looked up would take if no other transfer began or ended."""
        reads = self._reads
        if reads.asked < 0:
            return 0
        return self._links.within_ns(reads.asked, reads.worker, self.bytes_there(num_bytes))

    def submit(self, now_ns: int, num_bytes: int) -> int:
        """Begin the next transfer of `tiers`; return NEVER_NS: when it ends is not known."""
        (source,) = self._reads.unsent
        self._reads.unsent.clear()
        number, bytes_there = self.tiers.num_transfers, self.bytes_there(num_bytes)
        self._links.begin_pull(source, self._reads.worker, number, bytes_there, now_ns)
        return super().submit(now_ns, num_bytes)

    def withdraw(self, now_ns: int, num_bytes: int) -> None:
        """Never called: nothing is stored there."""
        raise NotImplementedError

    def ended(self, num_bytes: int, duration_ns: int | None) -> None:
        """Do nothing: nothing waits for it."""
