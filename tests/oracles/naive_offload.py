"""The naive engine with tiers below the device: one page, one step and one transfer at a time.

What it adds to naive.py, in the order of a step: transfers that are due end; loaded requests can run; what the policy
asks for begins to be stored; and a waiting request that finds pages below the device begins to load them.

Longer than other files: it is read from top to bottom, beside the guide, and is to be obvious in that order.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from oracles.naive import Batch, NaiveEngine, NaiveRequest, Page
from oracles.naive_tier import Entry, NaivePlacement, NaiveTier, Name


class PageName(tuple):  # type: ignore[type-arg]
    """A name that knows its hash, and the name of the page before it. There is one of each in an engine."""

    before: PageName | None
    known_hash: int

    def __hash__(self) -> int:
        return self.known_hash

    def chain(self) -> list[Name]:
        """The names of all pages up to this one."""
        names: list[Any] = [self]
        while names[-1].before is not None:
            names.append(names[-1].before)
        return names[::-1]


def is_shared(name: Name) -> bool:
    """Whether other requests could find the page: all its tokens are known."""
    return all(token[0] == "token" for token in name[1])  # type: ignore[index]


@dataclass(eq=False)
class Hold:
    """One page that a store reads. `orphan`: what it holds has left the device's tree since."""

    name: Name
    orphan: Orphan | None = None


@dataclass(eq=False)
class Orphan:
    num_pages: int
    num_holds: int


@dataclass
class NaiveTransfer:
    number: int
    end_ns: int
    kind: str
    # Stores: the names up to the last page, what the tier makes of them, and the device's pages that are held.
    stores: list[tuple[list[Name], NaivePlacement]] = field(default_factory=list)
    held: list[Hold] = field(default_factory=list)
    sources: list[list[Entry]] = field(default_factory=list)
    # Spills: the place of the tier above.
    place: int = 0
    # Loads: for each tier, the pinned entries, and which pages they are.
    request: NaiveRequest | None = None
    # What its request computes meanwhile: from a token, up to another, until when.
    front: tuple[int, int] = (0, 0)
    front_ends_ns: int = 0
    loads: list[tuple[NaiveTier, list[Entry], int, int]] = field(default_factory=list)
    # When its request can compute on, because the rest arrives in time, layer by layer; and when each lane began, for
    # how many bytes.
    early_ns: int = 0
    lanes: list[tuple[str, int, int]] = field(default_factory=list)
    result: tuple[int, list[int]] | None = None


class NaiveOffloadEngine(NaiveEngine):
    def __init__(
        self,
        *,
        tiers: list[int],
        policy: str,
        target_free: int,
        page_bytes: int,
        rates: dict[str, int],
        latency_ns: dict[str, int],
        full_prompt_hits: bool,
        fail_every: int,
        store_within_ns: int,
        swaps: bool = False,
        num_layers: int = 1,
        load_kv: str = "placed",
        names: tuple[str, ...] = ("host", "disk"),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tiers = [NaiveTier(size) for size in tiers]
        self.lanes = [("h2d", "d2h") if name == "host" else (f"{name}_read", f"{name}_write") for name in names]
        self.load_kv = load_kv
        self.turns: list[NaiveTransfer] = []  # loads without places that have ended, and whose requests do not run
        self.turned: set[int] = set()  # requests that had a turn, and not enough memory
        self.retried: NaiveRequest | None = None  # its load brought nothing
        self.is_lazy, self.is_exclusive = policy != "eager", policy == "exclusive"
        self.target_free = min(target_free, sum(tiers))
        self.page_bytes, self.rates, self.latency_ns = page_bytes, rates, latency_ns
        self.full_prompt_hits, self.fail_every = full_prompt_hits, fail_every
        self.lane_free_ns = dict.fromkeys(rates, 0)
        self.lane_pages = dict.fromkeys(rates, 0)
        self.transfers: list[NaiveTransfer] = []
        self.num_transfers = 0
        self.safe: list[Page] = []
        self.holds: dict[Name, list[Hold]] = {}
        self.store_within_ns = store_within_ns
        self.swaps = swaps
        self.num_layers = num_layers  # of a load that a step begins to use before its end; 1: none does
        self.usable: list[NaiveTransfer] = []  # loads that have ended, or that a step may use meanwhile
        self.used: list[NaiveTransfer] = []  # those that the step uses
        self.swapped: set[int] = set()  # requests that were preempted: what they alone can find is stored, too
        self.num_loads = self.num_good_loads = 0
        self.following: list[tuple[NaiveRequest, NaiveRequest]] = []  # with the request whose load it awaits
        self.chosen_load: list[int] = []
        self.is_behind: set[int] = set()  # places of tiers above ways that are behind
        self.wanted: dict[int, tuple[NaiveRequest, int, int]] = {}
        self.below: set[Name] = set()
        self.failed: set[Name] = set()
        self.computed_now: list[tuple[NaiveRequest, int]] = []
        self.spills: list[list[Name]] = [[] for _ in range(max(1, len(tiers) - 1))]
        self.changed: set[int] = set()  # places of tiers that may evict other pages next: an exclusive tier's spills
        self.again: list[Name] = []  # all of them so far: an exclusive host memory releases them, the last ones first
        self.gone: list[Name] = []  # all that it evicts
        self.displaced: list[Any] | None = None  # unsafe pages that an exclusive load evicts, while it takes pages
        self.grown: list[Name] = []  # pages that the device has again, or for the first time
        self.loading: list[NaiveRequest] = []
        self.early: list[NaiveTransfer] = []  # those that the step may use
        self.leading: list[NaiveTransfer] = []  # loads whose pages cannot be found yet
        self.ready: list[tuple[NaiveRequest, int, list[int]]] = []
        self.below_tokens: dict[int, list[int]] = {}
        self.counts: list[tuple[tuple[int, int], ...]] = []
        self.is_stuck = self.has_left = False
        self.now_ns = 0
        self.all_names: dict[tuple[object, object], PageName] = {}
        self.names_of: dict[int, list[PageName]] = {}

    def name_of(self, request: NaiveRequest, page: int) -> PageName:
        names = self.names_of.setdefault(request.seq, [])
        while len(names) <= page:
            key = super().name_of(request, len(names))
            assert isinstance(key, tuple)
            name = self.all_names.get(key)
            if name is None:
                name = self.all_names[key] = PageName(key)
                name.known_hash = hash(key)
                name.before = names[-1] if names else None
            names.append(name)
        return names[page]

    # Pages of the device ----------------------------------------------------------------------------------

    def is_held(self, page: Page) -> bool:
        return page.name is not None and bool(self.holds.get(page.name))  # type: ignore[call-overload]

    def is_used(self, page: Page) -> bool:
        return page.refs > 0 or self.is_held(page)

    def cached(self) -> list[Page]:
        return [page for page in self.safe + self.lru if not self.is_held(page)]

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_empty - len(self.cached())

    def higher(self, mark: tuple[int, int, int]) -> tuple[int, int, int]:
        return (self.num_used, len(self.cached()), self.num_released) if self.num_used > mark[0] else mark

    def unsafe_names(self) -> set[Any]:
        """Of resident pages: it is not below, or something resident after it is not."""
        if not self.is_lazy:
            return set(self.index)
        unsafe: set[Any] = set()
        for name in self.index:
            if name not in self.below:
                page: Any = name
                while page is not None and page not in unsafe:
                    unsafe.add(page)
                    page = page.before
        return unsafe

    def settle_lists(self) -> None:
        if not self.is_lazy:
            return
        unsafe = self.unsafe_names()
        newly_safe = [page for page in self.lru if page.name not in unsafe]
        newly_unsafe = [page for page in self.safe if page.name in unsafe]
        self.lru = newly_unsafe + [page for page in self.lru if page.name in unsafe]
        self.safe = [page for page in self.safe if page.name not in unsafe] + newly_safe

    def unlist(self, page: Page) -> None:
        (self.safe if page in self.safe else self.lru).remove(page)

    def take_page(self) -> Page:
        if self.num_empty:
            self.num_empty -= 1
            return Page(refs=1)
        cached = self.cached()
        old = cached[0]
        if self.holds:
            # Nothing that is held goes with what is before it, as long as anything else can go.
            followed = {id(other.before) for other in self.index}  # type: ignore[attr-defined]
            alone = (page for page in cached if id(page.name) not in followed or len(self.index[page.name]) > 1)
            old = next(alone, old)
        self.unlist(old)
        copies = self.index[old.name]
        while self.holds and len(copies) == 1 and (followers := self.followers(old.name)):
            while followers:
                last = followers[-1]
                followers = self.followers(last)
            self.orphan(last)
        copies.remove(old)
        if not copies:
            del self.index[old.name]
            self.evicted.append(old.name)
            name: Any = old.name
            is_unsafe = is_shared(name) and name not in self.below | self.failed | set(self.holds)
            self.below.discard(old.name)
            self.failed.discard(old.name)
            if self.displaced is None:
                self.lost(old.name)  # type: ignore[arg-type]
            else:
                self.gone.append(old.name)  # type: ignore[arg-type]
                if is_unsafe:
                    self.displaced.append(old.name)
        self.settle_lists()
        return Page(refs=1)

    def followers(self, name: Any) -> list[Any]:
        """Resident pages right after a page, in the order in which they came."""
        return [other for other in self.index if other.before is name]  # type: ignore[attr-defined]

    def orphan(self, name: Any) -> None:
        """A page that transfers alone hold leaves the tree, and what is before it goes next."""
        copies = self.index.pop(name)
        holds = self.holds.pop(name)
        for page in copies:
            assert not page.refs
            self.unlist(page)
        orphan = Orphan(len(copies), len(holds))
        for hold in holds:
            hold.orphan = orphan
        self.evicted.append(name)
        self.below.discard(name)
        self.failed.discard(name)
        self.lost(name)

    def lost(self, name: Name) -> None:
        """A page has left the device: what follows it below may be out of reach."""
        self.lose_below(name, 0)
        self.after_host()

    def lose_below(self, name: Name, first: int = 1) -> None:
        """A page has left a tier: tiers from `first` on may have what follows it, and no longer need to."""
        for place in range(first, len(self.tiers)):
            if (place and name in self.index) or any(tier.is_stored(name) for tier in self.tiers[:place]):
                return
            self.tiers[place].lose(name)

    def after_host(self) -> None:
        """Pages have left a tier: what follows them in tiers below may be out of reach."""
        for place, tier in enumerate(self.tiers[:-1]):
            removed, tier.removed = tier.removed, []
            for name in removed:
                self.lose_below(name, place + 1)

    def release(self, request: NaiveRequest) -> None:
        for index, page in enumerate(request.pages[: request.computed // self.page_size]):
            if page.name is None:
                self.give_name(request, index)
        self.settle_lists()
        self.mark_held(request)
        unsafe = self.unsafe_names()
        for page in reversed(request.pages):
            page.refs -= 1
            if page.refs == 0:
                if page.name is None:
                    self.num_empty += 1
                    self.num_released += 1
                else:
                    (self.lru if page.name in unsafe else self.safe).append(page)
                    self.num_released += not self.is_held(page)
        request.pages = []

    def preempt(self, victim: NaiveRequest, asker: NaiveRequest, now_ns: int) -> None:
        num_full = victim.computed // self.page_size
        super().preempt(victim, asker, now_ns)
        if self.swaps:
            self.swapped.add(victim.seq)
            if num_full and not self.is_lazy:
                self.wanted[victim.seq] = (victim, 0, num_full)

    def forget(self, request: NaiveRequest) -> None:
        """It has ended: what it alone could find is of no use in host memory."""
        if request.seq not in self.swapped:
            return
        self.swapped.remove(request.seq)
        num_known = sum(1 for page in range(request.known // self.page_size) if self.is_known(request, page))
        if request.seq in self.wanted:
            _, start, end = self.wanted.pop(request.seq)
            if start < min(end, num_known):
                self.wanted[request.seq] = request, start, min(end, num_known)
        if request.known // self.page_size > num_known:
            self.tiers[0].drop(self.name_of(request, num_known))
            self.after_host()
            self.unmark_removed()

    def cancel(self, request: NaiveRequest) -> None:
        """Whoever loads gives its pages back once the load has ended: until then, a transfer fills them."""
        super().cancel(request)
        self.following = [pair for pair in self.following if pair[0] is not request]
        if any(entry[0] is request for entry in self.ready) or any(each.request is request for each in self.turns):
            self.ready = [entry for entry in self.ready if entry[0] is not request]
            self.turns = [each for each in self.turns if each.request is not request]
            self.turned.discard(request.seq)
            self.release(request)
        self.forget(request)

    def give_name(self, request: NaiveRequest, index: int) -> None:
        page = request.pages[index]
        page.name = self.name_of(request, index)
        self.index.setdefault(page.name, []).append(page)
        if len(self.index[page.name]) == 1:
            self.grown.append(page.name)

    def is_known(self, request: NaiveRequest, index: int) -> bool:
        end = (index + 1) * self.page_size
        return end <= len(request.tokens) or (request.output is not None and request.know_output)

    def compute(self, request: NaiveRequest, upto: int) -> None:
        """As in the naive engine, but a page of unknown tokens gets its name when its request lets go of it: until then
        nobody could look for it, and it must not count as something that can be lost."""
        first_new = request.computed // self.page_size
        self.count_computed(request, upto)
        for index in range(first_new, upto // self.page_size):
            if request.pages[index].name is None and self.is_known(request, index):
                self.give_name(request, index)
        self.settle_lists()
        self.mark_held(request)
        num_full = upto // self.page_size
        num_known = next((i for i in range(num_full) if not self.is_known(request, i)), num_full)
        if num_known > first_new:
            self.computed_now.append((request, num_known))

    def mark_held(self, request: NaiveRequest) -> None:
        """The device has pages again that a tier had all along."""
        if not self.is_lazy:
            return
        grown, self.grown = self.grown, []
        self.again += grown
        for tier in self.tiers[1:] if self.is_exclusive else ():
            if tier.num_empty < self.target_free:
                for name in grown:
                    if tier.is_stored(name):
                        tier.move_out(name)
        for page in request.pages:
            if page.name is not None and page.name not in self.below and self.is_below(page.name):
                self.below.add(page.name)  # type: ignore[arg-type]
        self.settle_lists()

    def is_below(self, name: Any) -> bool:
        """Whether the device can lose it: of exclusive tiers only the first counts, as all pages pass through it."""
        return any(tier.is_stored(name) for tier in self.tiers[: 1 if self.is_exclusive else None])

    def unmark_removed(self) -> None:
        gone = {name for name in self.below if not self.is_below(name)}
        self.below -= gone
        self.failed |= gone  # not stored again while it lies there
        self.settle_lists()

    # A step -----------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(
            self.running
            or self.waiting
            or self.loading
            or self.ready
            or self.turns
            or self.transfers
            or any(self.spills)
            or any(place not in self.is_behind for place in self.changed)
            or (self.wanted and not self.is_stuck)
            or (self.has_left and self.is_lazy and not self.is_stuck)
            or self.following
        )

    def num_seated(self) -> int:
        if self.load_kv == "async":
            return len(self.running)
        return len(self.running) + self.num_loading() + len(self.ready)

    def num_waiting(self) -> int:
        loaded = len(self.ready) + len(self.turns)
        return len(self.waiting) + self.num_loading() + loaded + len(self.following)

    def num_loading(self) -> int:
        return sum(not request.cancelled for request in self.loading)

    def begin_step(self, now_ns: int) -> None:
        self.used = []
        early = [load for load in self.usable if load.result is None and load.request not in self.fronts()]
        self.early = [load for load in early if load.request is not None and not load.request.cancelled]
        for transfer in list(self.usable):
            if transfer.result is not None and self.load_kv == "async":
                self.usable.remove(transfer)
                self.leading.remove(transfer)
                assert transfer.request is not None
                self.loading.remove(transfer.request)
                if transfer.request.cancelled:
                    self.release(transfer.request)
                    self.let_follow(transfer.request)
                else:
                    self.turns.append(transfer)
            elif transfer.result is not None and transfer.request not in self.fronts():
                self.arrive(transfer, *transfer.result)

    def arrive(self, transfer: NaiveTransfer, num_pages: int, by_tier: list[int]) -> None:
        """The pages of a load can be found, and whoever waits for them goes on."""
        request = transfer.request
        assert request is not None
        self.usable.remove(transfer)
        self.leading.remove(transfer)
        self.loading.remove(request)
        if request.computed >= transfer.front[1]:
            for index in range(num_pages):
                if request.pages[index].name is None:
                    self.give_name(request, index)
        self.settle_lists()
        self.mark_held(request)
        if request.cancelled:
            self.release(request)
        else:
            self.ready.append((request, num_pages, by_tier))
        self.let_follow(request)

    def let_follow(self, awaited: NaiveRequest) -> None:
        """Whoever waited for it is first in the queue again."""
        back = [follower for follower, leader in self.following if leader is awaited]
        self.following = [pair for pair in self.following if pair[1] is not awaited]
        self.waiting[:0] = back
        if self.profile == "default":
            self.waiting.sort(key=lambda r: -r.priority)

    def end_transfers(self, now_ns: int) -> None:
        self.now_ns = now_ns
        times = [(transfer.end_ns, transfer.number, True, transfer) for transfer in self.transfers]
        times += [(load.early_ns, load.number, False, load) for load in self.transfers if load.kind == "load"]
        for when_ns, _, is_end, transfer in sorted(times, key=lambda each: each[:3]):
            if when_ns > now_ns:
                break
            if is_end:
                self.transfers.remove(transfer)
                self.end_transfer(transfer)
            elif transfer.end_ns > now_ns and self.succeeds(transfer) and transfer not in self.usable:
                self.usable += [load for load in self.leading if load is transfer]

    def pause_until(self) -> int:
        self.is_pausing = True
        times = [transfer.end_ns for transfer in self.transfers]
        times += [load.early_ns for load in self.leading if load.early_ns > self.now_ns]
        return min(times, default=self.now_ns)

    def step_ns(self, duration_ns: int, now_ns: int) -> int:
        """Layer after layer, each once those of all loads that the step uses are there."""
        end_ns: int | Fraction = now_ns
        for layer in range(1, self.num_layers + 1):
            for load in self.used:
                for lane, begin_ns, num_bytes in load.lanes:
                    moved_ns = Fraction(num_bytes * layer * 10**9, self.num_layers * self.rates[lane])
                    if layer == self.num_layers:
                        moved_ns = Fraction(ceil(moved_ns))
                    end_ns = max(end_ns, begin_ns + self.latency_ns[lane] + moved_ns)
            end_ns += Fraction(duration_ns, self.num_layers)
        return ceil(end_ns) - now_ns

    def succeeds(self, transfer: NaiveTransfer) -> bool:
        return not self.fail_every or (transfer.number + 1) % self.fail_every != 0

    def end_step(self) -> None:
        self.counts.append(
            tuple((tier.size() - tier.num_empty - tier.num_cached(), tier.num_cached()) for tier in self.tiers)
        )

    def step(self, now_ns: int) -> int:
        self.end_transfers(now_ns)
        if not self.has_work():
            return now_ns  # at rest: nothing is begun for its own sake
        num_steps, num_finished = len(self.steps), len(self.finished)
        end_ns = super().step(now_ns)
        if len(self.steps) == num_steps:
            self.counts.pop()  # a pause
        else:
            if not self.is_lazy:
                self.wanted.update((request.seq, (request, 0, num_pages)) for request, num_pages in self.computed_now)
            self.computed_now = []
        for request in self.finished[num_finished:]:
            self.forget(request)
        return end_ns

    # Stores -----------------------------------------------------------------------------------------------

    def names(self, request: NaiveRequest, end: int) -> list[Name]:
        return [self.name_of(request, page) for page in range(end)]

    def room(self, lane: str) -> int:
        """How many pages a lane would have carried within the bound; one at least if it carries nothing."""
        wait_ns = max(0, self.lane_free_ns[lane] - self.now_ns)
        left_ns = self.store_within_ns - wait_ns - self.latency_ns[lane]
        num_pages = max(0, left_ns) * self.rates[lane] // (self.page_bytes * 10**9)
        return num_pages if wait_ns or num_pages else 1

    def plan_stores(self) -> None:
        if self.is_lazy:
            self.plan_spills()
        wanted: list[tuple[list[Name], int, int]] = []
        if self.is_stuck:
            pass
        elif self.is_lazy:
            self.has_left = False
            wanted = [(names, start, -1) for names, start in self.scan()]
        else:
            for seq, (request, start, num_pages) in sorted(self.wanted.items()):
                wanted.append((self.names(request, num_pages), start, seq))
        stores = []
        held = []
        room = self.room(self.write_lane(0))
        for sequence, start, seq in wanted:
            position = start
            if room:
                placed = self.place(sequence, start, room)
                if placed is not None:
                    stores.append(placed)
                    held += [Hold(entry.name) for entry in placed[1].new]
                    for hold in held[-len(placed[1].new) :]:
                        self.holds.setdefault(hold.name, []).append(hold)
                    room -= len(placed[1].new)
                    position = len(placed[1].names)  # what was begun once is not begun again, also if it fails
            num_here = len(self.resident(sequence))
            is_moving = bool(stores) or any(transfer.kind != "load" for transfer in self.transfers)
            is_moving = is_moving or any(
                names and place not in self.is_behind for place, names in enumerate(self.spills)
            )
            if not room or (position < num_here and self.passes_through(num_here) and is_moving):
                self.is_stuck = self.has_left = True
                if seq in self.wanted:
                    request, _, end = self.wanted.pop(seq)
                    if position < end:
                        self.wanted[seq] = request, position, end
                break
            self.wanted.pop(seq, None)
        if stores:
            num_pages = sum(len(placement.new) for _, placement in stores)
            self.begin(NaiveTransfer(-1, self.lane(self.write_lane(0), num_pages), "store", stores, held))
            if self.is_exclusive and len(self.tiers) > 1:
                self.changed.add(0)
        self.plan_spills()

    def place(self, sequence: list[Name], start: int, room: int) -> tuple[list[Name], NaivePlacement] | None:
        """Of a sequence from page `start` on, what the device has and the tier has not, `room` pages at most."""
        host = self.tiers[0]
        names = self.resident(sequence)
        if self.passes_through(len(names)):
            start = self.pass_through(sequence, len(names), start, room)
        deepest_first = self.is_lazy
        if self.is_lazy and room < len(names) - start:
            deepest_first = False  # what is first can be found, even if the rest is gone before it is stored
            while start and names[start - 1] not in self.below | self.failed | set(self.holds):
                start -= 1
        num_missing = sum(1 for name in names[start:] if not host.has(name))
        if not num_missing:
            for name in names[start:]:
                if self.is_lazy and self.is_below(name):
                    self.below.add(name)
            self.settle_lists()
            return None
        if self.is_exclusive:
            self.below -= set(host.release_duplicates(self.again, self.index, min(room, num_missing)))
            self.after_host()  # they are stored again when they near eviction
            self.settle_lists()
        placement = host.place(names, start, deepest_first=deepest_first, limit=room)
        self.after_host()
        self.unmark_removed()
        if host.has_refused and self.is_lazy:
            self.is_stuck = self.has_left = True
        return None if placement is None else (names, placement)

    def resident(self, sequence: list[Name]) -> list[Name]:
        """What the device has of a sequence, from its beginning on."""
        return sequence[: next((i for i, name in enumerate(sequence) if name not in self.index), len(sequence))]

    def passes_through(self, num_pages: int) -> bool:
        """Host memory is too small for all pages of a prefix, and there are files below: it goes there in pieces."""
        return len(self.tiers) > 1 and num_pages > self.tiers[0].num_pages and not self.is_lazy

    def pass_through(self, names: list[Name], num_here: int, start: int, room: int) -> int:
        """The first page that no tier has; what files have of those before it makes room in host memory."""
        host, disk = self.tiers[:2]
        while start < num_here and any(tier.is_stored(names[start]) for tier in self.tiers):
            start += 1
        here = [index for index in range(start) if host.is_stored(names[index])]
        num_used = host.num_pages - host.num_empty - host.num_cached()
        num_short = min(num_here - start, room, len(here)) - (host.num_pages - num_used - len(here))
        if num_short > 0:
            begin = end = here[-1] + 1
            while end - begin < num_short and begin - 1 in here:
                begin -= 1
            if all(disk.is_stored(name) for name in names[begin:end]):
                host.vacate(names[:end], end - begin)
                self.after_host()
        return start

    def num_displaced(self, num_loaded: int) -> int:
        """How many pages an exclusive load of `num_loaded` pages from host memory leaves time to store.

        It fills their place last, and that of another page first. The first is stored by the time that the first of
        these is brought, and all are stored a page before the end of the load.
        """

        def within_ns(lane: str, num_pages: int) -> int:
            wait_ns = max(0, self.lane_free_ns[lane] - self.now_ns)
            return wait_ns + self.latency_ns[lane] + -(-num_pages * self.page_bytes * 10**9 // self.rates[lane])

        return max(
            num_pages
            for num_pages in range(num_loaded)
            if not num_pages
            or (
                within_ns("d2h", num_pages) <= within_ns("h2d", num_loaded - 1)
                and within_ns("d2h", 1) < within_ns("h2d", num_loaded - num_pages)
            )
        )

    def place_displaced(self, room: int) -> list[tuple[list[Name], NaivePlacement]]:
        """Make room for `room` of the pages that a load evicts, the last ones first; drop what follows the others."""
        assert self.displaced is not None
        host = self.tiers[0]
        stores: list[tuple[list[Name], NaivePlacement]] = []
        for chain, start in reversed(self.runs_of(self.displaced)):
            num_missing = sum(1 for name in chain[start:] if not host.has(name))
            self.below -= set(host.release_duplicates(self.again, self.index, min(room, num_missing)))
            self.after_host()
            self.settle_lists()
            placement = host.place(chain, start, limit=room) if num_missing else None
            self.after_host()
            self.unmark_removed()
            if placement is not None:
                stores.insert(0, (chain, placement))
                room -= len(placement.new)
                num_missing -= len(placement.new)
            if num_missing or not room:
                break
        self.displaced = None
        gone, self.gone = self.gone, []
        for name in gone:
            self.lost(name)
        return stores

    def scan(self) -> list[tuple[list[Name], int]]:
        """The oldest pages that would be lost, until the next `target_free` would not be."""
        num_covered = self.num_empty + sum(1 for page in self.safe if not self.is_held(page))
        chosen: list[Name] = []
        coming = set(self.holds)
        for page in self.lru:
            if num_covered >= self.target_free:
                break
            num_covered += 1
            name: Any = page.name
            is_known = all(token[0] == "token" or token[1] in self.swapped for token in name[1])
            if is_known and name not in self.below | self.failed | coming:
                chosen.append(name)
        return self.runs_of(chosen)

    def runs_of(self, chosen: list[Name]) -> list[tuple[list[Name], int]]:
        """Neighbours that follow each other in a sequence go together: all of it up to them, and their first page."""
        runs: list[list[Name]] = []
        for name in chosen:
            if runs and runs[-1][0].before is name:  # type: ignore[attr-defined]
                runs[-1].insert(0, name)
            else:
                runs.append([name])
        wanted = []
        for run in runs:
            assert isinstance(run[-1], PageName)
            chain = run[-1].chain()
            wanted.append((chain, len(chain) - len(run)))
        return wanted

    def plan_spills(self) -> None:
        for place in range(len(self.tiers) - 1):
            if place not in self.is_behind and self.spills[place]:
                self.plan_spill(place)
            if place not in self.is_behind and place in self.changed:
                self.plan_late_spill(place)

    def next_spills(self, place: int) -> list[list[Name]]:
        """What a tier evicts next, as far as the target reaches and the tier below has not got it."""
        upper, lower = self.tiers[place : place + 2]
        num_left = min(self.target_free, upper.num_pages, lower.num_pages) - upper.num_empty
        runs: list[list[Name]] = []
        for entry in upper.recency[: max(0, num_left)]:
            name: Any = entry.name
            if not is_shared(name) or lower.has(name) or entry.is_spilled:
                continue
            if runs and runs[-1][0].before is name:  # type: ignore[attr-defined]
                runs[-1].insert(0, name)
            else:
                runs.append([name])
        return runs

    def plan_late_spill(self, place: int) -> None:
        """An exclusive tier's next evictions go to the tier below, the deepest pages first."""
        upper, lower = self.tiers[place : place + 2]
        self.changed.discard(place)
        stores, sources = [], []
        room = self.room(self.write_lane(place + 1))
        for run in self.next_spills(place):
            names = run[-1].chain()  # type: ignore[attr-defined]
            start = len(names) - len(run)
            if room and not self.is_reached(names[:start], place + 1):
                continue
            placement = lower.place(names, start, deepest_first=True, limit=room) if room else None
            self.after_host()
            if placement is not None:
                stores.append((names, placement))
                sources.append(upper.pin(placement.names))
                room -= len(placement.new)
            if not room:
                self.is_behind.add(place)
                self.changed.add(place)
                break
        self.unmark_removed()
        if stores:
            end_ns = self.lane(self.write_lane(place + 1), sum(len(placement.new) for _, placement in stores))
            self.begin(NaiveTransfer(-1, end_ns, "spill", stores, [], sources, place=place))
            if place + 2 < len(self.tiers):
                self.changed.add(place + 1)

    def is_reached(self, names: list[Name], place: int) -> bool:
        """Whether a request that looks on the device, and then in tier after tier, finds all of these pages."""
        position = 0
        for has in (self.index.__contains__, *(tier.is_stored for tier in self.tiers[: place + 1])):
            while position < len(names) and has(names[position]):
                position += 1
        return position == len(names)

    def plan_spill(self, place: int) -> None:
        host, disk = self.tiers[place : place + 2]
        spills, self.spills[place] = self.spills[place], []
        stores = []
        sources = []
        runs: list[list[Any]] = []
        for name in spills:
            if runs and name.before is runs[-1][-1]:  # type: ignore[attr-defined]
                runs[-1].append(name)
            else:
                runs.append([name])
        room = self.room(self.write_lane(place + 1))
        for index, run in enumerate(runs):
            here = run[: next((i for i, name in enumerate(run) if not host.is_stored(name)), len(run))]
            position = len(run[0].chain()) - 1
            first = position
            if here and room:
                names = here[-1].chain()
                placement = disk.place(names, len(names) - len(here), limit=room)
                self.after_host()
                if placement is not None:
                    stores.append((names, placement))
                    sources.append(host.pin(placement.names))
                    room -= len(placement.new)
                    position = len(placement.names)
            if not room:
                left = [run[position - first :], *runs[index + 1 :]]
                self.spills[place] = [name for part in left for name in part]
                self.is_behind.add(place)
                break
        self.unmark_removed()
        if stores:
            end_ns = self.lane(self.write_lane(place + 1), sum(len(placement.new) for _, placement in stores))
            self.begin(NaiveTransfer(-1, end_ns, "spill", stores, [], sources, place=place))

    # Transfers --------------------------------------------------------------------------------------------

    def lane(self, name: str, num_pages: int) -> int:
        self.lane_pages[name] += num_pages
        start_ns = max(self.now_ns, self.lane_free_ns[name])
        num_bytes = num_pages * self.page_bytes
        self.lane_free_ns[name] = start_ns + self.latency_ns[name] + -(-num_bytes * 10**9 // self.rates[name])
        return self.lane_free_ns[name]

    def begin(self, transfer: NaiveTransfer) -> None:
        transfer.number = self.num_transfers
        self.num_transfers += 1
        self.transfers.append(transfer)

    def end_transfer(self, transfer: NaiveTransfer, *, is_given_up: bool = False) -> None:
        is_good = not is_given_up and self.succeeds(transfer)
        self.is_stuck = False
        self.is_behind.clear()
        if transfer.kind == "load":
            self.end_load(transfer, is_good=is_good)
            return
        place = transfer.place + 1 if transfer.kind == "spill" else 0
        tier = self.tiers[place]
        for _, placement in transfer.stores:
            tier.settle(placement, is_stored=is_good)
            if self.is_exclusive:
                pass
            elif is_good and place < len(self.tiers) - 1:
                self.spills[place] += [
                    entry.name for entry in placement.new if entry.state == "stored" and is_shared(entry.name)
                ]
        if self.is_exclusive and is_good:
            self.changed |= {each for each in (place - 1, place) if 0 <= each < len(self.tiers) - 1}
        elif self.is_exclusive and transfer.kind == "spill":
            self.changed.discard(transfer.place)  # it would be begun, and fail, for ever
        for entries, (_, placement) in zip(transfer.sources, transfer.stores, strict=False):
            for entry in entries if self.is_exclusive and is_good else ():
                if entry.state == "stored" and entry.name in [each.name for each in placement.new]:
                    entry.is_spilled = True
            self.tiers[transfer.place].unpin(entries)
        if not is_good:
            for _, placement in transfer.stores:
                for entry in placement.new:
                    if transfer.kind == "spill" or not (transfer.held or entry.name in self.index):
                        self.lose_below(entry.name, place)
        if self.is_lazy:
            orphans = {hold.name for hold in transfer.held if hold.orphan is not None}
            for _, placement in transfer.stores:
                for entry in placement.new:
                    if entry.name in self.index and self.is_below(entry.name):
                        self.below.add(entry.name)
                    elif transfer.held and not (is_good or is_given_up) and entry.name not in orphans:
                        self.failed.add(entry.name)
            self.settle_lists()
        self.unmark_removed()
        for hold in transfer.held:
            if hold.orphan is not None:
                hold.orphan.num_holds -= 1
                if not hold.orphan.num_holds:
                    self.num_empty += hold.orphan.num_pages
                    self.num_released += hold.orphan.num_pages
                continue
            self.holds[hold.name].remove(hold)
            if not self.holds[hold.name]:
                del self.holds[hold.name]
                self.num_released += sum(1 for page in self.index[hold.name] if not page.refs)

    def num_idle(self, transfer: NaiveTransfer) -> int:
        """Pages of the device that a store holds and no request does."""
        return sum(
            hold.orphan.num_pages if hold.orphan is not None else sum(not page.refs for page in self.index[hold.name])
            for hold in transfer.held
        )

    def return_lent(self, num_pages: int) -> bool:
        """Stores end at once, the youngest first, until `num_pages` more are free; none if all are not enough."""
        if num_pages > sum(map(self.num_idle, self.transfers)):
            return False
        is_last = True
        for transfer in [transfer for transfer in self.transfers if transfer.kind == "store"][::-1]:
            if num_pages <= 0:
                break
            if not self.num_idle(transfer):
                is_last = False
                continue
            num_pages -= self.num_idle(transfer)
            self.transfers.remove(transfer)
            lane = self.write_lane(0)
            if is_last and not self.is_open_end(lane):
                num_bytes = sum(len(placement.new) for _, placement in transfer.stores) * self.page_bytes
                took_ns = self.latency_ns[lane] + -(-num_bytes * 10**9 // self.rates[lane])
                self.lane_free_ns[lane] = max(self.now_ns, self.lane_free_ns[lane] - took_ns)
            self.end_transfer(transfer, is_given_up=True)
        return True

    def others_preempt_for(self, request: NaiveRequest, num_pages: int) -> bool:
        return self.return_lent(num_pages - self.num_free())

    def fits(self, head: NaiveRequest, num_pages: int) -> bool:
        hits, num_kept = self.lookup(head), self.num_kept(self.num_pages)
        # Would it fit if all stores ended at once? What these hold of its own pages, it has to take then.
        num_free = self.num_free() + sum(map(self.num_idle, self.transfers))
        if self.pages_for(head.known) - sum(page.refs > 0 for page in hits) + num_kept > num_free:
            return False
        while num_pages > self.num_free():
            self.return_lent(num_pages - self.num_free())
            num_pages = self.pages_for(head.known) - sum(self.is_used(page) for page in hits) + num_kept
        return True

    # Loads ------------------------------------------------------------------------------------------------

    def num_sources(self) -> int:
        return len(self.tiers)

    def place_of(self, tier: NaiveTier) -> int:
        return [each is tier for each in self.tiers].index(True)

    def write_lane(self, place: int) -> str:
        return self.lanes[place][1]

    def lane_of(self, tier: NaiveTier) -> str:
        return self.lanes[self.place_of(tier)][0]

    # What an engine that reads from others does besides.

    def is_open_end(self, lane: str) -> bool:
        """Whether nobody knows when a transfer will end, as others may delay it."""
        return False

    def pull_ns(self, num_pages: int) -> int:
        """How long pages take from another engine."""
        raise NotImplementedError

    def write_to_await(self, head: NaiveRequest, position: int) -> tuple[NaiveRequest, int, int] | None:
        """What another engine writes below from a page on: whom to wait for, up to which page, and until when."""
        return None

    def offers(self, head: NaiveRequest, position: int) -> list[tuple[NaiveTier, int, int]]:
        limit = (head.known if self.full_prompt_hits else head.known - 1) // self.page_size
        names = self.names(head, limit)
        offers = []
        for tier in self.tiers:
            count = tier.find(names, position)
            if count:
                offers.append((tier, position, position + count))
            position += count
        return offers

    def prefill_ns(self, start: int, end: int) -> int:
        """How long tokens take to compute, with nothing else to compute."""
        prompt = NaiveRequest(-1, 0, tuple(range(end)), 1)
        duration_ns = 0
        while start < end:
            upto = min(end, start + self.max_num_batched_tokens)
            duration_ns += self.cost(Batch([(prompt, start, upto)], []), self)
            start = upto
        return duration_ns

    def awaits_load(self, head: NaiveRequest, hits: list[Page]) -> bool:
        """Weighs loading against computing and, where another loads the same, against waiting for that."""
        position = len(hits)
        offers = self.offers(head, position)
        self.chosen_load = []
        write = self.write_to_await(head, offers[-1][2] if offers else position)
        if not offers and write is None:
            return False
        compute_ns = self.prefill_ns(position * self.page_size, head.known)
        # Where running requests leave no room for another one, those behind wait for memory, which a load keeps longer.
        loading = [
            *self.loading,
            *(entry[0] for entry in self.ready),
            *(each.request for each in self.turns if each.request is not None),
        ]
        num_left = self.num_free() + sum(len(request.pages) for request in loading)
        num_behind = len(self.waiting) if num_left >= 2 * self.pages_for(head.known) else 0

        def worth_ns(end: int) -> int:
            gain_ns = compute_ns - self.prefill_ns(end * self.page_size, head.known)
            return gain_ns * (1 + num_behind) * (self.num_good_loads + 1) // (self.num_loads + 1)

        def load_ns(first: int, last: int) -> int:
            """How long to wait for pages before computing on: for whole pages; or until the rest comes in time."""
            begin = min(last * self.page_size, head.known - 1)
            step_ns = self.prefill_ns(begin, min(head.known, begin + self.max_num_batched_tokens))
            hidden_ns = step_ns * (self.num_layers - 1) // self.num_layers
            most_ns = 0
            parts = [(self.lane_of(tier), min(end, last) - max(start, first)) for tier, start, end in offers]
            if any(num_pages > 0 and self.is_open_end(lane) for lane, num_pages in parts):
                hidden_ns = 0
            for lane, num_pages in parts:
                if num_pages > 0 and self.is_open_end(lane):
                    most_ns = max(most_ns, self.pull_ns(num_pages))
                elif num_pages > 0:
                    begins_ns = max(0, self.lane_free_ns[lane] - self.now_ns) + self.latency_ns[lane]
                    num_bytes = num_pages * self.page_bytes
                    a_layer_ns = -(-ceil(num_bytes / self.num_layers) * 10**9 // self.rates[lane])
                    all_ns = -(-num_bytes * 10**9 // self.rates[lane])
                    most_ns = max(most_ns, begins_ns + a_layer_ns, begins_ns + all_ns - hidden_ns)
            return most_ns

        def front_ns(page: int) -> int:
            return self.prefill_ns(position * self.page_size, page * self.page_size)

        best, front, most_ns = 0, position, 0
        for index, (_, _, end) in enumerate(offers):
            if worth_ns(end) - load_ns(position, end) >= most_ns:
                best, front, most_ns = index + 1, position, worth_ns(end) - load_ns(position, end)
            # The last pages are loaded while those before them are computed: as many as take no longer.
            pages = range(position, end)
            split = pages[0] + bisect_left(pages, True, key=lambda page: front_ns(page) >= load_ns(page, end))
            if position < split < end and self.load_kv == "placed":
                rest_ns = self.prefill_ns(end * self.page_size, head.known)
                saved_ns = compute_ns - rest_ns - front_ns(split)
                gain_ns = saved_ns * (1 + num_behind) * (self.num_good_loads + 1) // (self.num_loads + 1)
                gain_ns -= max(0, load_ns(split, end) - front_ns(split))
                both_ns = max(load_ns(split, end), front_ns(split)) + rest_ns
                # It has to be a quarter quicker than loading or computing alone.
                if gain_ns > most_ns and 5 * both_ns <= 4 * min(load_ns(position, end) + rest_ns, compute_ns):
                    best, front, most_ns = index + 1, split, gain_ns
        limit = (head.known if self.full_prompt_hits else head.known - 1) // self.page_size
        leader, furthest, leader_ends_ns = None, position, 0
        for transfer in self.leading:
            assert transfer.request is not None
            start, end = transfer.front[0] // self.page_size, min(limit, transfer.loads[-1][3])
            if not start <= position < transfer.loads[-1][3]:
                continue
            mine, theirs = self.names(head, end), self.names(transfer.request, end)
            common = next((i for i in range(end) if mine[i] is not theirs[i]), end)
            if common > furthest:
                leader, furthest = transfer.request, common
                leader_ends_ns = max(transfer.end_ns, transfer.front_ends_ns)
                if any(self.is_open_end(self.lane_of(tier)) for tier, *_ in transfer.loads):
                    leader_ends_ns = 1 << 62  # nobody knows
        if leader is None and write is not None:
            leader, furthest, leader_ends_ns = write
        if leader is not None and worth_ns(furthest) - (leader_ends_ns - self.now_ns) >= most_ns:
            self.following.append((head, leader))
            return True
        last = offers[best - 1][2] if best else position
        self.chosen_load = [best, front, front_ns(front), load_ns(front, last)]
        return False

    def starts_load(self, head: NaiveRequest, hits: list[Page], now_ns: int) -> bool:
        if not self.chosen_load or not self.chosen_load[0]:
            return False
        names = self.names(head, head.known // self.page_size)
        num_tiers, front, front_ns, wait_ns = self.chosen_load
        offers = [
            (tier, tier.pin(names[:end]), max(start, front), end)
            for tier, start, end in self.offers(head, len(hits))[:num_tiers]
            if front < end
        ]
        num_pages = self.pages_for(head.known) if self.load_kv == "placed" else offers[-1][3]
        num_from_host = sum(end - start for tier, _, start, end in offers if tier is self.tiers[0])
        room = 0
        if self.is_exclusive and num_from_host and front <= len(hits):
            room = self.num_displaced(num_from_host)
        self.displaced = [] if room else None
        head.pages += [self.take_page() for _ in range(num_pages - len(hits))]
        displaced = self.place_displaced(room) if room else []
        ends_ns = []
        lanes = []
        for tier, _, start, end in offers:
            lane = self.lane_of(tier)
            if self.is_open_end(lane):
                ends_ns.append(self.now_ns + self.pull_ns(end - start))
                continue
            lanes.append((lane, max(self.now_ns, self.lane_free_ns[lane]), (end - start) * self.page_bytes))
            ends_ns.append(self.lane(lane, end - start))
        transfer = NaiveTransfer(-1, max(ends_ns), "load", request=head, loads=offers, lanes=lanes)
        transfer.early_ns = self.now_ns + wait_ns if len(lanes) == len(offers) else transfer.end_ns
        head.computed = len(hits) * self.page_size
        transfer.front = head.computed, front * self.page_size
        if front > len(hits):
            transfer.front_ends_ns = self.now_ns + front_ns
            head.others_hit_tokens += max(0, head.computed - head.furthest)
            head.furthest = max(head.furthest, head.computed)
        self.begin(transfer)
        if displaced:
            num_stored = sum(len(placement.new) for _, placement in displaced)
            self.begin(NaiveTransfer(-1, self.lane("d2h", num_stored), "store", displaced))
            if len(self.tiers) > 1:
                self.changed.add(0)
        self.leading.append(transfer)
        self.loading.append(head)
        if self.load_kv != "async":
            head.seniority = self.take_seniority()
        if self.load_kv == "sync":
            self.usable.append(transfer)
            self.early = [transfer]
        return True

    def lacks_for_load(self, head: NaiveRequest, hits: list[Page]) -> bool:
        if self.load_kv != "async" or not self.chosen_load or not self.chosen_load[0]:
            return False
        end = self.offers(head, len(hits))[self.chosen_load[0] - 1][2]
        num_pages = end - sum(1 for page in hits if self.is_used(page)) + self.num_kept(self.num_pages)
        # Beside what those need that compute their prompts, that load, or that have loaded.
        others = [*self.running, *self.loading, *(transfer.request for transfer in self.turns)]
        for other in others:
            assert other is not None
            if not other.decodes and not other.cancelled:
                num_pages += max(0, self.pages_for(other.known) - len(other.pages))
        return num_pages > self.num_free()

    def go_on_with_loads(self, head: NaiveRequest, now_ns: int, budget: int, before: dict[int, int]) -> int:
        if self.load_kv == "sync" and self.early:
            return self.admit_loaded(now_ns, budget, before)
        if head is self.retried:
            self.retried = None
            return self.take_turns(now_ns, budget, before)
        return budget

    def take_turns(self, now_ns: int, budget: int, before: dict[int, int]) -> int:
        """Requests without places whose loads have ended run before others, in the order in which they began."""
        while self.turns and budget:
            transfer = min(self.turns, key=lambda each: each.number)
            request = transfer.request
            assert request is not None and transfer.result is not None
            num_pages, by_tier = transfer.result
            if len(self.running) >= self.max_num_seqs:
                self.is_held_back = True
                break
            if request.seq not in self.turned:
                self.turned.add(request.seq)
                for index in range(num_pages):
                    if request.pages[index].name is None:
                        self.give_name(request, index)
                self.settle_lists()
                self.mark_held(request)
                if not num_pages:
                    self.turned.remove(request.seq)
                    self.turns.remove(transfer)
                    self.release(request)
                    self.waiting.insert(0, request)
                    if self.profile == "default":
                        self.waiting.sort(key=lambda r: -r.priority)
                    self.retried = request
                self.let_follow(request)
                if not num_pages:
                    break
            num_wanted = self.pages_for(request.known) - len(request.pages) + self.num_kept(self.num_pages)
            if num_wanted > self.num_free() and not self.return_lent(num_wanted - self.num_free()):
                self.is_held_back = True
                break
            self.turns.remove(transfer)
            self.turned.remove(request.seq)
            self.ready.append((request, num_pages, by_tier))
            budget = self.start_ready(now_ns, budget, before)
        return budget

    def fronts(self) -> list[NaiveRequest]:
        """Requests that compute what is before the pages that are loaded for them."""
        return [transfer.request for transfer in self.leading if transfer.request is not None
                and transfer.request.computed < transfer.front[1] and not transfer.request.cancelled]  # fmt: skip

    def loading_with_front(self) -> list[NaiveRequest]:
        return [transfer.request for transfer in self.leading if transfer.request is not None]

    def compute_fronts(self, budget: int, before: dict[int, int]) -> int:
        for transfer in self.leading:
            request = transfer.request
            assert request is not None
            num_tokens = min(budget, self.most_tokens, transfer.front[1] - request.computed)
            if num_tokens > 0 and not request.cancelled:
                before[request.seq] = request.computed
                self.compute(request, request.computed + num_tokens)
                budget -= num_tokens
        return budget

    def end_load(self, transfer: NaiveTransfer, *, is_good: bool) -> None:
        request = transfer.request
        assert request is not None
        self.num_loads += 1
        self.num_good_loads += is_good
        by_tier = [0] * self.num_sources()
        good_end = transfer.loads[0][2]
        for tier, entries, start, end in transfer.loads:
            if is_good:
                by_tier[self.place_of(tier)] = end - start
                good_end = end
            elif entries[start].name in tier.entries and tier in self.tiers:
                tier.drop(entries[start].name)
            tier.note_use(entries[start:end])
            tier.touch(entries)
            tier.unpin(entries)
            self.after_host()
            if self.is_exclusive and self.place_of(tier) < len(self.tiers) - 1:
                self.changed.add(self.place_of(tier))
        self.unmark_removed()
        if transfer in self.leading:  # else its request has begun to run
            transfer.result = good_end, by_tier
            if transfer not in self.usable:
                self.usable.append(transfer)

    def admit_loaded(self, now_ns: int, budget: int, before: dict[int, int]) -> int:
        if self.load_kv == "async":
            if self.retried is not None and self.waiting and self.choose_head(self.waiting, now_ns) is self.retried:
                return budget
            return self.take_turns(now_ns, budget, before)
        return self.start_ready(now_ns, budget, before)

    def start_ready(self, now_ns: int, budget: int, before: dict[int, int]) -> int:
        while (self.ready or self.early) and budget:
            if not self.ready:
                # Its first layer is there, and the step ends after its load.
                transfer = self.early.pop(0)
                self.used.append(transfer)
                by_tier = [0] * self.num_sources()
                for tier, _, start, end in transfer.loads:
                    by_tier[self.place_of(tier)] += end - start
                self.arrive(transfer, transfer.loads[-1][3], by_tier)
            request, num_pages, by_tier = self.ready[0]
            hit_tokens = min(num_pages * self.page_size, request.known - 1)
            seen = request.furthest
            tokens = self.below_tokens.setdefault(request.seq, [0] * self.num_sources())
            position = (num_pages - sum(by_tier)) * self.page_size
            for index, count in enumerate(by_tier):
                for _ in range(count * self.page_size):
                    tokens[index] += seen <= position < hit_tokens
                    position += 1
            before[request.seq] = hit_tokens
            budget -= self.enter(request, hit_tokens, budget, now_ns)
            self.ready.pop(0)
        return budget

    def keeps_seniority(self, head: NaiveRequest) -> bool:
        return self.load_kv != "async" and any(request is head for request, _, _ in self.ready)
