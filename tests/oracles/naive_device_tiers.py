"""Models with KV groups and tiers below them on one device, part by part: whose part goes next is looked up each time.

Each model is the naive one with tiers. What they share is a number of bytes, and a clock of releases: whatever comes to
the end of a list of released parts is the youngest of the device, and what comes to its beginning the oldest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from oracles.naive_group_tier import NaiveTieredGroups
from oracles.naive_grouped import NaivePart

__all__ = ["NaiveSharedBytes", "NaiveTieredModel"]


@dataclass
class NaiveSharedBytes:
    """`num_bytes` of a device, for `models`."""

    num_bytes: int
    models: list[NaiveTieredModel] = field(default_factory=list)
    last: int = 0
    first: int = 0

    @property
    def empty(self) -> int:
        return self.num_bytes - sum(model.held for model in self.models)

    @property
    def free(self) -> int:
        return self.empty + sum(model.evictable for model in self.models)

    def make_room(self, asker: NaiveTieredModel) -> None:
        """For one block of `asker`: those beyond their guarantees lose the oldest part, then the asker, then others."""
        while self.empty < asker.block_bytes:
            cached = [model for model in self.models if model.evictable]
            over = [model for model in cached if model.held > model.guaranteed]
            own = [asker] if asker.evictable else []
            min(over or own or cached, key=NaiveTieredModel.oldest_release).evict()


class Released(list[NaivePart]):
    """Released parts, each with the time at which it came here."""

    def __init__(self, device: NaiveSharedBytes) -> None:
        super().__init__()
        self.device = device
        self.stamps: dict[NaivePart, int] = {}

    def append(self, part: NaivePart) -> None:
        self.device.last += 1
        self.stamps[part] = self.device.last
        super().append(part)

    def __iadd__(self, parts: Any) -> Released:  # type: ignore[override,misc]
        for part in parts:
            self.append(part)
        return self

    def insert(self, place: SupportsIndex, part: NaivePart) -> None:
        assert place == 0, "what is put back goes first"
        self.device.first -= 1
        self.stamps[part] = self.device.first
        super().insert(place, part)


@dataclass
class NaiveTieredModel(NaiveTieredGroups):
    """One of them; its `empty_bytes` are what it takes of the device, below 0. `block_bytes`: those of its blocks."""

    device: NaiveSharedBytes = field(default_factory=lambda: NaiveSharedBytes(0))
    block_bytes: int = 1
    guaranteed: int = 0

    def __post_init__(self) -> None:
        self.empty_bytes = 0
        self.stamped = Released(self.device)
        self.released = self.stamped
        self.device.models.append(self)

    @property
    def held(self) -> int:
        return -self.empty_bytes

    @property
    def evictable(self) -> int:
        """Bytes of parts that nothing uses, and no store reads."""
        return sum(self.bytes_of(part) for part in self.released if not part.stores)

    def oldest_release(self) -> int:
        return self.stamped.stamps[next(part for part in self.released if not part.stores)]

    def free_bytes(self) -> int:
        """Return the bytes of the device that can be taken now, in whole blocks."""
        return self.device.free // self.block_bytes * self.block_bytes

    def take_bytes(self, num_bytes: int) -> None:
        """Take memory, block by block."""
        for _ in range(num_bytes // self.block_bytes):
            self.device.make_room(self)
            self.empty_bytes -= self.block_bytes

    def evict(self) -> None:
        """Lose the part that was released first."""
        part = next(part for part in self.released if not part.stores)
        self.released.remove(part)
        assert part.name is not None
        self.lose(part)
        self.evicted.append((part.group, part.name))
        self.empty_bytes += self.bytes_of(part)
