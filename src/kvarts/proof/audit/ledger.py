"""A ledger of parts of pages, all in one memory. It is a second bookkeeping, by design part by part.

A page has a part in every KV group; if all layers keep every token, there is one full group, and a part is the whole
page. A part is *held* while sequences reference it or transfers read it. When its page is full, it is *published* under
a name and can be found. A published part that is not held is *cached*, in order of release, and evicted when a new part
needs its room:

    take     allocate a part, held once; evict as needed          hold, release      add or drop a reference
    publish  make a part findable by the name of its page         keep, end_keep     references of a transfer
    reserve  blocks that are not parts                            clear              evict everything cached

The ledger shares no code with the caches that it is compared with, and knows nothing of the engine. `Auditor` compares
the two; a test of another router or engine can do the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import lcm
from typing import Literal

import msgspec

from kvarts.base.errors import KvartsError
from kvarts.base.limits import MOST_PAGES, check_whole

__all__ = [
    "LOST",
    "AuditError",
    "Finding",
    "Findings",
    "Happened",
    "Keep",
    "Ledger",
    "LedgerError",
    "LedgerGroup",
    "LedgerKind",
    "LedgerPart",
]


class Finding(msgspec.Struct, frozen=True):
    """A discrepancy found in `step`. `request` and `page` are those concerned, if any."""

    step: int
    what: str
    request: int | None = None
    page: int | None = None

    def __str__(self) -> str:
        place = "" if self.page is None else f", page {self.page} of request {self.request}"
        return f"step {self.step}{place}: {self.what}"


class AuditError(AssertionError):
    """The engine and the ledger disagree. `findings` lists the discrepancies."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, findings)))

    def __reduce__(self) -> tuple[type[AuditError], tuple[tuple[Finding, ...]]]:
        """Return what makes it again, in another process."""
        return AuditError, (self.findings,)


class Findings:
    """The findings of an audit so far, and the step under audit."""

    def __init__(self) -> None:
        self.all: list[Finding] = []
        self.step = -1

    def add(self, what: str, request: int | None = None, page: int | None = None) -> None:
        """Add a finding in the present step."""
        self.all.append(Finding(self.step, what, request, page))


LOST = "lost"
"""Fate of a part that only a transfer held when the page before it was evicted."""


class LedgerError(KvartsError):
    """An impossible call. The ledger is unchanged."""


LedgerKind = Literal["full", "latent", "window", "chunk", "state"]
"""What the layers of a group keep."""


class LedgerGroup(msgspec.Struct, frozen=True):
    """A KV group as the ledger knows it: the retention of its layers, and the blocks per part.

    `span`: tokens of a window or a chunk, and of states by page; None for others. `sink`: first tokens that a window
    also retains. `is_sparse`: a chunk has a part of its last page only. `interval`: only parts that a token sees which
    begins after an end of a prompt, a place where it leaves others, or a multiple of so many tokens, can be found; None
    for all. `saves_inside`: of a sparse group, a chunk has the part of the page before as well; with an interval of 0,
    only one that ends its prefill. `block_pages`: pages whose parts are taken and released at once.
    """

    kind: LedgerKind
    part_blocks: int
    span: int | None = None
    sink: int = 0
    is_sparse: bool = False
    interval: int | None = None
    saves_inside: bool = False
    block_pages: int = 1

    def __str__(self) -> str:
        if self.kind == "state":
            return self.kind if self.span is None else f"{self.kind} by page"
        return self.kind if self.span is None else f"{self.kind} {self.span}"

    @property
    def is_state(self) -> bool:
        """Whether a running sequence has one state, and leaves snapshots."""
        return self.kind == "state" and self.span is None

    @property
    def is_bounded(self) -> bool:
        """Whether running sequences release parts."""
        return self.kind in ("window", "chunk") or (self.kind == "state" and self.span is not None)

    def taken(self, pages: range, num_tokens: int, prefill_end: int) -> range:
        """Return which of `pages` a chunk has that ends with `num_tokens` tokens, and the others of their blocks."""
        if not self.is_sparse:
            size = self.block_pages
            return range(-(-pages.start // size) * size, -(-pages.stop // size) * size)
        is_saved = self.saves_inside and (self.interval != 0 or num_tokens >= prefill_end)
        return pages[-2:] if is_saved else pages[-1:]

    @property
    def has_every_page(self) -> bool:
        """Whether a page is usable only together with all pages before it."""
        return self.kind in ("full", "latent")

    def seen(self, position: int) -> tuple[range, range]:
        """Return the positions before `position` that its token sees, in the sink and in the span.

        Later tokens see no other of these positions.
        """
        if self.span is None:
            return range(0), range(position)
        first = position // self.span * self.span if self.kind == "chunk" else position + 1 - self.span
        return range(min(self.sink, position)), range(max(0, first), position)

    def retains(self, page: int, ends: tuple[int, ...], page_size: int) -> bool:
        """Return whether a part can be found of a request that is resumed after each of `ends` pages."""
        if self.interval is None:
            return True
        if self.interval:
            most = (page + 1) * page_size + (self.span or 1) + self.interval
            ends += tuple(end // page_size for end in range(0, most, self.interval))
        return any(page in self.needed(end * page_size, page_size)[1] for end in ends)

    def needed(self, num_tokens: int, page_size: int) -> tuple[range, range]:
        """Return the pages that tokens from `num_tokens` on need of those before: in the sink, and after it.

        They include the page of the next token, unless that token begins a new one. A snapshot of a state is readable
        only at the end of its page.
        """
        if self.is_state:
            page = num_tokens // page_size - 1
            return range(0), range(page, page + 1) if num_tokens and num_tokens % page_size == 0 else range(0)
        sink, others = self.seen(num_tokens)
        first = others.start // page_size
        first -= first % self.block_pages
        return range(min(first, -(-sink.stop // page_size))), range(first, -(-num_tokens // page_size))


class LedgerPart:
    """The part of a page in a group, or a state.

    `name`: the name of the page while the part can be found, else None. `refs`: references of sequences; `keeps`: those
    of transfers. `stays`: the part is cached after its last release, if it has a name. `is_passed`: the sequence that
    released it last went on without it.
    """

    __slots__ = ("group", "is_passed", "keeps", "name", "refs", "stays")

    def __init__(self, group: int, *, stays: bool) -> None:
        self.group = group
        self.stays = stays
        self.name: bytes | None = None
        self.refs = 1
        self.keeps = 0
        self.is_passed = False


class Keep:
    """A transfer's hold on a page in a group: all copies, including later ones."""

    __slots__ = ("key", "parts")

    def __init__(self, key: tuple[int, bytes], parts: list[LedgerPart]) -> None:
        self.key = key
        self.parts = parts


class Happened(msgspec.Struct, frozen=True):
    """A change of a part that can be found: `what` is stored, evicted, dropped or lost.

    `copy`: index of the copy in order of creation, from 0; None for the only copy.
    """

    what: str
    group: int
    name: bytes
    copy: int | None = None


class Ledger:
    """Owner of the parts in `num_blocks` blocks.

    `keeps_all`: parts released by windows can be found as well. `keeps_prefixes`: in groups whose layers need every
    page, a page is evicted after those that follow it. `happened`: queue of changes of parts that can be found; the
    reader removes them. `choose`: picks the next part to evict; it receives the candidates in order of release. The
    default is the first candidate whose eviction makes no other part useless. Raise ConfigError if `num_blocks` is not
    a whole number from 1.
    """

    def __init__(
        self,
        groups: tuple[LedgerGroup, ...],
        num_blocks: int,
        *,
        keeps_all: bool = True,
        keeps_prefixes: bool = True,
        choose: Callable[[Iterator[LedgerPart]], LedgerPart] | None = None,
    ) -> None:
        check_whole(num_blocks, "num_blocks", most=MOST_PAGES)
        self.groups = groups
        self.hit_pages = lcm(*(group.block_pages for group in groups))
        """The pages that a hit is a multiple of."""
        self.num_blocks = num_blocks
        self.num_empty = num_blocks
        self.copies: dict[tuple[int, bytes], list[LedgerPart]] = {}
        """Copies by group and name, the oldest first."""
        self.num_resident: dict[bytes, int] = {}
        """Number of parts of each page that can be found, in all groups."""
        self.happened: deque[Happened] = deque()
        self.num_used = 0
        """Blocks of held parts, plus reserved blocks."""
        self.num_reserved = 0
        """Blocks allocated outside parts."""
        self.num_promised = 0
        """Free blocks promised to requests that wait for a load."""
        self._keeps_all = keeps_all
        self._keeps_prefixes = keeps_prefixes
        self._choose = choose
        self._idle: OrderedDict[LedgerPart, None] = OrderedDict()
        """Parts with a name and without references, in order of release."""
        self._num_held = [0] * len(groups)
        self._num_cached = [0] * len(groups)
        self._after: dict[tuple[int, bytes], dict[bytes, None]] = {}
        """Resident pages by the page directly before them, in groups that need every page."""
        self._before: dict[tuple[int, bytes], bytes] = {}
        self._followers: dict[bytes, dict[bytes, None]] = {}
        """Pages of known tokens that have ever been published after a page, in groups that need every page."""
        self._kept: dict[tuple[int, bytes], list[Keep]] = {}
        """Holds of transfers on pages that can be found."""

    # Questions --------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: empty, or of parts that are not held, minus promised ones."""
        return self.num_blocks - self.num_used - self.num_promised

    @property
    def num_cached(self) -> int:
        """Blocks of parts that can be found and are not held."""
        return self.num_blocks - self.num_used - self.num_empty

    @property
    def has_keeps(self) -> bool:
        """Whether transfers hold pages that can be found."""
        return bool(self._kept)

    def counts(self) -> tuple[int, ...]:
        """Return the parts held and the parts cached, one pair per group."""
        return tuple(count for pair in zip(self._num_held, self._num_cached, strict=True) for count in pair)

    def words(self, group: int | None) -> str:
        """Return " in group ..." for a message; empty if there is only one group."""
        if group is None or not 0 <= group < len(self.groups):
            return f" in group {group}, which is not there"
        return "" if len(self.groups) == 1 else f" in group {group} ({self.groups[group]})"

    def find(self, group: int, name: bytes) -> LedgerPart | None:
        """Return the oldest copy of the part of a page, or None."""
        copies = self.copies.get((group, name))
        return copies[0] if copies else None

    def evictable(self) -> Iterator[LedgerPart]:
        """Return every part that can be evicted, in order of release."""
        return (part for part in self._idle if not part.keeps)

    def is_evictable(self, part: LedgerPart) -> bool:
        """Return whether a part can be found and is not held."""
        return part in self._idle and not part.keeps

    def is_alone(self, part: LedgerPart) -> bool:
        """Return whether losing this copy makes no other part useless."""
        assert part.name is not None
        key = part.group, part.name
        return key not in self._after or len(self.copies[key]) > 1

    def after(self, group: int, name: bytes) -> list[bytes]:
        """Return the resident pages directly after a page, in a group whose layers need every page."""
        return list(self._after.get((group, name), ()))

    def reach(self, names: Sequence[list[bytes]], page_size: int) -> tuple[int, list[int]]:
        """Return the longest prefix, in pages, that all groups can resume from, and the longest for each group alone.

        `names`: of its pages, by group. Neither extends beyond the last page that has a part in any group.
        """
        num_pages = len(names[0])
        while num_pages and all(of_group[num_pages - 1] not in self.num_resident for of_group in names):
            num_pages -= 1
        lacks = [
            [0, *accumulate((group, name) not in self.copies for name in of_group[:num_pages])]
            for group, of_group in enumerate(names)
        ]

        def has_needed(index: int, length: int) -> bool:
            missing = lacks[index]
            sink, others = self.groups[index].needed(length * page_size, page_size)
            return missing[sink.stop] == 0 and missing[others.stop] == missing[others.start]

        # Where blocks are of several pages, hits end with blocks of all groups.
        lengths = [num_pages, *range((num_pages - 1) // self.hit_pages * self.hit_pages, 0, -self.hit_pages)]
        longest = [
            (bisect_right(lacks[index], 0) - 1) // group.block_pages * group.block_pages
            if group.has_every_page
            else next((length for length in lengths if has_needed(index, length)), 0)
            for index, group in enumerate(self.groups)
        ]
        for length in range(min(longest) // self.hit_pages * self.hit_pages, 0, -self.hit_pages):
            is_there = any(of_group[length - 1] in self.num_resident for of_group in names)
            if is_there and all(has_needed(index, length) for index in range(len(self.groups))):
                return length, longest
        return 0, longest

    def branch(self, names: list[bytes]) -> int:
        """Return the number of first pages after which a page is resident that is not the next of `names`; 0 for none.

        Only groups whose layers need every page count; they have all pages up to there, and not the next of `names`.
        """
        whole = [index for index, group in enumerate(self.groups) if group.has_every_page]
        length = 0
        while length < len(names) and all((index, names[length]) in self.copies for index in whole):
            length += 1
        if not whole or not 0 < length < len(names):
            return 0
        others = [name for name in self._followers.get(names[length - 1], ()) if name != names[length]]
        return length if any((index, name) in self.copies for name in others for index in whole) else 0

    # Parts ------------------------------------------------------------------------------------------------

    def take(self, group: int) -> LedgerPart | None:
        """Allocate a part, held once; evict as needed. Return None and change nothing if it does not fit."""
        num_blocks = self.groups[group].part_blocks
        if num_blocks > self.num_free:
            return None
        self._make_room(num_blocks)
        self.num_empty -= num_blocks
        self.num_used += num_blocks
        self._num_held[group] += 1
        return LedgerPart(group, stays=self._keeps_all or not self.groups[group].is_bounded)

    def publish(self, part: LedgerPart, name: bytes, *, before: bytes | None = None, is_known: bool = True) -> bool:
        """Make a part findable by the name of its page. Return whether it is the first copy in its group.

        `before`: the page before it, if there is one. `is_known`: all of its tokens are known. Raise LedgerError if the
        part has a name already or is not held.
        """
        if part.name is not None or not part.refs:
            raise LedgerError("has a name already, or is not held", field="part")
        key = part.group, name
        copies = self.copies.setdefault(key, [])
        copies.append(part)
        part.name = name
        self.num_resident[name] = self.num_resident.get(name, 0) + 1
        for kept in self._kept.get(key, ()):
            kept.parts.append(part)
            part.keeps += 1
        if len(copies) > 1:
            return False
        if before is not None and is_known and not self._keeps_prefixes and self.groups[part.group].has_every_page:
            self._followers.setdefault(before, {})[name] = None
        if before is not None and self._keeps_prefixes and self.groups[part.group].has_every_page:
            self._before[key] = before
            self._after.setdefault((part.group, before), {})[name] = None
        self.happened.append(Happened("stored", part.group, name))
        return True

    def hold(self, part: LedgerPart) -> None:
        """Reference a part. Raise LedgerError if it cannot be found."""
        if part.name is None:
            raise LedgerError("cannot be found", field="part")
        if not part.refs:
            self._idle.pop(part, None)
            if not part.keeps:
                self._count_cached(part, -1)
        part.refs += 1

    def release(self, part: LedgerPart, *, is_passed: bool = False) -> None:
        """Drop a reference. Raise LedgerError if the part is not held.

        After its last reference, a part is cached if it has a name and stays; otherwise it becomes empty. `is_passed`:
        the sequence that releases it goes on without it.
        """
        if not part.refs:
            raise LedgerError("is not held", field="part")
        part.refs -= 1
        if part.refs:
            return
        part.is_passed = is_passed
        if part.keeps and part.name is not None and (is_passed or not part.stays):
            return  # the transfer that reads it decides
        if part.name is not None and part.stays:
            self._idle[part] = None
            if not part.keeps:
                self._count_cached(part, 1)
            return
        if part.name is not None:
            self._forget(part, "dropped")
        self._free(part)

    def drop(self, part: LedgerPart) -> None:
        """Drop a part that can be found; if it is held, when it is released."""
        part.stays = False
        if part.refs:
            return
        self._idle.pop(part, None)
        if not part.keeps:
            self._count_cached(part, -1)
            self._forget(part, "dropped")
            self._free(part)

    def read(self, part: LedgerPart) -> None:
        """Hold one copy of a part of a KV group for a transfer, until `end_read`.

        Its eviction order does not change, unless the sequence that released it went on without it.
        """
        if not (part.refs or part.keeps):
            self._count_cached(part, -1)
            if part.is_passed:
                del self._idle[part]
        part.keeps += 1

    def end_read(self, part: LedgerPart) -> None:
        """End the hold of `read`."""
        part.keeps -= 1
        if part.keeps or part.refs:
            return
        if part.name is not None and not part.stays:
            self._forget(part, "dropped")
        if part.name is None:
            self._free(part)
            return
        self._idle.setdefault(part)
        self._count_cached(part, 1)

    def keep(self, group: int, name: bytes) -> Keep | None:
        """Hold all copies of the part of a page, without changing their eviction order, until `end_keep`.

        Return None and change nothing if there is no copy.
        """
        key = group, name
        copies = self.copies.get(key)
        if not copies:
            return None
        kept = Keep(key, list(copies))
        for part in kept.parts:
            if not (part.refs or part.keeps):
                self._count_cached(part, -1)
            part.keeps += 1
        self._kept.setdefault(key, []).append(kept)
        return kept

    def end_keep(self, kept: Keep) -> None:
        """End the hold of `keep`. Copies that can no longer be found become empty once they are not held."""
        for part in kept.parts:
            self.end_read(part)
        of_page = self._kept.get(kept.key, [])
        if kept in of_page:
            of_page.remove(kept)
            if not of_page:
                del self._kept[kept.key]

    def reserve(self, num_blocks: int) -> bool:
        """Grow or shrink the blocks outside parts to `num_blocks`. Return False, without change, if they do not fit."""
        num_new = num_blocks - self.num_reserved
        if num_new > self.num_free:
            return False
        self._make_room(num_new)
        self.num_empty -= num_new
        self.num_used += num_new
        self.num_reserved = num_blocks
        return True

    def clear(self) -> None:
        """Evict every part that can be evicted."""
        while next(self.evictable(), None) is not None:
            self._evict()

    # Inside -----------------------------------------------------------------------------------------------

    def _make_room(self, num_blocks: int) -> None:
        while self.num_empty < num_blocks:
            self._evict()

    def _evict(self) -> None:
        """Evict the next part. Parts after it that only transfers read are lost with it."""
        part = self._next() if self._choose is None else self._choose(self.evictable())
        if not self.is_evictable(part):
            raise LedgerError("was chosen and cannot be evicted", field="choose")
        if not self.is_alone(part):
            assert part.name is not None
            self._lose_after(part.group, part.name)
        del self._idle[part]
        self._count_cached(part, -1)
        self._forget(part, "evicted")
        self._free(part)

    def _next(self) -> LedgerPart:
        first = next(self.evictable())
        if self.is_alone(first):
            return first
        return next((part for part in self.evictable() if self.is_alone(part)), first)

    def _lose_after(self, group: int, name: bytes) -> None:
        """Lose the pages after a page that only transfers hold, the last first."""
        for follower in reversed(self.after(group, name)):
            self._lose_after(group, follower)
            copies = self.copies[group, follower]
            if any(part.refs or not part.keeps for part in copies):
                continue
            for part in copies[1:]:
                del self._idle[part]
                part.name = None
            self.num_resident[follower] -= len(copies) - 1
            del copies[1:], self._idle[copies[0]]
            self._forget(copies[0], LOST)

    def _forget(self, part: LedgerPart, what: str) -> None:
        """Remove a part from those that can be found."""
        name = part.name
        assert name is not None
        key = part.group, name
        copies = self.copies[key]
        copy = None if len(copies) == 1 else copies.index(part)
        copies.remove(part)
        part.name = None
        if not copies:
            del self.copies[key]
            self._kept.pop(key, None)
            before = self._before.pop(key, None)
            if before is not None:
                after = self._after[part.group, before]
                after.pop(name, None)
                if not after:
                    del self._after[part.group, before]
        self.num_resident[name] -= 1
        if not self.num_resident[name]:
            del self.num_resident[name]
        self.happened.append(Happened(what, part.group, name, copy))

    def _count_cached(self, part: LedgerPart, count: int) -> None:
        self._num_cached[part.group] += count
        self._num_held[part.group] -= count
        self.num_used -= count * self.groups[part.group].part_blocks

    def _free(self, part: LedgerPart) -> None:
        """Count a part that cannot be found as empty, unless a transfer reads it."""
        if part.keeps:
            return
        num_blocks = self.groups[part.group].part_blocks
        self._num_held[part.group] -= 1
        self.num_used -= num_blocks
        self.num_empty += num_blocks
