"""Copies between the device, host memory and storage below a radix cache, SGLang's HiCache, in virtual time.

Copies that were queued are begun together, as one transfer of their channel, and end together. A copy to the device
delays the step that begins it only as far as its last layer arrives late. With `write_back`, a step also waits for what
was copied to make room for it.

A run whose copy to host memory has ended is written to storage, a batch of pages at a time. A request that enters the
queue asks storage for what comes after its prefix in the tree: a *query* tells how many pages are there, host memory
makes room for them, and they are read, a batch at a time, and become findable. Storage has three lanes, which work side
by side, each on one thing after the other: queries, reads and writes. What a lane has done is noted at the next
*round*, before a plan. Nothing leaves storage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvarts.core.config import PrefetchPolicy, WritePolicy
from kvarts.core.content import Content
from kvarts.core.kv.eviction import Node
from kvarts.core.kv.hicache import HostCopy, HostRadixCache
from kvarts.core.kv.radix import RadixTree
from kvarts.core.kv.transfer import TransferTotals
from kvarts.core.request import Request
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.config import TierSpec
from kvarts.core.tiers.transfers import NEVER_NS, OffloadCounts

__all__ = ["HostCopies", "HostMemory", "HostStorage", "Prefetches"]

BATCH_PAGES: Final = 128
"""The pages that storage reads or writes at a time: a read can end after each of these batches."""
SHARE_OF_READS: Final = 0.5
"""The share of host memory that is asked for by reads under way from which on nothing more is read."""
OVER: Final = -1.0
PASS_NS: Final = 100_000
"""The time from a plan without work to the next one, if something can be noted then."""


class HostStorage(msgspec.Struct, frozen=True, kw_only=True):
    """Storage below host memory, by `spec`.

    `policy`: how long a request waits for what is read for it. With `timeout`: `timeout_s`, and `timeout_s_per_page`
    for each page that it has asked for. `least_tokens`: the fewest tokens that are asked for, or read. A request that
    found nothing, or no room, asks again after `retry_passes` plans, 0: it does not; and `most_retries` times at most.
    """

    spec: TierSpec
    policy: PrefetchPolicy = "timeout"
    least_tokens: int = 256
    timeout_s: float = 1.0
    timeout_s_per_page: float = 0.0
    retry_passes: int = 8
    most_retries: int = 8


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory below a radix cache. `page_bytes`: of a page in all `num_layers` layers. `storage`: what is below."""

    spec: TierSpec
    page_bytes: int
    num_layers: int
    policy: WritePolicy = "write_through"
    storage: HostStorage | None = None


class HostCopies:
    """Owner of the copies under way; `scheduler.host`. `to_host`, `to_device`: their channels."""

    def __init__(self, cache: HostRadixCache, host: HostMemory) -> None:
        self.storage = None if host.storage is None else Prefetches(cache, host.storage, host.page_bytes)
        storages = () if host.storage is None else (host.storage.spec.name,)
        self.tier_names: Final = (host.spec.name, *storages)
        self.to_host: Channel = host.spec.write.open()
        self.to_device: Channel = host.spec.read.open()
        self.page_bytes: Final = host.page_bytes
        self._cache = cache
        self._host = host
        self._counts = OffloadCounts()
        self._copies: deque[tuple[int, list[HostCopy]]] = deque()
        """The copies to host memory under way, each batch with its end."""
        self._loads: deque[tuple[int, list[HostCopy]]] = deque()
        """The loads under way, each batch with its end."""
        self._arrives_ns = 0
        """When the loads that the planned step begins end; 0 without any."""
        self._waited_ns = {host.spec.read.name: 0, host.spec.write.name: 0}

    # Copies -----------------------------------------------------------------------------------------------

    def begin_copies(self, now_ns: int) -> None:
        """Begin the copies to host memory that were queued."""
        copies = self._cache.begin_copies()
        if copies:
            self._copies.append((self.to_host.submit(now_ns, self._num_bytes(copies)), copies))

    def begin_loads(self, now_ns: int) -> None:
        """Begin the loads of the step that is planned."""
        loads = self._cache.begin_loads()
        if loads:
            self._arrives_ns = self.to_device.submit(now_ns, self._num_bytes(loads))
            self._loads.append((self._arrives_ns, loads))

    def end_copies(self, now_ns: int) -> None:
        """Let what has ended by `now_ns` be in use no more: copies, then loads."""
        while self._copies and self._copies[0][0] <= now_ns:
            copies = self._copies.popleft()[1]
            self._counts.num_stores += len(copies)
            self._cache.end(copies)
            if self.storage is not None:
                self.storage.write([part for copy in copies for part in copy.parts], now_ns)
        while self._loads and self._loads[0][0] <= now_ns:
            loads = self._loads.popleft()[1]
            self._counts.num_loads += len(loads)
            self._cache.end(loads)

    def _num_bytes(self, copies: Sequence[HostCopy]) -> int:
        return sum([copy.num_pages for copy in copies]) * self._host.page_bytes

    # As the tiers below a device -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a copy is under way, or about to begin."""
        if self._copies or self._loads or self._cache.tiered.queued:
            return True
        return self.storage is not None and self.storage.has_work

    @property
    def next_ns(self) -> int:
        """The end of the next copy to end, or when storage can go on; NEVER_NS without either."""
        next_ns = min([under_way[0][0] for under_way in (self._copies, self._loads) if under_way], default=NEVER_NS)
        return next_ns if self.storage is None else min(next_ns, self.storage.next_ns)

    @property
    def num_total(self) -> int:
        """The pages of host memory."""
        return self._cache.tiered.total_below

    @property
    def num_used(self) -> int:
        """The pages of host memory that are not free."""
        return self._cache.tiered.total_below - self._cache.tiered.num_free_below

    def advance_to(self, now_ns: int) -> bool:
        """Return whether a copy has ended by `now_ns`: the next plan takes note of it."""
        return self.next_ns <= now_ns

    def step_ns(self, now_ns: int, duration_ns: int) -> int:
        """Return the duration of the planned step, which starts at `now_ns` and would take `duration_ns` alone."""
        tree, waits_ns = self._cache.tiered, 0
        if tree.num_written:
            waits_ns = self.to_host.submit(now_ns, tree.num_written * self._host.page_bytes) - now_ns
            self._counts.num_stores += 1
            self._waited_ns[self._host.spec.write.name] += waits_ns
            tree.num_written = 0
        if self._arrives_ns:
            last_ns = self._arrives_ns - now_ns + duration_ns // self._host.num_layers
            if last_ns > duration_ns:
                self._waited_ns[self._host.spec.read.name] += last_ns - duration_ns
                duration_ns = last_ns
            self._arrives_ns = 0
        return waits_ns + duration_ns

    def measure(self, num_tokens: int, num_decodes: int, duration_ns: int) -> None:
        """Do nothing: nothing is weighed against computing."""

    def num_pages(self) -> tuple[int, ...]:
        """Return the pages of host memory that copies read or write, and the others with KV."""
        tree = self._cache.tiered
        num_copying = sum([copy.num_pages for copy in self._cache.copying])
        num_used = num_copying + tree.num_fetching
        of_host = num_used, tree.total_below - tree.num_free_below - num_used
        return of_host if self.storage is None else (*of_host, 0, self.storage.num_pages)

    def totals(self) -> TransferTotals:
        """Return the totals of copies so far."""
        tree = self._cache.tiered
        self._counts.num_pages_without_room = tree.num_refused
        channels = [self.to_device, self.to_host]
        if self.storage is not None:
            channels += [self.storage.reading, self.storage.writing]
        return TransferTotals(
            self._counts.by_name(),
            {channel.name: channel.num_bytes for channel in channels},
            {name: 0 if place else tree.num_evicted_below for place, name in enumerate(self.tier_names)},
            dict(self._waited_ns),
        )


class _Write:
    """Pages from `start` of a run, up to `end`, to be written; `done`: the first that is not. `node` is held."""

    __slots__ = ("content", "done", "end", "node", "start")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.content = node.content
        self.start = self.done = node.start
        self.end = node.end


class _Prefetch:
    """Pages from `start` up to `end` that a request asks for; `above`, if any, is the run before them, and is held.

    `num_found`: those that storage has; `num_taken`: those that host memory has room for; `num_read` of them are read,
    and `num_done` of these are noted. `is_known`: that storage has them is taken as given. `is_over`: the request waits
    no longer; `is_late`: its time was over.
    """

    __slots__ = (
        "above",
        "content",
        "end",
        "is_known",
        "is_late",
        "is_over",
        "num_done",
        "num_found",
        "num_read",
        "num_taken",
        "request",
        "start",
        "start_above",
    )

    def __init__(self, request: Request, above: Node | None, start: int, end: int, *, is_known: bool) -> None:
        self.request = request
        self.content: Content = request.content
        self.above = above
        self.start_above = 0 if above is None else above.start
        self.start, self.end = start, end
        self.is_known = is_known
        self.is_over = self.is_late = False
        self.num_found = self.num_taken = self.num_read = self.num_done = 0


class _Lane:
    """Does one thing after another. `work` is under way, in pieces; the current one ends at `end_ns`."""

    __slots__ = ("_queue", "end_ns", "free_ns", "work")

    def __init__(self) -> None:
        self._queue: deque[tuple[int, _Write | _Prefetch]] = deque()
        self.work: _Write | _Prefetch | None = None
        self.end_ns = NEVER_NS
        self.free_ns = 0

    def put(self, work: _Write | _Prefetch, now_ns: int) -> None:
        """Queue something at `now_ns`."""
        self._queue.append((now_ns, work))

    def take(self) -> bool:
        """Take up what is queued first, if the lane is idle; return whether something begins, at `free_ns`."""
        if self.work is not None or not self._queue:
            return False
        put_ns, self.work = self._queue.popleft()
        self.free_ns = max(self.free_ns, put_ns)
        return True

    def end(self) -> None:
        """Note that a piece has ended."""
        self.free_ns, self.end_ns = self.end_ns, NEVER_NS

    @property
    def has_work(self) -> bool:
        """Whether something is under way, or queued."""
        return self.work is not None or bool(self._queue)


class _Retry:
    """A request asks again: once `due` plans were made. `hit_end`: storage had its pages up to there; None: unknown."""

    __slots__ = ("due", "hit_end")

    def __init__(self, hit_end: int | None) -> None:
        self.hit_end = hit_end
        self.due: int | None = None


class Prefetches:
    """Owner of what is under way between host memory and storage, and of which pages are stored.

    A round is `run`, `begin_round`, the ends of copies, and `note`.
    """

    def __init__(self, cache: HostRadixCache, storage: HostStorage, page_bytes: int) -> None:
        spec = storage.spec
        self.reading: Channel = spec.read.open()
        self.writing: Channel = spec.write.open()
        self.querying = Channel("query", latency_us=spec.read.latency_us, bytes_per_s=1)
        self.batch_pages = BATCH_PAGES
        self.num_pages = 0
        """Pages in storage."""
        self.num_asked = 0
        """Pages that are asked for by what is under way."""
        self._tree = cache.tiered
        self._cache = cache
        self._rules = storage
        self._page_bytes = page_bytes
        self._stored = RadixTree()
        self._writes, self._queries, self._reads = _Lane(), _Lane(), _Lane()
        self._written: list[_Write] = []
        self._answered: list[_Prefetch] = []
        self._arrived: list[tuple[_Prefetch, int, bool]] = []
        """Pages that were read, as a number of a prefetch, and whether these are all."""
        self._num_spare = 0
        """Pages that were taken and not read into, which are free after the next round."""
        self._round: tuple[list[_Write], list[_Prefetch], list[tuple[_Prefetch, int, bool]], int] = ([], [], [], 0)
        self._round_ns = 0
        self._under_way: dict[Request, _Prefetch] = {}
        self._retries: dict[Request, _Retry] = {}
        self._num_retries: dict[Request, int] = {}
        self._num_rounds = 0
        self._waits: dict[Request, tuple[int, float]] = {}
        """Since when requests have been waiting, and for how many seconds at most; OVER: they do so no more."""
        self._lengths: dict[Request, int] = {}
        """What waiting requests found when they asked last, in pages."""
        self._fetched: dict[Request, tuple[int, int]] = {}
        """Pages that became findable for a request, until it is looked at."""

    # The lanes ---------------------------------------------------------------------------------------------

    def store(self, content: Content, end: int) -> int:
        """Let the first `end` pages of `content` be in storage; return how many were not."""
        num_new = end - self._stored.insert([], content, end) if end else 0
        self.num_pages += num_new
        return num_new

    def write(self, runs: Iterable[Node], now_ns: int) -> None:
        """Write runs whose copies to host memory have ended."""
        for node in runs:
            self._tree.hold(node)
            self._writes.put(_Write(node), now_ns)

    def run(self, now_ns: int) -> None:
        """Let the lanes do what they can until `now_ns`."""
        self.go_on()
        while (end_ns := min(self._writes.end_ns, self._queries.end_ns, self._reads.end_ns)) <= now_ns:
            if self._writes.end_ns == end_ns:
                self._end_write()
            elif self._queries.end_ns == end_ns:
                self._end_query()
            else:
                self._end_read()
            self.go_on()

    def go_on(self) -> None:
        """Let idle lanes begin what is queued."""
        while self._writes.take():
            self._begin_write()
        while self._queries.take():
            self._begin_query()
        while self._reads.take():
            self._begin_read()

    def _begin_write(self) -> None:
        lane, work = self._writes, self._writes.work
        assert isinstance(work, _Write)
        end = min(work.done + self.batch_pages, work.end)
        num_stored = self._stored.match(work.content, end).num_pages
        num_bytes = (end - max(work.done, num_stored)) * self._page_bytes if num_stored < end else 0
        lane.end_ns = self.writing.submit(lane.free_ns, num_bytes)

    def _end_write(self) -> None:
        lane, work = self._writes, self._writes.work
        assert isinstance(work, _Write)
        lane.end()
        work.done = min(work.done + self.batch_pages, work.end)
        self.store(work.content, work.done)
        if work.done < work.end:
            self._begin_write()
        else:
            lane.work = None
            self._written.append(work)

    def _begin_query(self) -> None:
        lane, work = self._queries, self._queries.work
        assert isinstance(work, _Prefetch)
        if work.is_over or work.is_known:
            work.num_found = 0 if work.is_over else work.end - work.start
            lane.work = None
            self._answered.append(work)
        else:
            lane.end_ns = self.querying.submit(lane.free_ns, 0)

    def _end_query(self) -> None:
        lane, work = self._queries, self._queries.work
        assert isinstance(work, _Prefetch)
        lane.end()
        work.num_found = max(0, self._stored.match(work.content, work.end).num_pages - work.start)
        lane.work = None
        self._answered.append(work)

    def _begin_read(self) -> None:
        lane, work = self._reads, self._reads.work
        assert isinstance(work, _Prefetch)
        num_pages = min(self.batch_pages, work.num_taken - work.num_read)
        if work.is_over or not num_pages:
            lane.work = None
            self._arrived.append((work, work.num_read, True))
        else:
            lane.end_ns = self.reading.submit(lane.free_ns, num_pages * self._page_bytes)

    def _end_read(self) -> None:
        lane, work = self._reads, self._reads.work
        assert isinstance(work, _Prefetch)
        lane.end()
        if not work.is_over:
            work.num_read = min(work.num_read + self.batch_pages, work.num_taken)
            self._arrived.append((work, work.num_read, False))
        self._begin_read()

    # Rounds ------------------------------------------------------------------------------------------------

    def begin_round(self, now_ns: int) -> None:
        """Take what the lanes have done: what ends from now on is of the next round."""
        self._round = self._written, self._answered, self._arrived, self._num_spare
        self._written, self._answered, self._arrived, self._num_spare = [], [], [], 0
        self._round_ns = now_ns

    def note(self, now_ns: int) -> None:
        """Note what was taken: room is made for what storage has, what was read becomes findable."""
        written, answered, arrived, num_spare = self._round
        self._round = [], [], [], 0
        for prefetch in answered:
            self._note_answer(prefetch, now_ns)
        for prefetch, num_read, is_end in arrived:
            is_wanted = self._under_way.get(prefetch.request) is prefetch
            if is_wanted:
                prefetch.num_done = num_read
                if is_end:
                    self._let_find(prefetch)
            if is_end:
                self._num_spare += prefetch.num_taken - prefetch.num_done
        for write in written:
            self._tree.let_go(write.node, write.start)
        self._tree.give_back(num_spare)

    def _note_answer(self, prefetch: _Prefetch, now_ns: int) -> None:
        request = prefetch.request
        if request not in self._under_way:
            return
        # One that is over may be followed by another one of its request, which ends with it.
        if prefetch.is_over:
            if not prefetch.is_late:
                self._ask_later(request)
            self._end(request)
            return
        page_size = prefetch.content.page_size
        if prefetch.num_found * page_size < self._rules.least_tokens:
            self._ask_later(request)
            self._end(request)
            return
        least = -(-self._rules.least_tokens // page_size)
        prefetch.num_taken = self._tree.take_to_fetch(prefetch.num_found, least)
        if prefetch.num_taken:
            self._reads.put(prefetch, now_ns)
        else:
            self._end(request)
            self._ask_later(request, prefetch.start + prefetch.num_found)

    def _let_find(self, prefetch: _Prefetch) -> None:
        """Let what was read be found."""
        start, end = prefetch.start, prefetch.start + prefetch.num_done
        num_twice = self._tree.fetched(prefetch.above, prefetch.content, start, end)
        self._end(prefetch.request)
        self._fetched[prefetch.request] = start + num_twice, end

    def _end(self, request: Request) -> None:
        """Forget what is under way for a request."""
        prefetch = self._under_way.pop(request)
        if prefetch.above is not None:
            self._tree.let_go(prefetch.above, prefetch.start_above)
        self.num_asked -= prefetch.end - prefetch.start

    # Requests ----------------------------------------------------------------------------------------------

    def enter(self, request: Request, now_ns: int) -> None:
        """Ask storage for `request`, which enters the queue."""
        self._num_retries[request] = 0
        self._ask(request, now_ns)

    def due(self, waiting: Iterable[Request]) -> list[tuple[Request, int | None]]:
        """Return the requests that ask again now, in the order of the queue, with the end of what storage has."""
        self._num_rounds += 1
        retries = self._retries
        queue = list(waiting) if retries else []
        if not queue:
            return []
        retries.pop(queue[0], None)  # the head may be admitted now: it asks no more
        now, found = self._num_rounds, []
        if all(retry.due is not None and retry.due > now for retry in retries.values()):
            return []
        for request in queue:
            retry = retries.get(request)
            if retry is None:
                continue
            if self._num_retries[request] >= self._rules.most_retries or self._rules.retry_passes <= 0:
                del retries[request]
                continue
            if retry.due is None:
                retry.due = now + self._rules.retry_passes
            if retry.due <= now:
                del retries[request]
                found.append((request, retry.hit_end))
        return found

    def ask_again(self, request: Request, now_ns: int, hit_end: int | None = None) -> None:
        """Ask storage for a waiting request once more."""
        self._num_retries[request] += 1
        self._ask(request, now_ns, hit_end)

    def _ask(self, request: Request, now_ns: int, hit_end: int | None = None) -> None:
        """Ask for what follows the prefix that `request` finds, if that ends in host memory."""
        page_size = request.content.page_size
        end = (request.num_known - 1) // page_size
        match = self._cache.match(request.content, end)
        self._tree.visit(match)
        start = self._lengths[request] = match.num_pages
        above = match.nodes[-1] if match.nodes else None
        if above is not None and not above.notes.is_below:
            return
        self._retries.pop(request, None)
        if request in self._under_way or (request in self._waits and self._waits[request][1] < 0):
            return
        is_known = hit_end is not None and start < hit_end <= end
        if is_known:
            assert hit_end is not None
            end = hit_end
        if (end - start) * page_size < max(self._rules.least_tokens, 1):
            return
        if self.num_asked * page_size >= int(SHARE_OF_READS * self._tree.total_below * page_size):
            self._ask_later(request, hit_end)
            return
        if above is not None:
            self._tree.hold(above)
        prefetch = self._under_way[request] = _Prefetch(request, above, start, end, is_known=is_known)
        self.num_asked += end - start
        self._queries.put(prefetch, now_ns)

    def _ask_later(self, request: Request, hit_end: int | None = None) -> None:
        self._retries[request] = _Retry(hit_end)

    def waits(self, request: Request, now_ns: int) -> bool:
        """Return whether `request`, which is looked at, waits for what is read for it; else end that."""
        prefetch = self._under_way.get(request)
        if prefetch is None:
            return False
        if not self._may_end(prefetch, now_ns):
            if self._rules.policy == "timeout":
                num_pages = prefetch.end - prefetch.start
                self._waits.setdefault(
                    request, (now_ns, self._rules.timeout_s + num_pages * self._rules.timeout_s_per_page)
                )
            return True
        if self._rules.policy == "timeout":
            prefetch.is_late = True
            self._retries.pop(request, None)
            self._waits[request] = now_ns, OVER
        prefetch.is_over = True
        if prefetch.num_taken:
            self._let_find(prefetch)
        else:
            if not prefetch.is_late:
                self._ask_later(request)
            self._end(request)
        return False

    def _may_end(self, prefetch: _Prefetch, now_ns: int) -> bool:
        if self._rules.policy != "timeout":
            return self._rules.policy == "best_effort"
        if prefetch.num_taken and prefetch.num_done >= prefetch.num_taken:
            return False
        wait = self._waits.get(prefetch.request)
        return wait is not None and (now_ns - wait[0]) / 1e9 > wait[1]

    def take_fetched(self, request: Request) -> tuple[int, int] | None:
        """Return the pages that became findable for `request` since it was looked at last, if there are any."""
        start, end = self._fetched.pop(request, (0, 0))
        return (start, end) if start < end else None

    def has_lost(self, request: Request, num_pages: int) -> bool:
        """Return whether `request` finds fewer pages than when it asked, and may ask once more."""
        length = self._lengths[request]
        if num_pages >= length:
            return False
        if self._num_retries[request] < self._rules.most_retries:
            return True
        self._lengths[request] = num_pages
        return False

    def leave(self, request: Request) -> None:
        """Forget `request`, which leaves the queue; nothing is under way for it."""
        self._waits.pop(request, None)
        self._retries.pop(request, None)
        self._lengths.pop(request, None)
        self._fetched.pop(request, None)
        self._num_retries.pop(request, None)

    def give_up(self, request: Request) -> None:
        """Forget `request`, which is cancelled."""
        prefetch = self._under_way.get(request)
        if prefetch is not None:
            prefetch.is_over = True
            self._end(request)
            self._num_spare += prefetch.num_done
        self.leave(request)

    # As tiers ----------------------------------------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        """Whether a round may change what waiting requests find, or let them ask again."""
        return bool(self._under_way or self._retries)

    @property
    def has_news(self) -> bool:
        """Whether the next round has something to note."""
        return bool(self._written or self._answered or self._arrived or self._num_spare)

    @property
    def has_work(self) -> bool:
        """Whether something is under way, or has to be noted."""
        return self._writes.has_work or self._queries.has_work or self._reads.has_work or self.has_news

    @property
    def next_ns(self) -> int:
        """When a plan can note something next; NEVER_NS if it cannot."""
        next_ns = min(self._writes.end_ns, self._queries.end_ns, self._reads.end_ns)
        if self.has_news or self._retries:
            next_ns = min(next_ns, self._round_ns + PASS_NS)
        for request in self._under_way:
            if request in self._waits:
                since_ns, timeout_s = self._waits[request]
                next_ns = min(next_ns, since_ns + int(timeout_s * 1e9) + 1)
        return next_ns
