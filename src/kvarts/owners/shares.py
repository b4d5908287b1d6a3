"""Shares of one resource among several owners: places, tokens, sessions, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor

from kvarts.errors import ConfigError

__all__ = ["PARTED", "Shares", "owner_of"]

KEPT = 0.5
"""Part of an owner's guarantee that others may not borrow while the owner does not use it."""

PARTED = "\x1f"
"""Separator between an owner and its tenant in a name. Units held by a tenant count for its owner."""


def owner_of(name: str) -> str:
    """Return the owner of `name`, which is an owner or a tenant of one."""
    return name.partition(PARTED)[0] if PARTED in name else name


class Shares:
    """Owner of the account of one resource of `total` units.

    An owner is guaranteed its share of the total, rounded down, and half of that is kept free for it at all times.
    Units that are not kept are lent to the first owner that asks. So an owner always finds half of its guarantee at
    once, and the rest when others return borrowed units. With a single owner, or none, all units are free to everyone.

    `shares`: relative to each other, by owner. An owner without an entry can only borrow. Amounts are whole and at
    least 0. Raises ConfigError for a negative total.
    """

    def __init__(self, total: int, shares: Mapping[str, float] | None = None, *, kept: float = KEPT) -> None:
        self._shares = dict(shares or {}) if len(shares or {}) > 1 else {}
        self._part_kept = kept
        self._guaranteed: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self.num_used = 0
        """Units held by all owners together."""
        self._num_kept_free = 0
        """Unused units kept for their owners."""
        self.total = total - 1  # any other value, so that `resize` runs
        self.resize(total)

    def resize(self, total: int) -> None:
        """Set the number of units to `total`, regardless of those held. Raise ConfigError if it is negative."""
        if total == self.total:
            return
        if total < 0:
            raise ConfigError(f"must be at least 0, got {total}", field="total")
        self.total = total
        sum_of_shares = sum(self._shares.values())
        self._guaranteed = {owner: floor(total * share / sum_of_shares) for owner, share in self._shares.items()}
        self._kept = {owner: floor(amount * self._part_kept) for owner, amount in self._guaranteed.items()}
        self._num_kept_free = sum(map(self._kept_free, self._kept))

    def used(self, name: str) -> int:
        """Return the number of units an owner holds."""
        return self._used.get(owner_of(name), 0)

    def guaranteed(self, name: str) -> int:
        """Return the number of units that an owner can have once others have returned borrowed units."""
        return self._guaranteed.get(owner_of(name), 0) if self._guaranteed else self.total

    def over(self, name: str) -> int:
        """Return the number of units an owner holds beyond its guarantee; negative if it holds fewer."""
        return self.used(name) - self.guaranteed(name)

    def room(self, name: str) -> int:
        """Return the number of units that an owner can take now; negative if more are held than exist."""
        if not self._kept:
            return self.total - self.num_used
        return self.total - self.num_used - (self._num_kept_free - self._kept_free(owner_of(name)))

    def take(self, name: str, amount: int = 1) -> bool:
        """Take `amount` units if there is room. Return whether they were taken."""
        if amount > self.room(name):
            return False
        self.force(name, amount)
        return True

    def force(self, name: str, amount: int = 1) -> None:
        """Take `amount` units regardless of room."""
        assert amount >= 0
        self._change(owner_of(name), amount)

    def give(self, name: str, amount: int = 1) -> None:
        """Return `amount` units held by the owner."""
        owner = owner_of(name)
        assert 0 <= amount <= self._used.get(owner, 0), (name, amount, self.used(name))
        self._change(owner, -amount)

    def most_over(self, names: Iterable[str]) -> str | None:
        """Return the owner in `names` that is furthest beyond its guarantee: the first to lose units.

        Ties are broken by name. None if `names` is empty.
        """
        return min(names, key=lambda name: (-self.over(name), name), default=None)

    def _change(self, owner: str, amount: int) -> None:
        before = self._used.get(owner, 0)
        used = before + amount
        if used:
            self._used[owner] = used
        else:
            self._used.pop(owner, None)
        self.num_used += amount
        if self._kept and (kept := self._kept.get(owner)) is not None:
            self._num_kept_free += max(0, kept - used) - max(0, kept - before)

    def _kept_free(self, owner: str) -> int:
        return max(0, self._kept.get(owner, 0) - self._used.get(owner, 0))
