"""A tier below the device, one page at a time: a dictionary, a list in order of recency, and counters.

Like naive.py it states the rules in the plainest way and shares no code with kvarts. A page goes by its name: the
tenant and every token up to its end.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

Name = tuple[object, tuple[object, ...]]


def follows(name: Name, before: Name) -> bool:
    """Whether `name` is `before` or comes after it in the same sequence."""
    return name[0] == before[0] and name[1][: len(before[1])] == before[1]


@dataclass(eq=False)
class Entry:
    """A place in some sequence. `state`: hole (not here, but pinned), coming, stored, or doomed."""

    name: Name
    state: str = "hole"
    pins: int = 0
    used_at: int = 0  # how many pages had arrived here by then
    is_spilled: bool = False  # copied to the next tier since then


@dataclass
class NaivePlacement:
    names: list[Name]
    new: list[Entry]
    pinned: list[Entry]
    is_open: bool = True


@dataclass
class NaiveTier:
    num_pages: int
    num_empty: int = -1
    entries: dict[Name, Entry] = field(default_factory=dict)
    recency: list[Entry] = field(default_factory=list)
    evicted: list[Name] = field(default_factory=list)
    removed: list[Name] = field(default_factory=list)
    has_refused: bool = False
    num_arrived: int = 0
    longest_wait: int = 0  # how many pages arrived between two uses of one

    def __post_init__(self) -> None:
        self.num_empty = self.num_pages

    def is_stored(self, name: Name) -> bool:
        return name in self.entries and self.entries[name].state == "stored"

    def find(self, names: list[Name], start: int) -> int:
        """Stored pages from `start` on; before it, only that the sequence is known here at all."""
        count = 0
        while start + count < len(names) and self.is_stored(names[start + count]):
            count += 1
        return count

    def has(self, name: Name) -> bool:
        """It is here, or on its way."""
        return name in self.entries and self.entries[name].state in ("stored", "coming")

    def size(self) -> int:
        return self.num_pages

    def num_cached(self) -> int:
        return sum(1 for entry in self.recency if not entry.pins)

    def pin(self, names: list[Name]) -> list[Entry]:
        entries = [self.entries.setdefault(name, Entry(name)) for name in names]
        for entry in entries:
            entry.pins += 1
        return entries

    def unpin(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.pins -= 1
            if entry.pins == 0 and entry.state == "doomed":
                self.num_empty += 1
            if entry.pins == 0 and entry.state == "hole" and self.entries.get(entry.name) is entry:
                del self.entries[entry.name]

    def touch(self, entries: list[Entry]) -> None:
        for entry in reversed(entries):
            if entry.state == "stored":
                entry.used_at = self.num_arrived
                entry.is_spilled = False
                if entry in self.recency:
                    self.recency.remove(entry)
                self.recency.append(entry)

    def take(self) -> bool:
        if not self.num_empty:
            victim = next((entry for entry in self.recency if not entry.pins), None)
            if victim is None:
                return False
            self.recency.remove(victim)
            del self.entries[victim.name]
            self.evicted.append(victim.name)
            self.removed.append(victim.name)
            return True
        self.num_empty -= 1
        return True

    def place(
        self, names: list[Name], start: int, *, deepest_first: bool = False, limit: int = 1 << 62
    ) -> NaivePlacement | None:
        """Pages `start` and on that are neither stored nor coming; what is here of the whole sequence stays.

        Where there is no room for all, the first of them, or the last if `deepest_first`.
        """
        pinned = self.pin(names)
        room = self.num_empty + self.num_cached()
        self.has_refused = limit > room and sum(1 for entry in pinned[start:] if entry.state == "hole") > room
        room = min(room, limit)
        while deepest_first and sum(1 for entry in pinned[start:] if entry.state == "hole") > room and room:
            start += 1
        new: list[Entry] = []
        last = 0
        for index, entry in enumerate(pinned):
            if index >= start and entry.state == "hole":
                if len(new) == limit or not self.take():
                    break
                entry.state = "coming"
                new.append(entry)
                last = index + 1
        self.unpin(pinned[last:])
        if not new:
            return None
        return NaivePlacement(names[:last], new, pinned[:last])

    def vacate(self, names: list[Name], count: int) -> None:
        """The last of `names` leave, `count` at most, up to one that is pinned, is followed, or is not here."""
        for name in names[::-1][:count]:
            entry = self.entries.get(name)
            if entry is None or entry.state != "stored" or entry.pins:
                return
            if any(follows(other, name) for other in self.entries if other != name):
                return
            self.recency.remove(entry)
            del self.entries[name]
            self.num_empty += 1
            self.evicted.append(name)
            self.removed.append(name)

    def note_use(self, entries: list[Entry]) -> None:
        waits = [self.num_arrived - entry.used_at for entry in entries if entry.state == "stored"]
        self.longest_wait = max([self.longest_wait, *waits])

    def num_forsaken(self) -> int:
        """Of the next evictions, how many have waited twice as long as any page that was used after all."""
        count = 0
        for entry in self.recency:
            if (self.num_arrived - entry.used_at) / 2 <= self.longest_wait:
                break
            count += not entry.pins
        return count

    def release_duplicates(self, again: list[Name], device: Container[object], num_pages: int) -> list[Name]:
        """Pages that the device has had `again` leave, the last to come first, until `num_pages` can be stored.

        What nobody has used for long is evicted before.
        """
        num_pages -= min(self.num_forsaken(), max(0, num_pages - self.num_empty))
        released = []
        while again and self.num_empty < num_pages:
            name = again.pop()
            if name in device and self.is_stored(name) and self.move_out(name):
                released.append(name)
        return released

    def move_out(self, name: Name) -> bool:
        """Release a page that the device has, unless it is pinned; later pages stay."""
        entry = self.entries[name]
        if entry.state != "stored" or entry.pins:
            return False
        self.recency.remove(entry)
        del self.entries[name]
        self.num_empty += 1
        self.removed.append(name)
        return True

    def settle(self, placement: NaivePlacement, *, is_stored: bool) -> None:
        for entry in placement.new:
            if entry.state == "coming" and is_stored:
                entry.state = "stored"
                self.num_arrived += 1
            elif entry.state == "coming":
                entry.state = "hole"
                self.num_empty += 1
        self.unpin(placement.pinned)
        if is_stored:
            self.touch(placement.pinned)

    def drop(self, name: Name) -> None:
        """It and everything after it."""
        for other in [other for other in self.entries if follows(other, name)]:
            entry = self.entries.pop(other)
            if entry.state == "stored":
                self.recency.remove(entry)
                self.removed.append(other)
                if not entry.pins:
                    self.num_empty += 1
            if entry.state in ("stored", "coming") and entry.pins:
                entry.state = "doomed"

    def lose(self, name: Name) -> None:
        """It has left every faster tier: if it is not here either, nor coming, what follows it is of no use."""
        if not self.has(name):
            self.drop(name)

    def reset(self) -> None:
        for name in list(self.entries):
            if name in self.entries:
                self.drop(name)
