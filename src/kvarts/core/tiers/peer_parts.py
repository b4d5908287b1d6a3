"""Parts of pages in the host memory of other engines: a tier of each engine with KV groups that reads from others.

Each engine has a tree of spans, for its device and its own tiers. A match looks at two of these (`match_across`): that
of the reader, and that of the one engine with whose parts every group can resume from most pages.

    tree of the reader:    [0 ........ 4)                    device: full [0, 4)
    tree of engine 2:      [0 ................ 8) [8 .. 9)   host: full [0, 9), window [7, 9)
    a match of 9 pages:    full [0, 4) of the device, full [4, 9) and window [7, 9) of engine 2
"""

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.runs import PartRun, RunMatch, RunTable, table_of_transfer
from kvarts.core.kv.span_tree import SpanTree
from kvarts.core.tiers.part_tier import PartsElsewhere, PartTier, ReadableParts, tree_elsewhere
from kvarts.core.tiers.peers import PEERS, Peers

__all__ = ["PeerParts", "PeerPartsView"]


@mypyc_attr(native_class=False)
class PeerParts(Peers[PartTier, "PeerPartsView"]):
    """The host memory of all engines, in blocks of parts of pages.

    An engine may divide its blocks among devices; on the links they have the bytes of those on all.
    """

    unit = "blocks"
    """The unit of counts."""

    def open_view(self, worker: int, memory: GroupMemory | None, page_size: int, emit: Emit | None) -> PeerPartsView:
        """Return the memory of the others as a tier of `worker`, whose device has the KV groups of `memory`."""
        assert memory is not None
        return PeerPartsView(self, worker, memory, page_size)

    def connect(self, worker: int, host: PartTier) -> None:
        """Let others read from the host memory of `worker`."""
        host.owner = worker
        super().connect(worker, host)


class PartsRead:
    """Parts that are pinned in `tier`, the memory of engine `source`."""

    __slots__ = ("source", "tier")

    def __init__(self, source: int, tier: PartTier) -> None:
        self.source = source
        self.tier = tier


class PeerPartsView(PartsElsewhere):
    """The memory of the others as a tier of one engine, `worker`. It counts this engine's loads only."""

    def __init__(self, peers: PeerParts, worker: int, memory: GroupMemory, page_size: int) -> None:
        super().__init__(PEERS, 0, memory, tree_elsewhere(memory, page_size))
        self._peers = peers
        self._reads = peers.reads_of(worker)
        self._pinned: dict[RunTable, PartsRead] = {}
        """Where each pin is."""

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that this engine reads."""
        return sum(map(self.num_pinned, self._pinned)) * self.block_bytes

    def match(self, tree: SpanTree, content: Content, limit: int, depth: int) -> RunMatch:
        """Return how far every group can resume with parts of a device, of its first `depth` tiers, and of one engine.

        That is the engine with which the match is the longest, and of equals the one with the lowest number.
        """
        best, self._reads.asked = tree.match(content, limit, depth=depth), -1
        for source, tier in self._peers.reached_from(self._reads.worker):
            match = tree.match_across(content, limit, tier.tree, tier.lists, depth=depth)
            is_first = match.num_pages == best.num_pages and source < self._reads.asked
            if match.num_pages > best.num_pages or is_first:
                best, self._reads.asked = match, source
        return best

    def elsewhere(self, tree: SpanTree, content: Content, limit: int, depth: int) -> ReadableParts | None:
        """Return the match as in `match`, and the runs with the other engine, see Offer. A lookup is not affected."""
        asked = self._reads.asked
        match = self.match(tree, content, limit, depth)
        there, self._reads.asked = self._peers.tiers.get(self._reads.asked), asked
        if there is None or match.pieces is None:
            return None
        unit_bytes = self._peers.unit_bytes
        runs = [
            (0, begin, end, self.part_blocks[index] * unit_bytes)
            for index, pieces in enumerate(match.pieces)
            for run, begin, end in pieces
            if there.has(run)
        ]
        return match, tuple(runs)

    def has(self, run: PartRun) -> bool:
        """Return whether a run, which a match has found, is with the engine that was asked."""
        asked = self._peers.tiers.get(self._reads.asked)
        return asked is not None and asked.has(run)

    def pin(self, pieces: list[list[tuple[PartRun, int, int]]]) -> RunTable:
        """Pin runs in `pieces`, see RunMatch, of the engine that was asked; they keep their places there."""
        asked = self._peers.tiers.get(self._reads.asked)
        if asked is None or not any(asked.has(run) for of_group in pieces for run, _, _ in of_group):
            return table_of_transfer(len(self.groups))
        self._peers.will_change(self._reads.asked)
        pin = asked.pin(pieces)
        self._pinned[pin] = PartsRead(self._reads.asked, asked)
        asked.guests[pin] = None
        return pin

    def unpin(self, pin: RunTable) -> None:
        """End a pin. It is not a use of its runs."""
        read = self._pinned.pop(pin, None)
        if read is not None:
            self._peers.will_change(read.source)
            del read.tier.guests[pin]
            read.tier.unpin(pin)

    def unpin_before(self, pin: RunTable, page: int) -> None:
        """End a pin of all parts before `page`."""
        read = self._pinned.get(pin)
        if read is not None:
            self._peers.will_change(read.source)
            read.tier.unpin_before(pin, page)

    def begin_load(self, pin: RunTable) -> None:
        """Note that the runs of `pin` are being loaded."""
        self._reads.unsent.append(self._pinned[pin].source)

    def drop(self, pin: RunTable, ends: Sequence[int]) -> None:
        """Count the blocks of a load that have arrived; the others are still where they were."""
        read = self._pinned.get(pin)
        if read is None:
            return
        counts = [
            sum(max(0, min(run.end, end) - run.start) for run in runs) for runs, end in zip(pin.held, ends, strict=True)
        ]
        num_blocks = sum(map(int.__mul__, counts, self.part_blocks))
        if num_blocks:
            self._reads.loaded(read.source, num_blocks)

    def end_load(self, pin: RunTable, content: Content, num_pages: int) -> None:
        """End the pin of a load, which is a use of all parts of its sequence where it was read."""
        read = self._pinned.get(pin)
        self.unpin(pin)
        if read is not None:
            read.tier.touch(content, num_pages)

    def drop_state(self, content: Content, page: int) -> None:
        """Do nothing: nothing is kept there for a request of this engine."""

    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return True: only pins are examined."""
        return True

    def check(self, pins: Sequence[RunTable]) -> None:
        """Assert law L2: everything that is pinned elsewhere is of a transfer or an offer. `pins`: all of these."""
        assert set(self._pinned) <= set(pins), "L2: parts of another engine are held by nobody"
