"""A tier of places addressed by opaque keys: those of another engine, without their tokens.

The keys of a sequence are given in the order of its prefix, and an operation on a prefix makes all of it recent, the
deepest key least. So the next evicted key is the deepest of the least recently used prefix, and the rest of a sequence
is always a prefix of it. Keys that are pinned or coming are skipped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import IntEnum

__all__ = ["KeyState", "KeyedTier"]


class KeyState(IntEnum):
    """Whether a key is in a tier."""

    MISSING = 0
    COMING = 1
    """It has a place, and its store has not ended."""
    STORED = 2


class _Entry:
    __slots__ = ("is_coming", "pins", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.pins = 0
        self.is_coming = True


class KeyedTier:
    """Owner of the places [0, num_places), each empty or of one key."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_evicted = 0
        self.num_refused = 0
        """Keys that were to be stored and found no place."""
        self._empty = list(range(num_places - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """The next to be evicted first."""

    def __len__(self) -> int:
        """Return how many keys are stored or coming."""
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        """Return all keys, the next to be evicted first."""
        return iter(self._entries)

    @property
    def num_used(self) -> int:
        """Places of keys that are pinned or coming. Takes time linear in the number of keys."""
        return sum(1 for entry in self._entries.values() if entry.pins or entry.is_coming)

    def state(self, key: bytes) -> KeyState:
        """Return whether `key` is here, without changing its recency."""
        entry = self._entries.get(key)
        if entry is None:
            return KeyState.MISSING
        return KeyState.COMING if entry.is_coming else KeyState.STORED

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make those of `keys` that are here the most recent, deeper ones less so. `keys` must be a whole prefix."""
        entries = self._entries
        for key in reversed(keys):
            if key in entries:
                entries.move_to_end(key)

    def place(self, keys: Iterable[bytes], protected: Container[bytes] = ()) -> tuple[dict[bytes, int], list[bytes]]:
        """Allocate places for the missing `keys`, in prefix order; return these, and the keys evicted for them.

        If there is not room for all, the first ones get places. Keys in `protected` are not evicted. The places are
        neither readable nor evicted until `settle`.
        """
        entries, empty = self._entries, self._empty
        missing = [key for key in dict.fromkeys(keys) if key not in entries]
        evicted = self._evict(len(missing) - len(empty), protected)
        self.num_refused += max(0, len(missing) - len(empty))
        placed = missing[: len(empty)]
        places: dict[bytes, int] = {}
        for key in placed:
            entry = entries[key] = _Entry(empty.pop())
            places[key] = entry.place
        self.touch(placed)
        return places, evicted

    def settle(self, keys: Iterable[bytes], *, is_stored: bool = True) -> None:
        """End the store of `keys` that are coming: they become readable, or their places are released."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.is_coming:
                continue
            entry.is_coming = False
            if not is_stored:
                self.drop(key)

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """Keep `keys`, which must all be stored, until `unpin`; return their places."""
        places = []
        for key in keys:
            entry = self._entries[key]
            assert not entry.is_coming, "a key that is coming cannot be read"
            entry.pins += 1
            places.append(entry.place)
        return places

    def unpin(self, keys: Iterable[bytes]) -> None:
        """End one pin of each of `keys`."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                assert entry.pins > 0, "a key was unpinned more often than it was pinned"
                entry.pins -= 1

    def drop(self, key: bytes) -> None:
        """Drop `key`, which must not be pinned."""
        entry = self._entries.pop(key)
        assert not entry.pins, "a key is pinned and cannot go"
        self._empty.append(entry.place)

    def reset(self) -> None:
        """Drop all keys. Their places must not be read or written any more."""
        self._entries.clear()
        self._empty = list(range(self.num_places - 1, -1, -1))

    def check(self) -> None:
        """Assert law L1: every place is empty or of one key."""
        places = sorted([*self._empty, *(entry.place for entry in self._entries.values())])
        assert places == list(range(self.num_places)), "L1: a place is lost or has two owners"

    def _evict(self, count: int, protected: Container[bytes]) -> list[bytes]:
        evicted: list[bytes] = []
        if count <= 0:
            return evicted
        for key, entry in self._entries.items():
            if len(evicted) == count:
                break
            if not entry.pins and not entry.is_coming and key not in protected:
                evicted.append(key)
        for key in evicted:
            self.drop(key)
        self.num_evicted += len(evicted)
        return evicted
