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


MOST_TOUCHED = 4096
"""The number of touches that are kept before the keys are brought into order, unless an eviction needs it before."""


class KeyedTier:
    """Owner of the places [0, num_places), each empty or of one key.

    A touch only notes its keys. They are brought into order when something is evicted, so that touches of the same
    sequence in between cost nothing.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_evicted = 0
        self.num_refused = 0
        """Keys that were to be stored and found no place."""
        self._empty = list(range(num_places - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """The next to be evicted first, but for `_touched`."""
        self._touched: dict[int, Sequence[bytes]] = {}
        """Keys to make the most recent, by the identity of their sequence, in the order of the touches."""

    def __len__(self) -> int:
        """Return how many keys are stored or coming."""
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        """Return all keys, the next to be evicted first."""
        self._order()
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
        """Make those of `keys` that are here the most recent, deeper ones less so. `keys` must be a whole prefix.

        It is kept, and may only grow at its end.
        """
        touched, name = self._touched, id(keys)
        touched.pop(name, None)
        touched[name] = keys
        if len(touched) > MOST_TOUCHED:
            self._order()

    def _order(self) -> None:
        entries, move = self._entries, self._entries.move_to_end
        for keys in self._touched.values():
            for key in reversed(keys):
                if key in entries:
                    move(key)
        self._touched.clear()

    def place(
        self, keys: Iterable[bytes], protected: Container[bytes] = (), path: Sequence[bytes] | None = None
    ) -> tuple[dict[bytes, int], list[bytes]]:
        """Allocate places for the missing `keys`, in prefix order; return these, and the keys evicted for them.

        If there is not room for all, the first ones get places. Keys in `protected` are not evicted. The places are
        neither readable nor evicted until `settle`. `path`: touched afterwards; it contains `keys`.
        """
        entries, empty = self._entries, self._empty
        missing = [key for key in dict.fromkeys(keys) if key not in entries]
        evicted: list[bytes] = []
        if len(missing) > len(empty):
            evicted = self._evict(len(missing) - len(empty), protected)
            self.num_refused += max(0, len(missing) - len(empty))
            del missing[len(empty) :]
        places: dict[bytes, int] = {}
        for key in missing:
            place = places[key] = empty.pop()
            entries[key] = _Entry(place)
        if path is not None or missing:
            self.touch(missing if path is None else path)
        return places, evicted

    def settle(self, keys: Iterable[bytes], *, is_stored: bool = True) -> list[bytes]:
        """End the store of those of `keys` that are coming, and return these.

        They become readable, or their places are released.
        """
        settled = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.is_coming:
                entry.is_coming = False
                settled.append(key)
                if not is_stored:
                    self.drop(key)
        return settled

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
        self._touched.clear()
        self._empty = list(range(self.num_places - 1, -1, -1))

    def check(self) -> None:
        """Assert law L1: every place is empty or of one key."""
        places = sorted([*self._empty, *(entry.place for entry in self._entries.values())])
        assert places == list(range(self.num_places)), "L1: a place is lost or has two owners"

    def _evict(self, count: int, protected: Container[bytes]) -> list[bytes]:
        self._order()
        entries, empty = self._entries, self._empty
        evicted: list[bytes] = []
        for key, entry in entries.items():
            if not (entry.pins or entry.is_coming or key in protected):
                evicted.append(key)
                if len(evicted) == count:
                    break
        for key in evicted:
            empty.append(entries.pop(key).place)
        self.num_evicted += len(evicted)
        return evicted
