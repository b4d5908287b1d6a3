"""One thing that several owners hold parts of: places, tokens, sessions, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import floor

from kvarts.errors import ConfigError

__all__ = ["PARTED", "Shares", "owner_of"]

KEPT = 0.5
"""Of what is guaranteed to an owner, the part that no other may borrow while the owner does not use it."""

PARTED = "\x1f"
"""Stands between an owner and a tenant of that owner. An owner's tenants hold what they hold in its name."""


def owner_of(name: str) -> str:
    """Return the owner that `name`, an owner or a tenant of one, belongs to."""
    return name.partition(PARTED)[0]


class Shares:
    """Owner of the account of one thing, of which there are `total` units.

    An owner is guaranteed its share of the total, rounded down, and half of that is kept free for it at any time. What
    is not kept is lent to the first owner that asks. So an owner always finds half of its guarantee at once, and the
    rest as soon as others give back what they borrowed. With a single owner, or none, everything is free to all.

    `shares`: relative to each other, by owner. An owner that is not among them can only borrow. Amounts are whole and
    at least 0. Raises ConfigError for a negative total.
    """

    def __init__(self, total: int, shares: Mapping[str, float] | None = None, *, kept: float = KEPT) -> None:
        self._shares = dict(shares or {}) if len(shares or {}) > 1 else {}
        self._part_kept = kept
        self._guaranteed: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self.num_used = 0
        """Units that all owners hold together."""
        self._num_kept_free = 0
        """Units that are kept for owners that do not use them."""
        self.total = total - 1  # any other: there is none yet
        self.resize(total)

    def resize(self, total: int) -> None:
        """Let there be `total` units from now on, whatever is held. Raise ConfigError for less than 0."""
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
        """Return how many units an owner holds."""
        return self._used.get(owner_of(name), 0)

    def guaranteed(self, name: str) -> int:
        """Return how many units an owner can have once others have given back what they borrowed."""
        return self._guaranteed.get(owner_of(name), 0) if self._guaranteed else self.total

    def over(self, name: str) -> int:
        """Return how many units an owner holds beyond its guarantee; below 0 where it holds less."""
        return self.used(name) - self.guaranteed(name)

    def room(self, name: str) -> int:
        """Return how many units an owner can take now. Below 0 where more was taken than there is."""
        return self.total - self.num_used - (self._num_kept_free - self._kept_free(owner_of(name)))

    def take(self, name: str, amount: int = 1) -> bool:
        """Take `amount` units if there is room for them. Return whether they were taken."""
        if amount > self.room(name):
            return False
        self.force(name, amount)
        return True

    def force(self, name: str, amount: int = 1) -> None:
        """Take `amount` units whether there is room or not."""
        assert amount >= 0
        self._change(owner_of(name), amount)

    def give(self, name: str, amount: int = 1) -> None:
        """Give back `amount` units, which the owner holds."""
        assert 0 <= amount <= self.used(name), (name, amount, self.used(name))
        self._change(owner_of(name), -amount)

    def most_over(self, names: Iterable[str]) -> str | None:
        """Return the owner of `names` that is furthest beyond its guarantee, from which something is taken back first.

        Among equals the first by name. None if `names` is empty.
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
        kept = self._kept.get(owner)
        if kept is not None:
            self._num_kept_free += max(0, kept - used) - max(0, kept - before)

    def _kept_free(self, owner: str) -> int:
        return max(0, self._kept.get(owner, 0) - self._used.get(owner, 0))
