"""Owners of requests and sessions: their keys, and their shares of common resources."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256
from math import floor
from pathlib import Path

import msgspec

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.files import read_text
from kvarts.base.limits import MOST_COUNT, check_number

__all__ = ["ANYONE", "PARTED", "Keys", "Owner", "Shares", "check_key", "owner_of", "read_keys"]

LINE = "A line is KEY, and after it, parted by spaces, any of owner=NAME, share=NUMBER and priority."
KEPT = 0.5
"""Part of an owner's guarantee that others may not borrow while the owner does not use it."""

PARTED = "\x1f"
"""Separator between an owner and its tenant in a name. Units held by a tenant count for its owner."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """An owner of requests and sessions.

    `share`: its part of shared resources, relative to those of others. `may_prioritize`: its requests may have a
    priority other than 0. `is_admin`: it may also change the server; shares do not apply to it.

    Raises ConfigError for a share out of range.
    """

    name: str = ""
    share: float = 1.0
    may_prioritize: bool = False
    is_admin: bool = False

    def __post_init__(self) -> None:
        check_number(self.share, "share", most=MOST_COUNT, above=True)


ANYONE = Owner(may_prioritize=True)
"""The owner of everything if keys are not required."""

ADMIN = Owner(name="admin", may_prioritize=True, is_admin=True)


class Keys:
    """Owners by key. Only digests of the keys are kept.

    Raises ConfigError for a key that is empty or unprintable, and without any key.
    """

    def __init__(self, owners_by_key: Mapping[str, Owner]) -> None:
        if not owners_by_key:
            raise ConfigError("there are no keys", field="api_key")
        for key in owners_by_key:
            check_key(key)
        self._owners = [(sha256(key.encode()).digest(), owner) for key, owner in owners_by_key.items()]
        self.shares: dict[str, float] = {
            owner.name: owner.share for owner in owners_by_key.values() if not owner.is_admin
        }
        """The share of each owner, by name."""

    def find(self, key: str) -> Owner | None:
        """Return the owner of a key; None if the key is unknown.

        The running time reveals nothing about the keys: all digests are compared, each to its end.
        """
        digest = sha256(key.encode()).digest()
        found = None
        for known, owner in self._owners:
            if hmac.compare_digest(known, digest):
                found = owner
        return found

    @classmethod
    def of(
        cls, keys: Iterable[str], named: Mapping[str, Owner] | None = None, *, admin_keys: Iterable[str] = ()
    ) -> Keys:
        """Return `keys`, and those in `named` with their owners. An unnamed owner is named by its position.

        A single key belongs to the owner ``, which may give its requests a priority. `admin_keys`: keys of the
        administrator. Raise ConfigError if one of them is also an owner's key.
        """
        replace = msgspec.structs.replace
        owners = {**dict.fromkeys(keys, Owner()), **(named or {})}
        if len(owners) == 1:
            owners = {key: replace(owner, may_prioritize=True) for key, owner in owners.items()}
        else:
            owners = {
                key: owner if owner.name else replace(owner, name=f"owner-{number}")
                for number, (key, owner) in enumerate(owners.items(), 1)
            }
        for key in admin_keys:
            if key in owners:
                raise ConfigError("is the key of an owner as well", field="admin_key", hint="Make one of its own.")
            owners[key] = ADMIN
        return cls(owners)

    @property
    def has_admin(self) -> bool:
        """Whether one of the keys is an administrator's."""
        return any(owner.is_admin for _, owner in self._owners)

    @property
    def has_several_owners(self) -> bool:
        """Whether the keys belong to more than one owner, not counting administrators."""
        return len(self.shares) > 1


def check_key(key: str, field: str = "api_key") -> None:
    """Raise ConfigError for a key that is empty, or not printable ASCII without spaces."""
    if not key:
        raise ConfigError("is empty", field=field, hint="Is it a variable that was not set?")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("is not printable ASCII without spaces", field=field)


def read_keys(path: Path) -> dict[str, Owner]:
    """Return the owners in a key file, which has one key per line; an unnamed owner has an empty name.

    Empty lines and lines that begin with `#` are skipped. Raise MissingFileError, or InputError with file and line.
    """
    owners: dict[str, Owner] = {}
    for number, line in enumerate(read_text(path, hint="Check the path of the keys.").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            check_key(words[0])
            if words[0] in owners:
                raise ConfigError("this key is on another line already")
            owners[words[0]] = _owner(words[1:])
        except ConfigError as error:
            raise InputError(error.what, path=path, line=number, field=error.field, hint=LINE) from None
    if not owners:
        raise InputError("has no keys", path=path, hint=LINE)
    return owners


def _owner(words: list[str]) -> Owner:
    name, share, may_prioritize = "", 1.0, False
    for word in words:
        field, _, value = word.partition("=")
        if field == "owner" and value:
            name = value
        elif field == "share" and value:
            try:
                share = float(value)
            except ValueError:
                raise ConfigError(f"must be a number, got {value!r}", field="share") from None
        elif word == "priority":
            may_prioritize = True
        else:
            raise ConfigError(f"{word!r} is unknown")
    return Owner(name=name, share=share, may_prioritize=may_prioritize)


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
