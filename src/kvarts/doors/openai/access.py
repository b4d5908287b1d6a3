"""Access of clients: routes and what each requires, the checks of a request before its body is read, the access log."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from time import monotonic, time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvarts.base.errors import OutputError
from kvarts.base.files import shown
from kvarts.base.growing import GrowingFile
from kvarts.base.tenants import ANYONE, Keys, Owner
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.http import HttpRequest

__all__ = ["FLUSH_S", "Access", "AccessLog", "Guard", "Handler", "LoggedRequest", "Route"]

FLUSH_S = 0.2
MOST_WAITING = 1 << 16
MAX_CHARS = 256


class LoggedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. `status`: 0 without an answer. `ms`: from the head of the request to the end of the answer.

    `is_whole`: false for an answer that was cut off. Queries, bodies and keys are not logged.
    """

    time: float
    method: str
    path: str
    status: int
    ms: float
    id: str
    owner: str = ""
    client: str = ""
    is_whole: bool = True


class AccessLog:
    """Appends to the file at `path`, at most FLUSH_S late. For one event loop.

    After an error of the file, `say` receives the reason, nothing more is logged, and `close` raises the error. Raises
    OutputError if the file cannot be opened.
    """

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        self._path = path
        self._say = say
        self._encoder = msgspec.json.Encoder()
        self._waiting = bytearray()
        self._flushing: asyncio.TimerHandle | None = None
        self._error: OutputError | None = None
        self._file: GrowingFile | None = GrowingFile(path, keeps=True)

    def add(self, method: str, path: str, status: int, started_s: float, request_id: str, *, owner: str,
            client: str, is_whole: bool) -> None:  # fmt: skip
        """Log a request. `started_s`: on the monotonic clock."""
        if self._file is None:
            return
        ms = round(1e3 * (monotonic() - started_s), 3)
        line = LoggedRequest(
            round(time(), 3), method[:MAX_CHARS], path[:MAX_CHARS], status, ms, request_id, owner, client, is_whole
        )
        self._waiting += self._encoder.encode(line)
        self._waiting += b"\n"
        if len(self._waiting) >= MOST_WAITING:
            self.flush()
        elif self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        file, text = self._file, bytes(self._waiting)
        self._waiting.clear()
        if file is None or not text:
            return
        try:
            file.write(text)
        except OutputError as error:
            self._error = error
            self._say(f"the access log {shown(self._path)} ends: {error.what}")
            self._close(file)

    def close(self) -> None:
        """Write what waits, and close the file. Raise OutputError if lines are missing."""
        self.flush()
        if self._file is not None:
            self._close(self._file)
        if self._error is not None:
            raise self._error

    def _close(self, file: GrowingFile) -> None:
        self._file = None
        try:
            file.close()
        except OutputError as error:
            self._error = self._error or error


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
    """One method of one path, which may end with a name in braces: `/v1/models/{model}`.

    `max_body_bytes`: limit of its requests' bodies; None: the limit of the server. `generates`: counted, recorded, and
    subject to failures on purpose. `body`: the type of its bodies. `query`: names and meanings of its parameters.
    `about`: what it does, if the docstring of `handler` does not say it.
    """

    method: str
    path: str
    handler: Handler
    access: Access
    max_body_bytes: int | None = SMALL_BYTES
    generates: bool = False
    body: type[Any] | None = None
    query: Sequence[tuple[str, str]] = ()
    about: str = ""

    @property
    def prefix(self) -> str | None:
        """The path before the name; None without one."""
        before, brace, _ = self.path.partition("{")
        return before if brace else None


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
                hint = "" if keys.has_admin else ": start the server with --set admin_key_file"
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
                raise ApiError(403, f"{host!r} is not a name of this server: --set allow_host=NAME makes it one")
            self._own_host = host
        origin = request.header("origin")
        if origin is not None and origin not in self._origins and urlsplit(origin).netloc.lower() != host:
            raise ApiError(403, f"pages of {origin!r} may ask for nothing here: --set allow_origin=ORIGIN lets them")

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
