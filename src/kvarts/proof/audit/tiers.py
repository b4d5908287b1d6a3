"""The auditor's knowledge of the tiers below: the parts there, those held by stores and filled by loads, and evictions.

Under an order other than LRU, an `OrderWatch` records which runs the order named for eviction.

All else derives from the engine's events. The tiers' own invariants verify that their contents match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from kvarts.core.content import Content
from kvarts.core.events import LoadStarted, LoadUsed, PagesRemoved, PagesStored, StoreStarted, TransferEnded
from kvarts.core.kv.eviction import EvictionOrder, noter_of, pages_seen_by, ranges_read_by
from kvarts.proof.audit.ledger import Findings, Ledger, LedgerPart
from kvarts.proof.audit.request_parts import KnownRequest, PageDigests, RequestParts

__all__ = ["EvictionsTold", "OrderWatch", "PartsBelow", "TierBooks", "Told", "WatchedOrder"]


class TierRules(NamedTuple):
    """How an engine uses the tiers below it. `names`: those of the tiers, the fastest first.

    `num_safe`: the engine evicts first the pages that one of so many tiers, the fastest, also holds.
    `stores_go_first`: with KV groups, parts stored below go before all that an eviction order lists.
    `full_prompt_hits`: a load may bring a whole prompt. `loads_have_turns`: loaded pages become findable when their
    request has its turn, and not before the step after their load.
    """

    names: Sequence[str] = ("host", "disk")
    num_safe: int = 0
    stores_go_first: bool = False
    full_prompt_hits: bool = False
    loads_have_turns: bool = False


class TierBooks:
    """Pages that can be found in each tier below, by digest.

    `tiers`: their names, the fastest first. `full_prompt_hits`: as in OffloadConfig.
    """

    def __init__(self, tiers: Sequence[str], *, full_prompt_hits: bool) -> None:
        self.full_prompt_hits = full_prompt_hits
        self._stored: dict[str, set[bytes]] = {name: set() for name in tiers}

    def add(self, medium: str, digest: bytes) -> bool:
        """Record a page that a tier has stored. Return False if it was there already."""
        stored = self._stored[medium]
        is_new = digest not in stored
        stored.add(digest)
        return is_new

    def remove(self, medium: str, digest: bytes) -> bool:
        """Record a page that a tier has removed. Return False if it was not there."""
        stored = self._stored[medium]
        is_there = digest in stored
        stored.discard(digest)
        return is_there

    def has(self, digest: bytes, num_tiers: int) -> bool:
        """Return whether one of the `num_tiers` fastest tiers has the page."""
        return any(digest in stored for stored in islice(self._stored.values(), num_tiers))

    def found(self, digests: Sequence[bytes]) -> tuple[tuple[str, int], ...]:
        """Return the number of consecutive `digests` found in each tier, the fastest tier first."""
        position = 0
        by_tier = []
        for medium, stored in self._stored.items():
            start = position
            while position < len(digests) and digests[position] in stored:
                position += 1
            if position > start:
                by_tier.append((medium, position - start))
        return tuple(by_tier)


class _Named(msgspec.Struct, frozen=True):
    """Pages [start, end) of `content` in a KV group: a run that an order named as the next to be evicted."""

    group: int
    content: Content
    start: int
    end: int


class OrderWatch:
    """Records the runs that orders named. `make` makes an order that is watched; `named` grows.

    `is_watching`: whether it made any.
    """

    def __init__(self, make: Callable[[], EvictionOrder]) -> None:
        self.named: deque[_Named] = deque()
        self.is_watching = False
        self._make = make

    def make(self) -> EvictionOrder:
        """Return a new order that is watched.

        An order that evicts the same pages however they are divided into runs is left alone: caches ask its class.
        """
        order = self._make()
        if pages_seen_by(order) or getattr(order, "links_pages", False):
            return order
        self.is_watching = True
        return WatchedOrder(order, self.named)


class WatchedOrder:
    """An EvictionOrder around `inner`, which adds each run that `inner` names to `named`."""

    __slots__ = ("_inner", "_named", "note_request", "reads_ranges")

    def __init__(self, inner: EvictionOrder, named: deque[_Named]) -> None:
        self._inner = inner
        self._named = named
        self.note_request = noter_of(inner)
        self.reads_ranges = ranges_read_by(inner)

    def __iter__(self) -> Iterator[Any]:
        """Return all listed runs, in the order of `inner`."""
        return iter(self._inner)

    def released(self, nodes: Sequence[Any]) -> None:
        """List `nodes`."""
        self._inner.released(nodes)

    def pinned(self, nodes: Sequence[Any], path: Sequence[Any]) -> None:
        """Unlist `nodes`."""
        self._inner.pinned(nodes, path)

    def removed(self, node: Any) -> None:
        """Unlist `node`."""
        self._inner.removed(node)

    def put_back(self, nodes: Sequence[Any]) -> None:
        """List `nodes` before all others."""
        self._inner.put_back(nodes)

    def split(self, head: Any, tail: Any) -> None:
        """List `head`."""
        self._inner.split(head, tail)

    def held(self, node: Any) -> None:
        """Skip `node` until it is unheld."""
        self._inner.held(node)

    def unheld(self, node: Any) -> None:
        """Stop skipping `node`."""
        self._inner.unheld(node)

    def next_run(self) -> Any:
        """Return the run that `inner` names."""
        run = self._inner.next_run()
        self._named.append(_Named(run.group, run.content, run.start, run.end))
        return run


class Told(msgspec.Struct, frozen=True):
    """An eviction in the engine's events, in a KV group: `name`, which page `page` of `content` has.

    `copy` counts from 0 in order of creation.
    """

    group: int
    name: bytes
    copy: int
    content: Content
    page: int


class EvictionsTold:
    """Follows the engine's choice of evictions, and reports those that break a rule.

    An engine that evicts first the pages that a tier below holds keeps two lists, whose order depends on when it looked
    at them; and an EvictionOrder may be arbitrary. Rules for any order: no page is evicted while in use or before the
    pages that follow it; none is lost while another page could be evicted that one of the first `num_safe` tiers of
    `books` has; and given a `watch` of the order, each is of the run that the order named, or follows that run. `find`
    receives the text, group and page of a violation.
    """

    def __init__(
        self,
        books: TierBooks,
        num_safe: int,
        find: Callable[[str, int, bytes], object],
        digests: PageDigests,
        watch: OrderWatch | None = None,
    ) -> None:
        self.told: deque[Told] = deque()
        self.ledger: Ledger
        self._books = books
        self._num_safe = num_safe
        self._watch = watch
        self._digests = digests
        self._find = find

    def choose(self, candidates: Iterator[LedgerPart]) -> LedgerPart:
        """Return the engine's next eviction, or the first candidate if the engine names none that is evictable."""
        ledger = self.ledger
        if not self.told:
            return next(candidates)  # the comparison of events reports it
        told = self.told.popleft()
        group, digest = told.group, told.name
        copies = ledger.copies.get((group, digest), [])
        if told.copy >= len(copies) or not ledger.is_evictable(copies[told.copy]):
            self._find("was evicted while it was in use", group, digest)
            return next(candidates)
        part = copies[told.copy]
        if not ledger.is_alone(part) and any(map(ledger.is_alone, ledger.evictable())):
            self._find("was evicted before what follows it", group, digest)
        if self._watch is not None and self._watch.is_watching and not ledger.has_keeps:
            self._compare_named(self._watch, told)
        books, num_safe = self._books, self._num_safe
        if num_safe and not self._is_safe(group, digest):
            for other in candidates:
                if other.name is not None and not ledger.after(group, other.name) and books.has(other.name, num_safe):
                    self._find("was lost, and there was a page to evict that a tier below has", group, digest)
                    break
        return part

    def _compare_named(self, watch: OrderWatch, told: Told) -> None:
        """Find the run that the order named for an eviction: the next one that has its page or is before it."""
        named = watch.named
        for num_before, run in enumerate(named):
            if self._is_of(run, told):
                for _ in range(num_before):
                    named.popleft()
                return
        what = "was not asked"
        if named:
            run = named[0]
            what = f"named pages {run.start} to {run.end - 1} of request {run.content.owner}"
            what += self.ledger.words(run.group)
        self._find(f"was evicted, and the order {what}", told.group, told.name)

    def _is_of(self, run: _Named, told: Told) -> bool:
        """Return whether a page is in `run`, or follows it in a group whose layers need every page."""
        if run.group != told.group or told.page < run.start:
            return False
        if told.page >= run.end and not self.ledger.groups[run.group].has_every_page:
            return False
        page = min(told.page, run.end - 1)
        return self._digests.of(run.content, page) == self._digests.of(told.content, page)

    def _is_safe(self, group: int, digest: bytes) -> bool:
        pages = [digest]
        while pages:
            page = pages.pop()
            if not self._books.has(page, self._num_safe):
                return False
            pages += self.ledger.after(group, page)
        return True


class _Load(msgspec.Struct, eq=False):
    """A load for `known`, up to `num_pages` pages. `incoming`: the parts that it fills, each with its tier, the fastest
    first, and its page. `num_blocks`: those that the request has until it runs, promised ones included.
    """

    known: KnownRequest
    num_pages: int
    incoming: list[tuple[int, int, LedgerPart]]
    num_blocks: int = 0
    num_promised: int = 0
    is_dropped: bool = False
    """Whether the request was cancelled or the load is incomplete."""
    has_ended: bool = False
    has_arrived: bool = False
    """Whether a step has begun since it ended, and the request has its turn from then on."""
    is_cancelled: bool = False

    @property
    def has_front(self) -> bool:
        """Whether the request still has to compute pages before those that are loaded."""
        known = self.known
        return known.load is not None and known.computed < known.load.start * known.content.page_size


class PartsBelow:
    """Owner of the holds of transfers in `ledger`. `found` receives the findings.

    `tiers`: the names of the tiers, the fastest first. `has_turns`: loaded parts are findable from the turn of their
    request on, and a request whose load is incomplete keeps its parts until then.
    """

    def __init__(
        self,
        held: RequestParts,
        ledger: Ledger,
        digests: PageDigests,
        found: Findings,
        page_size: int,
        *,
        tiers: Sequence[str],
        has_turns: bool = False,
    ) -> None:
        self._tiers = tiers
        self._has_turns = has_turns
        self._held = held
        self._ledger = ledger
        self._digests = digests
        self._found = found
        self._page_size = page_size
        self._stored: set[tuple[str, int | None, bytes]] = set()
        self._stores: dict[int, list[list[LedgerPart]]] = {}
        """Runs held by each store, by transfer."""
        self._loads: dict[int, _Load] = {}
        """Loads by request: those in progress, and those that ended before their request runs."""
        self._ended: list[int] = []
        """Requests that do not resume from their ended load; they release their parts when a step begins."""
        self._just_ended: set[int] = set()
        """Requests whose load has ended since the last step began: cancelled, they keep their parts until the next."""
        self._used: dict[int, int] = {}
        """Transfers under way that the last step used, and their blocks: they must end before the next one begins."""

    def num_left(self, num_used: int) -> int:
        """Return how many of `num_used` blocks, in use at rest, are not those of stores."""
        parts = {part for runs in self._stores.values() for run in runs for part in run}
        return num_used - sum(self._ledger.groups[part.group].part_blocks for part in parts)

    def begin_step(self) -> None:
        """Check, at the beginning of a step, that the transfers that the last one used have ended."""
        for transfer in self._used:
            self._found.add(f"uses transfer {transfer}, which ends after it")
        self._used.clear()

    def hear(self, event: PagesStored | PagesRemoved) -> None:
        """Record parts that a tier has stored or removed."""
        for page in range(event.start_page, event.end_page):
            part = event.medium, event.group, self._digests.of(event.content, page)
            is_stored = isinstance(event, PagesStored)
            if (part in self._stored) is is_stored:
                what = f"was {'stored in' if is_stored else 'gone from'} {event.medium} twice"
                self._found.add(what, event.content.owner, page)
            elif is_stored:
                self._stored.add(part)
            else:
                self._stored.remove(part)

    def begin_store(self, event: StoreStarted) -> None:
        """Hold the parts that are copied: the oldest copy of each. A spill copies those of the tier above."""
        runs: list[list[LedgerPart]] = []
        if event.medium != self._tiers[0]:
            self._stores[event.transfer] = runs
            above = self._tiers[self._tiers.index(event.medium) - 1]
            for (content, start, end), group in zip(event.runs, event.groups, strict=True):
                for page in range(start, end):
                    if (above, group, self._digests.of(content, page)) not in self._stored:
                        what = f"is to be stored in {event.medium} and is not in {above}{self._ledger.words(group)}"
                        self._found.add(what, content.owner, page)
            return
        for (content, start, end), group in zip(event.runs, event.groups, strict=True):
            run = []
            for page in range(start, end):
                part = self._ledger.find(group, self._digests.of(content, page))
                if part is None:
                    what = f"is to be stored in {event.medium} and is not resident{self._ledger.words(group)}"
                    self._found.add(what, content.owner, page)
                    continue
                self._ledger.read(part)
                run.append(part)
            runs.append(run)
        self._stores[event.transfer] = runs

    def begin_load(self, known: KnownRequest, event: LoadStarted) -> None:
        """Hold the parts on the device that all groups need, and allocate the missing ones.

        If the request computes its first pages meanwhile: its hit, and the parts of the pages after these.
        """
        ledger, size = self._ledger, self._page_size
        first = event.num_hit_pages + event.num_front_pages
        num_pages = first + sum(count for _, count in event.by_tier)
        if num_pages > (known.known - 1) // size:
            self._found.add(f"{num_pages} pages are loaded of {known.known} tokens", event.request)
        if event.num_front_pages:
            self._held.hit(known, event.num_hit_pages)
        else:
            self._held.note_junction(known, event.num_hit_pages)
        load = self._loads[event.request] = _Load(known, num_pages, [])
        missing: list[tuple[int, int, int]] = []
        for index, group in enumerate(ledger.groups):
            for page in chain(*group.needed(num_pages * size, size)):
                if event.num_front_pages and page < first:
                    continue
                digest = self._digests.of(known.content, page)
                part = ledger.find(index, digest)
                if part is not None:
                    ledger.hold(part)
                    known.parts[index][page] = part
                    continue
                having = (tier for tier, medium in enumerate(self._tiers) if (medium, index, digest) in self._stored)
                tier = next(having, None)
                if tier is None:
                    self._found.add(f"is loaded, and no tier has it{ledger.words(index)}", event.request, page)
                missing.append((tier or 0, index, page))
        for tier, index, page in missing:
            part = ledger.take(index)
            if part is None:
                self._found.add(f"was taken{ledger.words(index)} where none is free", event.request, page)
                continue
            known.parts[index][page] = part
            load.incoming.append((tier, page, part))
        load.incoming.sort(key=_tier_of)
        load.num_blocks = event.num_held_pages
        self._promise(load)
        if event.num_front_pages:
            known.load = range(first, num_pages)
            known.computed = event.num_hit_pages * size
        else:
            self._pass_front(load)

    def _promise(self, load: _Load) -> None:
        """Promise a request the blocks that it does not hold yet."""
        groups = self._ledger.groups
        num_held = sum(groups[index].part_blocks * len(parts) for index, parts in enumerate(load.known.parts))
        load.num_promised = max(0, load.num_blocks - num_held)
        self._ledger.num_promised += load.num_promised

    def _pass_front(self, load: _Load) -> None:
        """Let a request go on after its loaded pages, which are published when the load ends."""
        known = load.known
        front_end = 0 if known.load is None else known.load.start
        for parts in known.parts:
            for page in [page for page, part in parts.items() if page < front_end and part.name is None]:
                self._ledger.release(parts.pop(page))  # it is not full
            ordered = dict(sorted(parts.items()))
            parts.clear()
            parts.update(ordered)
        known.load = None
        known.computed = load.num_pages * self._page_size
        known.num_taken = known.num_named = load.num_pages

    def begin_front(self, request: int) -> None:
        """Let a request take its promised blocks for the tokens of its front."""
        self._end_promise(self._loads[request])

    def end_front(self, request: int) -> None:
        """Promise it the rest again."""
        self._promise(self._loads[request])

    def use(self, event: LoadUsed) -> None:
        """Publish the parts of a load in progress, which ends before the step does, or has ended and has its turn."""
        load = self._loads[event.request]
        if self._has_turns:
            self._turn(event.request, load)
            return
        self._publish(load)
        self._used[event.transfer] = sum(self._ledger.groups[part.group].part_blocks for _, _, part in load.incoming)

    def _publish(self, load: _Load) -> None:
        for _, page, part in sorted(load.incoming, key=_place_of):
            self._held.arrive(load.known, part.group, page, part)

    def end(self, event: TransferEnded) -> None:
        """End a transfer: release the parts of a store, or publish the parts that a load has filled."""
        if event.transfer in self._used:
            if event.num_good_blocks < (num_blocks := self._used.pop(event.transfer)):
                what = f"used {num_blocks} loaded blocks, and {event.num_good_blocks} arrived"
                self._found.add(what, event.request)
            return
        if event.request < 0:
            for run in reversed(self._stores.pop(event.transfer)):
                for part in reversed(run):
                    self._ledger.end_read(part)
            return
        load = self._loads[event.request]
        load.has_ended = True
        self._just_ended.add(event.request)
        if self._has_turns:
            num_blocks = sum(self._ledger.groups[part.group].part_blocks for _, _, part in load.incoming)
            load.is_dropped = load.is_dropped or event.num_good_blocks < num_blocks
            self._ended.append(event.request)
            return
        num_left = event.num_good_blocks
        broken: dict[int, int] = {}
        for _, page, part in load.incoming:
            num_left -= self._ledger.groups[part.group].part_blocks
            if num_left < 0:
                broken[part.group] = min(page, broken.get(part.group, page))
        load.is_dropped = load.is_dropped or bool(broken)
        for _, page, part in sorted(load.incoming, key=_place_of):
            if part.group not in broken or page < broken[part.group]:
                self._held.arrive(load.known, part.group, page, part)
        if load.is_dropped:
            self._ended.append(event.request)

    def drop_ended(self) -> None:
        """At the start of a step, release the parts of requests that do not resume from their loads.

        Those that still compute what precedes their loaded pages keep them until then.
        """
        ended, self._ended = self._ended, []
        self._just_ended.clear()
        for request in ended:
            load = self._loads[request]
            if self._has_turns and not load.is_cancelled:
                load.has_arrived = True
            elif load.has_front and not load.is_cancelled:
                self._ended.append(request)
            else:
                self._drop(request)

    def _turn(self, request: int, load: _Load) -> None:
        """Publish the parts of a load that has ended; release them if it is incomplete."""
        if not load.has_arrived:
            self._found.add("has its turn before its load has ended", request)
        if load.is_dropped:
            self._drop(request)
        else:
            self._publish(load)

    def give_up(self, request: int) -> None:
        """Release the parts of a load that has ended and had its turn."""
        if not self._loads[request].has_arrived:
            self._found.add("is given up before its load has ended", request)
        self._drop(request)

    def cancel(self, request: int) -> bool:
        """Record that a request is cancelled; return whether a load for it is in progress, which keeps its parts."""
        load = self._loads.get(request)
        if load is None:
            return False
        load.is_cancelled = True
        if load.known.load is not None:
            load.is_dropped = True
            if load.has_ended and request not in self._ended:
                self._ended.append(request)
            return True
        if request in self._just_ended:
            if request not in self._ended:
                self._ended.append(request)
        elif load.has_arrived or all(part.name is not None for _, _, part in load.incoming):
            self._end_promise(self._loads.pop(request))
            return False
        load.is_dropped = True
        return True

    def admit(self, request: int) -> int:
        """Record that a request begins to run after its load; return its number of pages."""
        load = self._loads.pop(request)
        if load.has_front:
            self._found.add("runs before it has computed what precedes its loaded pages", request)
        self._pass_front(load)
        self._end_promise(load)
        return load.num_pages

    def _drop(self, request: int) -> None:
        load = self._loads.pop(request)
        self._pass_front(load)
        self._end_promise(load)
        self._held.close(load.known)
        load.known.computed = 0

    def _end_promise(self, load: _Load) -> None:
        self._ledger.num_promised -= load.num_promised
        load.num_promised = 0


def _tier_of(incoming: tuple[int, int, LedgerPart]) -> int:
    return incoming[0]


def _place_of(incoming: tuple[int, int, LedgerPart]) -> tuple[int, int]:
    _, page, part = incoming
    return part.group, page
