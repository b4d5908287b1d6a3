"""KV groups on a device and in tiers below it, part by part: dictionaries for each tier, and everything is looked at.

The device is the naive cache with KV groups. A tier has one part of a page in a group at most, by its name; those that
can be found are a list, the least recently used first, and stay in their place while they are pinned. Of what is used
together, groups that keep less come first, then those that keep all tokens, in each the deepest page. What has arrived
in a tier is copied to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oracles.naive_grouped import NaiveGroups, NaivePart, NaiveSequence, Name, has_state, is_bounded

__all__ = ["NaiveBelow", "NaiveTier", "NaiveTieredGroups"]

Key = tuple[int, Name]
"""What a part is of: its group, and its page."""


@dataclass(eq=False)
class NaiveBelow:
    """A part in a tier, or one that comes there."""

    key: Key
    pins: int = 0
    was_idle: bool = False
    """Nothing used it on the device when its store began."""


@dataclass
class NaiveTier:
    """A tier of `num_bytes`, for parts of `sizes` by group."""

    num_bytes: int
    sizes: list[int]
    here: dict[Key, NaiveBelow] = field(default_factory=dict)
    """Parts that can be found."""
    coming: dict[Key, NaiveBelow] = field(default_factory=dict)
    doomed: list[NaiveBelow] = field(default_factory=list)
    """Parts that were found broken, and are pinned by others still."""
    recent: list[NaiveBelow] = field(default_factory=list)
    """Parts that can be found, the least recently used first."""
    num_lost: int = 0
    spills: list[Key] = field(default_factory=list)
    """What is to be copied to the next tier, in the order in which it arrived."""
    is_behind: bool = False
    """Whether what leads here is: to it, nothing is copied before a transfer has ended."""
    is_shared: bool = False
    """Whether it is one of the views of a store, each of which has the same parts: what is found broken stays there."""

    def view(self) -> NaiveTier:
        """Return the same parts as another engine sees them."""
        assert self.is_shared
        return NaiveTier(self.num_bytes, self.sizes, self.here, self.coming, self.doomed, self.recent, is_shared=True)

    def size(self, part: NaiveBelow) -> int:
        return self.sizes[part.key[0]]

    def empty(self) -> int:
        """Return the bytes in which nothing is, or comes."""
        taken = [*self.here.values(), *self.coming.values(), *self.doomed]
        return self.num_bytes - sum(map(self.size, taken))

    def idle(self) -> list[NaiveBelow]:
        """Return the parts that can be evicted, the next one first."""
        return [part for part in self.recent if not part.pins]

    def place(self, key: Key) -> NaiveBelow | None:
        """Make room for a part that comes; None if it does not fit."""
        part = NaiveBelow(key)
        if self.size(part) > self.empty() + sum(map(self.size, self.idle())):
            return None
        while self.size(part) > self.empty():
            lost = self.idle()[0]
            self.recent.remove(lost)
            del self.here[lost.key]
            self.num_lost += 1
        self.coming[key] = part
        return part

    def num_parts(self, group: int) -> tuple[int, int]:
        """Return the parts of a group that are in use, and those that are not."""
        pinned = [part for part in self.here.values() if part.pins]
        used = [*pinned, *self.coming.values(), *self.doomed]
        return sum(part.key[0] == group for part in used), sum(part.key[0] == group for part in self.idle())

    def use(self, keys: list[Key]) -> None:
        """Parts are the most recent now, the first of them the least so."""
        for key in keys:
            part = self.here.get(key)
            if part is not None:
                self.recent.remove(part)
                self.recent.append(part)

    def unpin(self, parts: list[NaiveBelow]) -> None:
        for part in parts:
            part.pins -= 1
            if not part.pins and part in self.doomed:
                self.doomed.remove(part)


@dataclass
class NaiveTieredGroups(NaiveGroups):
    """`below`: the tiers, the fastest first."""

    below: list[NaiveTier] = field(default_factory=list)
    num_moving: int = 0
    """Stores and spills under way."""
    num_refused: int = 0
    wanted: list[Key] = field(default_factory=list)
    """What is to be stored, in the order in which that became so."""
    wanted_first: list[Key] = field(default_factory=list)
    """The same of preempted requests, which is stored before that."""
    fresh: list[NaivePart] = field(default_factory=list)
    """Parts that became findable since `note` was called."""
    swaps_states: bool = True
    """Whether states of preempted requests are stored."""
    blocks: tuple[int, int, int] = (1, 0, 0)
    """The bytes of a block, and how many blocks are a sixteenth of the device and are carried in 10 ms."""
    num_idle: int = 0
    """Bytes that stores hold and that nothing used when these began."""
    swaps: bool = True
    """Whether what only a preempted request can find is stored."""
    first_private: int = 1000
    """Tokens from here on are of one request, and only it can find pages with them."""

    # What is stored ---------------------------------------------------------------------------------------

    def is_whole(self, group: int) -> bool:
        return self.groups[group][0].kind in ("full", "latent")

    def is_stored_whole(self, group: int) -> bool:
        """Return whether every page of a group is stored: states after pages, where those in between are kept."""
        layer, _ = self.groups[group]
        return self.is_whole(group) or (layer.kind == "state" and is_bounded(layer) and self.keeps_all)

    def in_order(self) -> list[int]:
        """Return the groups in the order in which they are used."""
        return sorted(range(len(self.groups)), key=self.is_whole)

    def is_private(self, tokens: Sequence[int]) -> bool:
        """Return whether only one request can find a page that follows `tokens`."""
        return max(tokens, default=0) >= self.first_private

    def publish(self, part: NaivePart, name: Name) -> None:
        super().publish(part, name)
        self.fresh.append(part)

    def open(
        self, tokens: list[int], salt: str | None, length: int, num_new: int, *, is_end: bool = False
    ) -> NaiveSequence | None:
        """Do the same; where others can go on as well, the tails of windows are to be stored."""
        sequence = super().open(tokens, salt, length, num_new, is_end=is_end)
        if sequence is not None and not self.is_private(tokens[: length * self.page_size]):
            for group, (layer, _) in enumerate(self.groups):
                if is_bounded(layer):
                    pages = sorted(self.needed(layer, length * self.page_size))
                    self.wanted += [(group, self.name(tokens, salt, page)) for page in pages]
        return sequence

    def note(
        self, sequence: NaiveSequence, *, is_end: bool, is_prompt: bool = False, num_known: int | None = None
    ) -> None:
        """Something was done with a sequence: what of it is to be stored now. `num_known`: of its tokens; None: all.

        `is_prompt`: of `tail`.
        """
        fresh, self.fresh = self.fresh, []
        most = (sequence.num_tokens if num_known is None else num_known) // self.page_size * self.page_size
        keys = [(part.group, part.name) for part in fresh if part.name is not None and len(part.name[1]) <= most]
        first, sequence.num_noted = sequence.num_noted // self.page_size, sequence.num_tokens
        for group, (layer, _) in enumerate(self.groups):
            if self.is_stored_whole(group) and self.is_aligned(layer):
                # All pages, as others may have a state after one of them when its turn comes.
                pages = range(first, min(most, sequence.num_tokens) // self.page_size)
                self.wanted += [(group, self.name(sequence.tokens, sequence.salt, page)) for page in pages]
            elif self.is_stored_whole(group):
                self.wanted += [key for key in keys if key[0] == group]
        num_tokens = sequence.num_tokens // self.page_size * self.page_size
        for group, (layer, _) in enumerate(self.groups if is_end and num_tokens <= most else ()):
            tail = self.tail(layer, sequence.num_tokens, is_prompt=is_prompt) if is_bounded(layer) else ()
            self.wanted += [(group, self.name(sequence.tokens, sequence.salt, page)) for page in sorted(tail)]
        self.wanted += [key for key in keys if has_state(self.groups[key[0]][0])]

    def preempt(self, sequence: NaiveSequence, num_known: int) -> None:
        """Close a sequence that may come back, of which others know `num_known` tokens."""
        full_tokens = sequence.num_tokens // self.page_size * self.page_size
        known = num_known // self.page_size * self.page_size
        NaiveGroups.keep_tails(self, sequence)
        self.note(sequence, is_end=True, num_known=num_known)
        is_swapped = self.swaps and full_tokens > known and (self.swaps_states or not self.states_at(sequence))
        if is_swapped:
            self.keep_states(sequence)
        self.close(sequence)
        for group, (layer, _) in enumerate(self.groups if is_swapped else ()):
            pages = sorted(self.needed(layer, full_tokens))
            if self.is_whole(group):
                pages = [page for page in pages if page * self.page_size >= known]
            self.wanted_first += [(group, self.name(sequence.tokens, sequence.salt, page)) for page in pages]

    def states_at(self, sequence: NaiveSequence) -> dict[int, Name]:
        """Return the groups of states, with the name of the last full page of `sequence`."""
        name = self.name(sequence.tokens, sequence.salt, sequence.num_tokens // self.page_size - 1)
        return {group: name for group, (layer, _) in enumerate(self.groups) if has_state(layer)}

    def keep_states(self, sequence: NaiveSequence) -> None:
        """What a sequence has computed stands for a snapshot at its last full page, if there is none."""
        states = self.states_at(sequence)
        if any((group, name) in self.copies for group, name in states.items()):
            return
        for group, name in states.items():
            part = sequence.states.pop(group)
            NaiveGroups.publish(self, part, name)
            sequence.parts[group][sequence.num_tokens // self.page_size - 1] = part

    def resume(self, sequence: NaiveSequence) -> None:
        """The request of `sequence` runs again: what was kept of its state when it was preempted is of no use."""
        for key in self.states_at(sequence).items():
            for part in self.copies.get(key, []).copy():
                part.is_kept = False
                if part.refs == 0:
                    if part in self.released:
                        self.released.remove(part)
                    self.drop(part)
            self.wanted = [each for each in self.wanted if each != key]
            self.wanted_first = [each for each in self.wanted_first if each != key]
            for tier in self.below:
                self.doom(tier, key)

    def doom(self, tier: NaiveTier, key: Key) -> None:
        """Drop a part below; one that moves is dropped when that ends."""
        if (part := tier.here.pop(key, None)) is not None:
            tier.recent.remove(part)
            if part.pins:
                tier.doomed.append(part)
        if (part := tier.coming.pop(key, None)) is not None:
            tier.doomed.append(part)

    def end_private(self, tokens: list[int], salt: str | None) -> None:
        """The request of `tokens` has ended: drop what only it could find."""

        def is_gone(key: Key) -> bool:
            _, (tenant, of_page) = key
            return tenant == salt and self.is_private(of_page) and of_page == tuple(tokens[: len(of_page)])

        self.wanted_first = [key for key in self.wanted_first if not is_gone(key)]
        if not self.swaps:
            return
        tier = self.below[0]
        for key in [key for key in (*tier.here, *tier.coming) if is_gone(key)]:
            self.doom(tier, key)

    def idle_limit(self) -> int:
        """Return the bytes of a store, and of all that stores may hold of what nothing uses.

        A sixteenth of the device, but a quarter of what is unused, stores' share included, at most; or what is carried
        in 10 ms; or the largest part.
        """
        block_bytes, share, in_time = self.blocks
        unused = (self.free_bytes() + self.num_idle) // block_bytes
        return max(max(min(share, unused // 4), in_time) * block_bytes, *(size for _, size in self.groups))

    def plan_store(self, limit: int) -> list[tuple[NaivePart, NaiveBelow]]:
        """Return what is stored now: wanted parts that are not in the first tier, until `limit` bytes are reached."""
        chosen: list[tuple[NaivePart, NaiveBelow]] = []
        idle_limit = self.idle_limit()
        tier, room = self.below[0], min(limit, idle_limit)
        while (wanted := self.wanted_first or self.wanted) and not tier.is_behind:
            key = wanted[0]
            if key in self.copies and key not in tier.here and key not in tier.coming:
                part = self.copies[key][0]
                if room <= 0:
                    tier.is_behind = True
                    break
                if part.refs == 0 and self.bytes_of(part) > min(self.free_bytes(), idle_limit - self.num_idle):
                    break
                below = tier.place(key)
                if below is None:
                    if self.is_moving(chosen) and self.bytes_of(part) <= tier.num_bytes:
                        tier.is_behind = True  # there may be room when that has ended
                        break
                    self.num_refused += 1
                else:
                    if part.refs == 0:
                        if part.is_passed:
                            self.released.remove(part)
                        self.num_idle += self.bytes_of(part)
                        below.was_idle = True
                    part.stores += 1
                    chosen.append((part, below))
                    room -= self.bytes_of(part)
            wanted.pop(0)
        self.num_moving += bool(chosen)
        return chosen

    def is_moving(self, chosen: list[tuple[NaivePart, NaiveBelow]]) -> bool:
        """Return whether parts are on their way through the first of several tiers."""
        return len(self.below) > 1 and bool(chosen or self.num_moving)

    def end_store(self, chosen: list[tuple[NaivePart, NaiveBelow]], *, is_stored: bool) -> None:
        """End a store: its parts can be found from now on, and are used with all that is before them; or are not."""
        self.num_idle -= sum(self.bytes_of(part) for part, below in chosen if below.was_idle)
        self.arrive(self.below[0], [below for _, below in chosen], is_stored=is_stored)
        for part, _ in reversed(chosen):
            part.stores -= 1
            if part.refs == 0 and part not in self.released:
                if part.is_kept:
                    self.released.append(part)
                else:
                    self.drop(part)

    def arrive(self, tier: NaiveTier, parts: list[NaiveBelow], *, is_stored: bool) -> None:
        """End what brought parts to a tier."""
        self.num_moving -= 1
        self.end_transfer()
        dropped = [below for below in parts if below in tier.doomed]
        tier.doomed[:] = [below for below in tier.doomed if below not in dropped]
        parts = [below for below in parts if below not in dropped]
        for below in parts:
            del tier.coming[below.key]
        if not is_stored:
            return
        tier.here |= {below.key: below for below in parts}
        for group in self.in_order():
            tier.recent += [below for below in reversed(parts) if below.key[0] == group]
        keys = [below.key for below in parts if self.is_whole(below.key[0])]
        for group in self.in_order():
            for salt, tokens in [name for of_group, name in keys if of_group == group]:
                ends = range(len(tokens), 0, -self.page_size)
                tier.use([(group, (salt, tokens[:end])) for end in ends])
        known = [below.key for below in parts if not self.is_private(below.key[1][1])]
        for group in range(len(self.groups)):
            tier.spills += [key for key in known if key[0] == group and tier is not self.below[-1]]

    def end_transfer(self) -> None:
        for tier in self.below:
            tier.is_behind = False

    def plan_spill(self, number: int, limit: int) -> list[tuple[NaiveBelow, NaiveBelow]]:
        """Return what is copied from tier `number` to the next, until `limit` bytes are reached."""
        chosen: list[tuple[NaiveBelow, NaiveBelow]] = []
        upper, lower, room = self.below[number], self.below[number + 1], limit
        while upper.spills and not lower.is_behind:
            key = upper.spills[0]
            if key in upper.here and key not in lower.here and key not in lower.coming:
                if room <= 0:
                    lower.is_behind = True
                    break
                target = lower.place(key)
                if target is None:
                    self.num_refused += 1
                else:
                    upper.here[key].pins += 1
                    chosen.append((upper.here[key], target))
                    room -= lower.size(target)
            upper.spills.pop(0)
        self.num_moving += bool(chosen)
        return chosen

    def end_spill(self, number: int, chosen: list[tuple[NaiveBelow, NaiveBelow]], *, is_stored: bool) -> None:
        self.arrive(self.below[number + 1], [target for _, target in chosen], is_stored=is_stored)
        self.below[number].unpin([source for source, _ in chosen])

    # What is loaded ---------------------------------------------------------------------------------------

    def hit_below(self, tokens: list[int], salt: str | None, limit: int, depth: int) -> int:
        """Return the longest prefix, in pages, of which device and `depth` tiers together have what groups need."""
        found = self.copies.keys() | {key for tier in self.below[:depth] for key in tier.here}
        for length in range(limit, 0, -1):
            last = self.name(tokens, salt, length - 1)
            if any((group, last) in found for group in range(len(self.groups))) and all(
                key in found for key in self.needs(tokens, salt, length)
            ):
                return length
        return 0

    def hit_with_coming(self, tokens: list[int], salt: str | None, limit: int) -> tuple[int, list[NaiveBelow]]:
        """Return the same for all tiers and what comes to the last, and the parts that come of what is needed."""
        last = self.below[-1]
        here, coming = last.here, last.coming
        last.here = {**here, **coming}
        length = self.hit_below(tokens, salt, limit, len(self.below))
        last.here = here
        found = self.copies.keys() | {key for tier in self.below for key in tier.here}
        needs = [key for key in self.needs(tokens, salt, length) if key not in found]
        return length, [coming[key] for key in needs]

    def needs(self, tokens: list[int], salt: str | None, length: int) -> list[Key]:
        """Return what a sequence needs after so many pages, by group, then page."""
        return [
            (group, self.name(tokens, salt, page))
            for group, (layer, _) in enumerate(self.groups)
            for page in sorted(self.needed(layer, length * self.page_size))
        ]

    def offer(self, tokens: list[int], salt: str | None, length: int, depth: int) -> list[list[NaiveBelow]]:
        """Pin, in the first `depth` tiers, what a sequence needs after so many pages and no faster tier has."""
        needs = [key for key in self.needs(tokens, salt, length) if key not in self.copies]
        parts: list[list[NaiveBelow]] = []
        for tier in self.below[:depth]:
            parts.append([tier.here[key] for key in needs if key in tier.here])
            needs = [key for key in needs if key not in tier.here]
        assert not needs
        for of_tier in parts:
            for part in of_tier:
                part.pins += 1
        return parts

    def unpin(self, parts: list[list[NaiveBelow]]) -> None:
        """End the pins of an offer: where parts are in the order of use, they stay."""
        for tier, of_tier in zip(self.below, parts, strict=False):
            tier.unpin(of_tier)

    def begin_front(
        self,
        tokens: list[int],
        salt: str | None,
        length: int,
        parts: list[list[NaiveBelow]],
        on_device: int,
        first: int,
    ) -> tuple[NaiveSequence, NaiveSequence] | None:
        """Do as `begin_load`, but compute the pages from `on_device` up to `first` meanwhile.

        Return the sequence that does, and the other; None if they do not fit. Those of `parts` that are not loaded are
        unpinned, and no longer among them.
        """
        front = self.found(tokens, salt, on_device)
        idle = [part for parts in front.parts for part in parts.values() if part.refs == part.stores == 0]
        room = self.free_bytes() - sum(map(self.bytes_of, idle))
        if room < 0 or not self.fits_from(tokens, salt, length, first, room):
            return None
        self.hold(front)
        for group, (layer, _) in enumerate(self.groups):
            if is_bounded(layer):
                self.wanted += [(group, self.name(tokens, salt, page)) for page in sorted(front.parts[group])]
        tail = self.begin_load(tokens, salt, length, first)
        assert tail is not None
        for tier, of_tier in zip(self.below, parts, strict=False):
            tier.unpin([part for part in of_tier if self.page_of(part.key) < first])
            of_tier[:] = [part for part in of_tier if self.page_of(part.key) >= first]
        return front, tail

    def page_of(self, key: Key) -> int:
        return len(key[1][1]) // self.page_size - 1

    def fits_from(self, tokens: list[int], salt: str | None, length: int, first: int, room: int) -> bool:
        """Return whether `room` bytes suffice for what a sequence needs after `length` pages, from page `first` on."""
        needs = [key for key in self.needs(tokens, salt, length) if self.page_of(key) >= first]
        held = [key for key in needs if key in self.copies and (part := self.copies[key][0]).refs + part.stores]
        return sum(self.groups[key[0]][1] for key in needs if key not in held) <= room

    def join(self, front: NaiveSequence, tail: NaiveSequence) -> None:
        """Go on after what was loaded; of the pages before, those that are not full are given up."""
        for mine, others in zip(tail.parts, front.parts, strict=True):
            for page, part in others.items():
                if part.name is None:
                    self.release(part)
                else:
                    mine[page] = part

    def begin_load(self, tokens: list[int], salt: str | None, length: int, first: int = 0) -> NaiveSequence | None:
        """Begin a sequence of which the first `length` pages are on the device or loaded; None if that does not fit.

        Pages before `first` are left out.
        """
        needs = [key for key in self.needs(tokens, salt, length) if self.page_of(key) >= first]
        found = {key: self.copies[key][0] for key in needs if key in self.copies}
        idle = sum(self.bytes_of(part) for part in found.values() if part.refs == part.stores == 0)
        if idle + sum(self.groups[key[0]][1] for key in needs if key not in found) > self.free_bytes():
            return None
        for part in found.values():
            if part in self.released:
                self.released.remove(part)
            part.refs += 1
        sequence = NaiveSequence(tokens, salt, length * self.page_size, [{} for _ in self.groups])
        for key in needs:
            part = found[key] if key in found else self.take(key[0])
            part.is_kept = part.is_kept or key not in found
            sequence.parts[key[0]][self.page_of(key)] = part
        return sequence

    def find_loaded(self, sequence: NaiveSequence, parts: list[NaiveBelow]) -> None:
        """What was loaded of a sequence, or will be when the step ends that uses it, can be found."""
        for below in parts:
            NaiveGroups.publish(self, sequence.parts[below.key[0]][self.page_of(below.key)], below.key[1])

    def end_load(
        self,
        sequence: NaiveSequence,
        length: int,
        parts: list[list[NaiveBelow]],
        num_good: int,
        *,
        is_used: bool = False,
    ) -> None:
        """End a load of `parts`, of which the first `num_good` arrived; the others are broken, and leave their tier.

        It was the last thing that the first `length` pages of `sequence` needed.

        In each group, what arrived before the first broken page can be found. What slower tiers had of it is to be
        stored in the first, unless another load found it broken. `is_used`: it can be found already.
        """
        self.end_transfer()
        number, ends = 0, [length] * len(self.groups)
        arrived: list[list[NaiveBelow]] = []
        for tier, of_tier in zip(self.below, parts, strict=False):
            arrived.append([])
            for below in of_tier:
                if number < num_good:
                    arrived[-1].append(below)
                else:
                    ends[below.key[0]] = min(ends[below.key[0]], self.page_of(below.key))
                    if tier.here.get(below.key) is below and not tier.is_shared:
                        del tier.here[below.key]
                        tier.recent.remove(below)
                        tier.doomed.append(below)
                number += 1
        for place, of_tier in enumerate(arrived):
            found = [below for below in of_tier if self.page_of(below.key) < ends[below.key[0]]]
            if not is_used:
                self.find_loaded(sequence, found)
            tier = self.below[place]
            self.wanted += [below.key for below in found if place and tier.here.get(below.key) is below]
        self.unpin(parts)
        needs = self.needs(sequence.tokens, sequence.salt, length)
        for tier in self.below:
            for group in self.in_order():
                tier.use([key for key in reversed(needs) if key[0] == group])
