"""A store that engines share, of parts in KV groups: a tree of its own, and a tier of it for each engine.

A part is in the store once, even if several engines store it. The device of an engine and its own tiers have a tree of
spans, and the store has another, since its parts outlive the engines' parts of their pages. A match looks at both
(`SpanTree.match_across`), and only parts that a transfer or an offer pins change in the store.

    tree of an engine:     [0 ........ 4)                    device: full [0, 4)
    tree of the store:     [0 ................ 8) [8 .. 9)   full [0, 9), window [7, 9)
    a match of 9 pages:    full [0, 4) of the device, full [4, 9) and window [7, 9) of the store
"""

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from kvarts.core.content import Content
from kvarts.core.event_log import Emit
from kvarts.core.kv.account import RunEvents
from kvarts.core.kv.groups import GroupMemory
from kvarts.core.kv.runs import PartRun, RunMatch, RunTable, Span, first_list
from kvarts.core.kv.span_tree import SpanTree
from kvarts.core.kv.transfer import Coming
from kvarts.core.tiers.links import StoreLinks
from kvarts.core.tiers.part_tier import PLACE, PartsElsewhere, PartTier, tree_elsewhere
from kvarts.core.tiers.shared_store import STORE, Shared

__all__ = ["PartsView", "SharedParts"]


@mypyc_attr(native_class=False)
class SharedParts(Shared["PartsView"]):
    """A store of `size` blocks for parts of `memory`; a page has `page_size` tokens. `unit_bytes`: those of a block.

    An engine may divide its blocks among devices: in `memory` they have the bytes of those on one device, and in the
    store those on all. `most_above`: the most tiers of its own that any engine has.
    """

    unit = "blocks"
    """The unit of its sizes and counts."""

    def __init__(
        self,
        size: int,
        unit_bytes: int,
        links: StoreLinks,
        *,
        memory: GroupMemory,
        page_size: int,
        most_above: int = PLACE,
    ) -> None:
        super().__init__(size, unit_bytes, links)
        place = self.place = max(PLACE, most_above)
        self.tree = tree_elsewhere(memory, page_size, place)
        self.parts = PartTier(STORE, size, memory, self.tree, place=place)
        self.events = self.parts.events = WritersEvents(self)
        self.parts.emits = True
        self.pins: dict[RunTable, None] = {}
        """What transfers and offers of all engines read or write."""

    def open_view(self, worker: int, memory: GroupMemory | None, page_size: int, emit: Emit | None) -> PartsView:
        """Return the store as a tier of `worker`, whose device has the KV groups of `memory`."""
        assert memory is not None
        view = self.views[worker] = PartsView(self, worker, memory, emit)
        return view

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and that no transfer uses."""
        return self.parts.num_cached_blocks

    @property
    def num_evicted(self) -> int:
        """Blocks of parts that were evicted to make room."""
        return self.parts.num_evicted_blocks

    @property
    def num_refused(self) -> int:
        """Parts that were to be stored and found no room."""
        return sum(view.num_refused for view in self.views.values())

    def leave(self, worker: int) -> None:
        """Send no events to `worker`, which has left."""
        self.events.of_worker.pop(worker, None)


class WritersEvents(RunEvents):
    """Emits the events of the runs of a store, each to the engine that stored them."""

    def __init__(self, store: SharedParts) -> None:
        super().__init__(_tell_nobody)
        self._store = store
        self.of_worker: dict[int, RunEvents] = {}
        self.writer = -1
        """The engine whose runs become findable."""
        self._to_emit: list[RunEvents] = []

    def came(self, content: Content, group: int, span: Span, start: int, end: int) -> None:
        """Record that pages of `span` that `writer` has stored become findable in a group."""
        events = self.of_worker.get(self.writer)
        if events is not None:
            self._to_emit.append(events)
            events.came(content, group, span, start, end)

    def goes(self, run: PartRun, start: int, end: int, *, is_dropped: bool) -> None:
        """Record that pages [start, end) of `run`, which is still findable, are evicted, the last one first."""
        events = self.of_worker.get(run.writer)
        if events is not None:
            self._store.told_removal(run.writer)
            self._to_emit.append(events)
            events.goes(run, start, end, is_dropped=is_dropped)

    def flush(self) -> None:
        """Emit the events recorded since the last call, before anything else is emitted."""
        for events in self._to_emit:
            events.flush()
        self._to_emit.clear()


class PartsView(PartsElsewhere):
    """The store as a tier of one engine, `worker`. It counts and emits this engine's transfers only.

    Its runs are those of `store`; in their bytes, blocks are as large as on a device of the engine.
    """

    def __init__(self, store: SharedParts, worker: int, memory: GroupMemory, emit: Emit | None) -> None:
        super().__init__(STORE, store.size, memory, store.tree, store.place)
        self.worker = worker
        self._loaded_from = store.loaded_from.setdefault(worker, {})
        self._store = store
        self._parts = store.parts
        self._num_moving = 0
        """Blocks of the store that transfers and offers of this engine read or write."""
        if emit is not None:
            offset = first_list(store.place, len(self.groups))
            store.events.of_worker[worker] = RunEvents(emit, medium=STORE, offset=offset)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken now."""
        return self._parts.free_bytes // self._parts.block_bytes * self.block_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of parts that this engine reads or writes."""
        return self._num_moving * self.block_bytes

    @property
    def num_cached_blocks(self) -> int:
        """0: cached parts belong to all engines."""
        return 0

    # Storing ----------------------------------------------------------------------------------------------

    def gap(self, span: Span, index: int, start: int, end: int) -> tuple[int, int]:
        """Return the first stretch of pages [start, end) that a group has neither here nor coming; (end, end): none."""
        there, known = self._tree.walk(span.content, end)
        for each in there:
            stop = min(each.end, known)
            if start < stop:
                first, last = super().gap(each, index, start, stop)
                if first < stop:
                    return first, last
                start = stop
        return start, end

    def place(self, span: Span, index: int, start: int, end: int, pin: RunTable) -> PartRun:
        """Make room for pages [start, end) of a span, which are neither here nor coming, and fit. `settle` must follow.

        `pin` holds them.
        """
        parts = self._parts
        if pin not in self._store.writes:
            self._store.begin_write(self.worker, pin)
            self._store.pins[pin] = None
        evicted = parts.num_evicted.copy()
        evicted_bytes = parts.evicted_bytes
        with self._tree.spans_of(span.content, end) as spans:
            for each, first, last in spans:
                if last > start:
                    run = parts.place(each, index, max(first, start), last, pin)
                    run.writer, run.written = self.worker, span.content
        self.evicted_bytes += (parts.evicted_bytes - evicted_bytes) // parts.block_bytes * self.block_bytes
        for group, before in enumerate(evicted):
            self.num_evicted[group] += parts.num_evicted[group] - before
        self._num_moving += (end - start) * self.part_blocks[index]
        return run

    def settle(self, pin: RunTable, *, is_stored: bool) -> None:
        """End a store: the runs that `pin` holds become findable, or are dropped."""
        self._num_moving -= self.num_pinned(pin)
        del self._store.pins[pin]
        self._store.events.writer = self.worker
        self._parts.settle(pin, is_stored=is_stored)
        self._store.end_write(pin, is_stored=is_stored)

    # Matching ---------------------------------------------------------------------------------------------

    def match(self, tree: SpanTree, content: Content, limit: int, depth: int) -> RunMatch:
        """Return how far every group can resume with parts of a device, its first `depth` tiers, and the store."""
        return tree.match_across(content, limit, self._tree, self.lists, depth=depth)

    def match_coming(self, tree: SpanTree, content: Content, limit: int, depth: int) -> RunMatch:
        """Return the same match if parts that other engines are storing were in the store."""
        return tree.match_across(content, limit, self._tree, self.lists_to_come, depth=depth)

    @property
    def is_awaited(self) -> bool:
        """Whether an engine is storing something here."""
        return bool(self._store.writes)

    def coming(self, match: RunMatch, start: int, now_ns: int) -> Coming | None:
        """Return the pages of `match` from `start` on, some of which other engines are storing; None: none of them.

        They can be loaded once the last of these writes has ended.
        """
        assert match.pieces is not None
        last_ns, last, num_blocks = now_ns, -1, 0
        for index, pieces in enumerate(match.pieces):
            for run, first, end in pieces:
                place = run.list_index - index
                if place >= self._here:
                    num_blocks += (end - first) * self.part_blocks[index]
                if place == self._coming:
                    write = self._store.writes[run.holders[0]]
                    if write.transfer < 0:
                        return None  # it begins in this step
                    end_ns = now_ns + self._store.links.left_ns(write.worker, write.transfer, now_ns)
                    if last < 0 or end_ns > last_ns:
                        last_ns, last = end_ns, write.number
        return None if last < 0 else Coming(last, match.num_pages - start, last_ns, num_blocks)

    def await_write(self, write: int) -> None:
        """Note that a request of this engine waits for a write of another."""
        self._store.await_write(write, self.worker)

    # Loading ----------------------------------------------------------------------------------------------

    def pin(self, pieces: list[list[tuple[PartRun, int, int]]]) -> RunTable:
        """Pin the store's runs in `pieces`, see RunMatch; they keep their places in the list. `unpin` must follow."""
        pin = self._parts.pin(pieces)
        self._store.pins[pin] = None
        self._num_moving += self.num_pinned(pin)
        return pin

    def unpin(self, pin: RunTable) -> None:
        """End a pin. It is not a use of its runs."""
        del self._store.pins[pin]
        self._num_moving -= self.num_pinned(pin)
        self._parts.unpin(pin)

    def unpin_before(self, pin: RunTable, page: int) -> None:
        """End a pin of all parts before `page`."""
        self._num_moving -= self.num_pinned(pin)
        self._parts.unpin_before(pin, page)
        self._num_moving += self.num_pinned(pin)

    def begin_load(self, pin: RunTable) -> None:
        """Count the blocks of `pin` by the engines that stored them."""
        loaded = self._loaded_from
        for index, runs in enumerate(pin.held):
            for run in runs:
                loaded[run.writer] = loaded.get(run.writer, 0) + (run.end - run.start) * self.part_blocks[index]

    def touch(self, content: Content, num_pages: int) -> None:
        """Make the store's parts that a sequence of the first `num_pages` pages of `content` needs the most recent."""
        self._parts.touch(content, num_pages)

    def drop(self, pin: RunTable, ends: Sequence[int]) -> None:
        """Do nothing: parts that did not arrive are still in the store."""

    # Laws -------------------------------------------------------------------------------------------------

    def is_check_due(self, *, at_rest: bool) -> bool:
        """Return whether enough has moved in the store since all of its parts were last examined, or nothing runs."""
        return self._parts.is_check_due(at_rest=at_rest)

    def check(self, pins: Sequence[RunTable]) -> None:
        """Assert laws L1 and L2 for all engines. `pins`: the block tables of transfers and offers of this one."""
        mine = [pin for pin in pins if pin in self._store.pins]
        assert self._num_moving == sum(map(self.num_pinned, mine)), "L2: parts of the store are held by nobody"
        self._parts.check(list(self._store.pins))


def _tell_nobody(event: object) -> None:
    raise AssertionError("events of a store are those of an engine")
