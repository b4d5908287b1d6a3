"""KV groups on a device and in host memory, part by part: a dictionary for each tier, and everything is looked at.

The device is the naive cache with KV groups. Host memory has one part of a page in a group at most, by its name; those
that nothing pins are a list, the least recently used first. Of what is used together, groups that keep less come first,
then those that keep all tokens, in each the deepest page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oracles.naive_grouped import NaiveGroups, NaivePart, NaiveSequence, Name

__all__ = ["NaiveBelow", "NaiveTieredGroups"]

Key = tuple[int, Name]
"""What a part is of: its group, and its page."""


@dataclass(eq=False)
class NaiveBelow:
    """A part in host memory, or one that comes there."""

    key: Key
    pins: int = 0
    was_idle: bool = False
    """Nothing used it on the device when its store began."""


@dataclass
class NaiveTieredGroups(NaiveGroups):
    """`host_bytes`: the size of host memory."""

    host_bytes: int = 0
    here: dict[Key, NaiveBelow] = field(default_factory=dict)
    """Parts that can be found below."""
    coming: dict[Key, NaiveBelow] = field(default_factory=dict)
    doomed: list[NaiveBelow] = field(default_factory=list)
    """Parts that were found broken, and are pinned by others still."""
    recent: list[NaiveBelow] = field(default_factory=list)
    """Parts that can be found below and are not pinned, the least recently used first."""
    num_lost: int = 0
    num_refused: int = 0
    wanted: list[Key] = field(default_factory=list)
    """What is to be stored, in the order in which that became so."""
    fresh: list[NaivePart] = field(default_factory=list)
    """Parts that became findable since `note` was called."""
    is_behind: bool = False
    idle_room: int = 0
    """Bytes that stores may still hold of what nothing uses."""

    def size(self, part: NaiveBelow) -> int:
        return self.groups[part.key[0]][1]

    def host_empty(self) -> int:
        """Return the bytes of host memory in which nothing is, or comes."""
        taken = [*self.here.values(), *self.coming.values(), *self.doomed]
        return self.host_bytes - sum(map(self.size, taken))

    def num_host_parts(self, group: int) -> tuple[int, int]:
        """Return the parts of a group below that are in use, and those that are not."""
        pinned = [part for part in self.here.values() if part.pins]
        used = [*pinned, *self.coming.values(), *self.doomed]
        return sum(part.key[0] == group for part in used), sum(part.key[0] == group for part in self.recent)

    # What is stored ---------------------------------------------------------------------------------------

    def is_whole(self, group: int) -> bool:
        return self.groups[group][0].kind in ("full", "latent")

    def in_order(self) -> list[int]:
        """Return the groups in the order in which they are used."""
        return sorted(range(len(self.groups)), key=self.is_whole)

    def publish(self, part: NaivePart, name: Name) -> None:
        super().publish(part, name)
        self.fresh.append(part)

    def open(
        self, tokens: list[int], salt: str | None, length: int, num_new: int, *, is_end: bool = False
    ) -> NaiveSequence | None:
        """Do the same; where others went on as well, the tails of windows are to be stored."""
        sequence = super().open(tokens, salt, length, num_new, is_end=is_end)
        if sequence is not None:
            for group, (layer, _) in enumerate(self.groups):
                if layer.kind in ("window", "chunk"):
                    pages = sorted(self.needed(layer, length * self.page_size))
                    self.wanted += [(group, self.name(tokens, salt, page)) for page in pages]
        return sequence

    def note(self, sequence: NaiveSequence, *, is_end: bool, num_known: int | None = None) -> None:
        """Something was done with a sequence: what of it is to be stored now. `num_known`: of its tokens; None: all."""
        fresh, self.fresh = self.fresh, []
        most = (sequence.num_tokens if num_known is None else num_known) // self.page_size * self.page_size
        keys = [(part.group, part.name) for part in fresh if part.name is not None and len(part.name[1]) <= most]
        for group in range(len(self.groups)):
            if self.is_whole(group):
                self.wanted += [key for key in keys if key[0] == group]
        num_tokens = sequence.num_tokens // self.page_size * self.page_size
        for group, (layer, _) in enumerate(self.groups if is_end and num_tokens <= most else ()):
            for page in sorted(self.needed(layer, num_tokens)) if layer.kind in ("window", "chunk") else ():
                held = sequence.parts[group].get(page)
                if held is not None and held.name is not None:
                    self.wanted.append((group, held.name))
        self.wanted += [key for key in keys if self.groups[key[0]][0].kind == "state"]

    def plan_store(self, limit: int) -> list[tuple[NaivePart, NaiveBelow]]:
        """Return what is stored now: wanted parts that are nowhere below, until `limit` bytes are reached."""
        chosen: list[tuple[NaivePart, NaiveBelow]] = []
        room = limit
        while self.wanted and not self.is_behind:
            key = self.wanted[0]
            if key in self.copies and key not in self.here and key not in self.coming:
                part = self.copies[key][0]
                if room <= 0:
                    self.is_behind = True
                    break
                if part.refs == 0 and self.bytes_of(part) > min(self.free_bytes(), self.idle_room):
                    break
                below = NaiveBelow(key)
                if self.size(below) > self.host_empty() + sum(map(self.size, self.recent)):
                    self.num_refused += 1
                else:
                    while self.size(below) > self.host_empty():
                        del self.here[self.recent.pop(0).key]
                        self.num_lost += 1
                    self.coming[key] = below
                    if part.refs == 0:
                        if part.is_passed:
                            self.released.remove(part)
                        self.idle_room -= self.bytes_of(part)
                        below.was_idle = True
                    part.stores += 1
                    chosen.append((part, below))
                    room -= self.bytes_of(part)
            self.wanted.pop(0)
        return chosen

    def end_store(self, chosen: list[tuple[NaivePart, NaiveBelow]], *, is_stored: bool) -> None:
        """End a store: its parts can be found from now on, and are used with all that is before them; or are not."""
        self.is_behind = False
        for _, below in chosen:
            del self.coming[below.key]
            self.idle_room += self.groups[below.key[0]][1] * below.was_idle
        if is_stored:
            self.here |= {below.key: below for _, below in chosen}
            for group in self.in_order():
                self.recent += [below for _, below in reversed(chosen) if below.key[0] == group]
            keys = [below.key for _, below in chosen if self.is_whole(below.key[0])]
            for group in self.in_order():
                for salt, tokens in [name for of_group, name in keys if of_group == group]:
                    ends = range(len(tokens), 0, -self.page_size)
                    self.use([(group, (salt, tokens[:end])) for end in ends])
        for part, _ in reversed(chosen):
            part.stores -= 1
            if part.refs == 0 and part not in self.released:
                if part.is_kept:
                    self.released.append(part)
                else:
                    self.drop(part)

    def use(self, keys: list[Key]) -> None:
        """Parts below are the most recent now, the first of them the least so."""
        for key in keys:
            part = self.here.get(key)
            if part is not None and part in self.recent:
                self.recent.remove(part)
                self.recent.append(part)

    # What is loaded ---------------------------------------------------------------------------------------

    def hit_below(self, tokens: list[int], salt: str | None, limit: int) -> int:
        """Return the longest prefix, in pages, of which device and host memory together have what every group needs."""
        for length in range(limit, 0, -1):
            last = self.name(tokens, salt, length - 1)
            if any(
                (group, last) in self.copies or (group, last) in self.here for group in range(len(self.groups))
            ) and all(key in self.copies or key in self.here for key in self.needs(tokens, salt, length)):
                return length
        return 0

    def needs(self, tokens: list[int], salt: str | None, length: int) -> list[Key]:
        """Return what a sequence needs after so many pages, by group, then page."""
        return [
            (group, self.name(tokens, salt, page))
            for group, (layer, _) in enumerate(self.groups)
            for page in sorted(self.needed(layer, length * self.page_size))
        ]

    def offer(self, tokens: list[int], salt: str | None, length: int) -> list[NaiveBelow]:
        """Pin what a sequence needs after so many pages and the device lacks."""
        parts = [self.here[key] for key in self.needs(tokens, salt, length) if key not in self.copies]
        for part in parts:
            if not part.pins:
                self.recent.remove(part)
            part.pins += 1
        return parts

    def unpin(self, parts: list[NaiveBelow]) -> None:
        """End a pin of parts, which are in the order of `needs`."""
        for group in self.in_order():
            for part in reversed([part for part in parts if part.key[0] == group]):
                part.pins -= 1
                if not part.pins and part in self.doomed:
                    self.doomed.remove(part)
                elif not part.pins and self.here.get(part.key) is part:
                    self.recent.append(part)

    def begin_front(
        self, tokens: list[int], salt: str | None, length: int, parts: list[NaiveBelow], on_device: int, first: int
    ) -> tuple[NaiveSequence, NaiveSequence] | None:
        """Do as `begin_load`, but compute the pages from `on_device` up to `first` meanwhile.

        Return the sequence that does, and the other; None if they do not fit. Of `parts`, those that are not loaded are
        unpinned.
        """
        front = self.found(tokens, salt, on_device)
        idle = [part for parts in front.parts for part in parts.values() if part.refs == part.stores == 0]
        room = self.free_bytes() - sum(map(self.bytes_of, idle))
        if room < 0 or not self.fits_from(tokens, salt, length, first, room):
            return None
        self.hold(front)
        for group, (layer, _) in enumerate(self.groups):
            if layer.kind in ("window", "chunk"):
                self.wanted += [(group, self.name(tokens, salt, page)) for page in sorted(front.parts[group])]
        tail = self.begin_load(tokens, salt, length, first)
        assert tail is not None
        self.unpin([part for part in parts if self.page_of(part.key) < first])
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

    def end_load(self, sequence: NaiveSequence, parts: list[NaiveBelow], num_good: int) -> None:
        """End a load of `parts`, of which the first `num_good` arrived; the others are broken, and leave the tier."""
        self.is_behind = False
        length = sequence.num_tokens // self.page_size
        for number, below in enumerate(parts):
            if number < num_good:
                part = sequence.parts[below.key[0]][self.page_of(below.key)]
                NaiveGroups.publish(self, part, below.key[1])
            elif self.here.get(below.key) is below:
                del self.here[below.key]
                self.doomed.append(below)
        self.unpin(parts)
        needs = self.needs(sequence.tokens, sequence.salt, length)
        for group in self.in_order():
            self.use([key for key in reversed(needs) if key[0] == group])
