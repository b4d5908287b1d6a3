"""Routes, the access that each requires, and the checks of a request before its body is read."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvarts.openai_api.errors import ApiError
from kvarts.openai_api.http import HttpRequest
from kvarts.owners import ANYONE, Keys, Owner

__all__ = ["Access", "Guard", "Handler", "Route"]

Handler = Callable[[Any], Awaitable[None]]
SMALL_BYTES = 64 * 1024
"""Size limit of the body of a request that controls the server."""


class Access(Enum):
    """Access that a route requires if keys are configured."""

    OPEN = "open"
    """No key: monitoring systems do not hold one."""
    KEY = "key"
    """A key, of any owner."""
    ADMIN = "admin"
    """The key of an administrator."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path; a path that ends in `/` is followed by one name.

    `max_body_bytes`: limit of its requests' bodies; None: the limit of the server. `generates`: counted, recorded, and
    subject to failures on purpose.
    """

    method: str
    path: str
    handler: Handler
    access: Access
    max_body_bytes: int | None = SMALL_BYTES
    generates: bool = False


class Guard:
    """Finds the owner of a request from its head alone, or refuses the request.

    `keys`: the accepted keys; None: no key is required. Without a key, a web page of another origin is refused unless
    its origin is in `origins`. A host name that such a page may have made up for this server is refused as well:
    `hosts` are the accepted names in addition to addresses and names without a dot; None: any name.
    """

    def __init__(self, keys: Keys | None, *, origins: Sequence[str] = (), hosts: Sequence[str] | None = ()) -> None:
        self.keys = keys
        self._origins = frozenset(origins)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._own_host = ""
        """The last host name that was accepted: most requests have the same."""

    def owner_of(self, request: HttpRequest, access: Access) -> Owner:
        """Return the owner of a request. Raise ApiError if the request lacks this `access`."""
        if access is Access.OPEN:
            return ANYONE
        keys = self.keys
        if keys is not None and (access is Access.ADMIN or keys.shares):
            scheme, _, key = (request.header("authorization") or "").partition(" ")
            if scheme.lower() != "bearer":
                key = request.header("x-api-key") or ""  # the header of Anthropic's clients
            found = keys.find(key.strip())
            if found is None:
                raise ApiError(401, "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
            if access is Access.ADMIN and not found.is_admin:
                hint = "" if keys.has_admin else ": start the server with --admin-key-file"
                raise ApiError(403, f"{request.path} needs the key of an administrator{hint}")
            return found
        self._check_page(request)
        return ANYONE

    def shares_with(self, origin: str | None) -> bool:
        """Return whether pages of `origin`, which is not the server's, may read answers."""
        return origin in self._origins

    def _check_page(self, request: HttpRequest) -> None:
        """Raise ApiError for a request from a web page of another origin, which only its headers reveal."""
        host = (request.header("host") or "").lower()
        if self._hosts is not None and host and host != self._own_host:
            if not self._is_own(host):
                raise ApiError(403, f"{host!r} is not a name of this server: --allow-host makes it one")
            self._own_host = host
        origin = request.header("origin")
        if origin is not None and origin not in self._origins and urlsplit(origin).netloc.lower() != host:
            raise ApiError(403, f"pages of {origin!r} may ask for nothing here: --allow-origin lets them")

    def _is_own(self, host: str) -> bool:
        """Return whether `host` is a name that no foreign page can have resolved to this server."""
        assert self._hosts is not None
        name = host.removeprefix("[").partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if "." not in name or name.endswith(".localhost") or name in self._hosts:
            return True
        return _is_address(name)


@lru_cache(16)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
