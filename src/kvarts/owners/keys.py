"""Keys, and the owners that they identify."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from kvarts.errors import ConfigError, InputError
from kvarts.files import read_text
from kvarts.limits import MOST_COUNT, check_number

__all__ = ["ANYONE", "Keys", "Owner", "check_key", "read_keys"]

LINE = "A line is KEY, and after it, parted by spaces, any of owner=NAME, share=NUMBER and priority."


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
