"""Which parts of pages are stored below a device with KV groups, and when.

Both policies store what TieredParts says is worth it: every page in groups that keep all tokens, but of windows and
chunks only what another sequence can go on from, the tails of prompts and of requests that ended. What lies between is
seen by no hit that a tail does not serve nearly as well, and would be most of the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvarts.kv.parts import Part
from kvarts.kv.tiered_parts import TieredParts

__all__ = ["EagerParts", "LazyParts", "PartPolicy"]


class PartPolicy(Protocol):
    """Chooses parts to store. Promises: what it has yielded last is its to yield again until `passed` is called."""

    goes_first: bool
    """Whether the device evicts next what was stored, rather than last."""

    def choose(self) -> Iterator[Part]:
        """Yield parts to store, each of which can be found on the device, and which were not stored before."""

    def passed(self, part: Part) -> None:
        """Take note that a part that was yielded is stored, or need not be, or finds no room."""

    @property
    def has_work(self) -> bool:
        """Whether `choose` would yield something, whatever becomes of the device."""


class EagerParts:
    """Parts are stored in the step after they became complete."""

    goes_first = False

    def __init__(self, cache: TieredParts) -> None:
        self._wanted: deque[Part] = deque()
        cache.on_complete = self._wanted.append

    def choose(self) -> Iterator[Part]:
        """Yield what is wanted, in the order in which it became so."""
        wanted = self._wanted
        while wanted:
            part = wanted[0]
            if part.name is not None and part.is_wanted and part in part.name.copies[part.group]:
                yield part
            else:
                self.passed(part)

    def passed(self, part: Part) -> None:
        """Want it no more."""
        assert self._wanted[0] is part
        self._wanted.popleft()
        part.is_wanted = False

    @property
    def has_work(self) -> bool:
        """Whether something is wanted."""
        return bool(self._wanted)


class LazyParts:
    """Cached parts are stored when they come near eviction, so that the next `target_bytes` taken lose nothing."""

    goes_first = True

    def __init__(self, cache: TieredParts, target_bytes: int) -> None:
        self._cache = cache
        self._target_bytes = target_bytes

    def choose(self) -> Iterator[Part]:
        """Yield the parts nearest to eviction that are nowhere below."""
        num_covered = self._cache.empty_bytes
        chosen: list[Part] = []
        for part in self._cache.free_order:
            if num_covered >= self._target_bytes:
                break
            num_covered += self._cache.groups[part.group].part_bytes
            if part.is_wanted:
                chosen.append(part)
        yield from chosen

    def passed(self, part: Part) -> None:
        """Do not store it again while the device has it."""
        part.is_wanted = False

    @property
    def has_work(self) -> bool:
        """False: what is chosen depends on the device alone."""
        return False
