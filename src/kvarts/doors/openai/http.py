"""Requests and answers of one connection, and the limits on bodies that are being read.

While request bodies are read, their bytes are limited, in total and per owner.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from random import Random, SystemRandom
from time import monotonic, time

from kvarts.base.limits import whole_number
from kvarts.base.tenants import Shares
from kvarts.doors.openai.errors import ApiError

__all__ = ["Body", "ClientGone", "Header", "HttpRequest", "HttpResponse", "Intake", "Wire", "new_id"]

Header = tuple[bytes, bytes]
JSON = b"application/json"
_RANDOM = Random(SystemRandom().getrandbits(256))
FREE_BYTES = 64 * 1024
"""Up to this size, a body may use all of the room; a quarter of it is reserved for the first bytes of bodies."""
STALLED_S = 1.0
"""A body that has not progressed for this time is dropped if others lack room."""
MOST_UNREAD_BYTES = 64 * 1024
"""Bytes of a body that wait to be read before the client must wait."""
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
STATUS_LINES = {n: f"HTTP/1.1 {n} {_PHRASES.get(n, '')}\r\n".encode() for n in range(200, 600)}
"""The first line of an answer, by its status; failures on purpose may have any."""


class _Names(dict[str, bytes]):
    """Names of headers as bytes. Code names them, so there are few."""

    def __missing__(self, name: str) -> bytes:
        self[name] = encoded = name.encode()
        return encoded


_NAMES = _Names()


def new_id() -> str:
    """Return 32 random hexadecimal digits. For ids that give no access: they could be guessed from many others.

    The system is asked for randomness once, because that costs more than the rest of an id.
    """
    return f"{_RANDOM.getrandbits(128):032x}"


SINGLE = (b"host", b"authorization", b"content-length", b"content-type", b"origin")
"""Headers that decide about access, or about what the body is: of two values, another reader may take the other."""

PROXIES = ("127.0.0.1", "::1")
"""Addresses of connections whose X-Forwarded-For is believed: proxies on this machine."""


class ClientGone(Exception):  # noqa: N818  # not an error: there is no client left to inform
    """The client has closed its connection."""


class Wire:
    """Flow control of one connection, and whether its client has gone."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.peer: str = str(peer[0]) if isinstance(peer, tuple) else ""
        """The address of the client; empty if unknown."""
        self.is_lost = False
        self._is_reading = True
        self._drained: asyncio.Event | None = None
        """Set once more can be written; None while it can."""

    @property
    def is_full(self) -> bool:
        """Whether the client must read before more is written."""
        return self._drained is not None

    def fill(self) -> None:
        """Make writers wait."""
        self._drained = asyncio.Event()

    def drain(self) -> None:
        """Let writers continue."""
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    async def write(self, payload: bytes) -> None:
        """Write when the client has read enough. Do nothing if it has gone."""
        while self._drained is not None:
            await self._drained.wait()
        if not self.is_lost:
            self.transport.write(payload)

    def pause_reading(self) -> None:
        """Make the client wait."""
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on. Without reading, the end of a connection is not noticed."""
        if not self._is_reading:
            self._is_reading = True
            self.transport.resume_reading()


class HttpRequest:
    """A request whose head has arrived. `waits_to_continue`: its client sends the body once it has been asked to."""

    def __init__(self, method: str, path: str, query: bytes, headers: Sequence[Header], wire: Wire) -> None:
        self.method = method
        self.path = path
        self._query = query
        self.headers = dict(headers)
        self.is_ambiguous = len(self.headers) < len(headers) and any(
            [name for name, _ in headers].count(single) > 1 for single in SINGLE
        )
        """Whether it has two values for a header of which a proxy in front may have checked the other one."""
        self.owner_name = ""
        """Of the owner of its key, once that is known."""
        self.waits_to_continue = self.headers.get(b"expect", b"").lower() == b"100-continue"
        self._wire = wire
        self._unread = bytearray()
        self._is_whole = False
        self._moved: asyncio.Future[None] | None = None
        """Done when more of the body has arrived, or the client has gone; None unless a reader waits."""
        self._gone: Callable[[], object] | None = None

    @property
    def client(self) -> str:
        """The address of the client: what a proxy on this machine forwards, else that of the connection."""
        peer = self._wire.peer
        if peer in PROXIES:
            for address in reversed((self.header("x-forwarded-for") or "").split(",")):
                if (name := address.strip()) and name not in PROXIES:
                    return name
        return peer

    @property
    def query(self) -> str:
        """The part of its target after `?`."""
        return self._query.decode("latin-1")

    def header(self, name: str) -> str | None:
        """Return a header by its name in lower case."""
        value = self.headers.get(_NAMES[name])
        return None if value is None else value.decode("latin-1")

    def has_header(self, *names: str) -> bool:
        """Return whether it has any of these headers."""
        return not self.headers.keys().isdisjoint(map(_NAMES.__getitem__, names))

    @property
    def has_body(self) -> bool:
        """Whether its head announces a non-empty body."""
        return self.headers.get(b"content-length", b"0").strip(b"0") != b"" or b"transfer-encoding" in self.headers

    def is_json(self, *, unless_told: bool) -> bool:
        """Return whether its head declares the body to be JSON. `unless_told`: the result without a content type."""
        told = self.headers.get(b"content-type", b"")
        if told == JSON:
            return True
        kind = told.partition(b";")[0].strip().lower()
        if not kind:
            return unless_told
        return kind == JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))

    def whole_body(self, max_bytes: int) -> bytes | None:
        """Return the body if all of it has arrived, else None. Raise ApiError if it is too long."""
        if not self._is_whole or self.waits_to_continue or self._wire.is_lost:
            return None
        whole = self._take()
        if len(whole) > max_bytes:
            raise ApiError(413, f"the body has {len(whole)} bytes, and {max_bytes} are read at most")
        return whole

    async def body(self, max_bytes: int, *, timeout_s: float, came: Callable[[int], object]) -> bytes:
        """Return the body, if it was not taken whole. `came` receives the size of each part, and may raise.

        Raise ApiError if it is too long or too slow, and ClientGone if it is cut off.
        """
        length = whole_number(self.header("content-length") or "")
        if length is not None and length > max_bytes:
            raise ApiError(413, f"the body has {length} bytes, and {max_bytes} are read at most")
        if self.waits_to_continue:
            self.waits_to_continue = False
            await self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._parts(max_bytes, came)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {timeout_s:g} s") from None

    async def _parts(self, max_bytes: int, came: Callable[[int], object]) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            while not (self._unread or self._is_whole or self._wire.is_lost):
                self._wire.resume_reading()
                self._moved = asyncio.get_running_loop().create_future()
                await self._moved
            if self._wire.is_lost:
                raise ClientGone
            if self._unread:
                parts.append(self._take())
                num_bytes += len(parts[-1])
                if num_bytes > max_bytes:
                    raise ApiError(413, f"the body is longer than the {max_bytes} bytes that are read at most")
                came(len(parts[-1]))
            if self._is_whole:
                return b"".join(parts)

    def _take(self) -> bytes:
        self._wire.resume_reading()
        taken, self._unread = bytes(self._unread), bytearray()
        return taken

    def add(self, part: bytes) -> None:
        """Receive a part of the body."""
        self._unread += part
        if len(self._unread) > MOST_UNREAD_BYTES:
            self._wire.pause_reading()
        self._wake()

    def end(self) -> None:
        """Receive the end of the body."""
        self._is_whole = True
        self._wake()

    def lose(self) -> None:
        """Notify its reader, and what `when_gone` set, that the client has gone."""
        self._wake()
        if self._gone is not None:
            gone, self._gone = self._gone, None
            gone()

    def _wake(self) -> None:
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    def when_gone(self, gone: Callable[[], object] | None) -> None:
        """Call `gone` once if the client closes its connection; None: no longer call anything."""
        self._gone = gone
        if gone is not None:
            self._wire.resume_reading()
            if self._wire.is_lost:
                asyncio.get_running_loop().call_soon(self.lose)


class HttpResponse:
    """An answer on its way out. `extra_headers` are sent with every answer.

    `has_body`: false for a HEAD request, whose headers describe the omitted body. `is_last`: the connection is closed
    after it. `has_chunks`: a stream is sent in chunks, which HTTP/1.0 lacks. `ended` is called at its end.
    """

    def __init__(
        self, wire: Wire, *, has_body: bool, is_last: bool, has_chunks: bool, ended: Callable[[], object]
    ) -> None:
        self._wire = wire
        self._has_body = has_body
        self.is_last = is_last
        self._has_chunks = has_chunks
        self._ended = ended
        self.extra_headers: list[Header] = []
        self.has_begun = False
        self.has_ended = False
        self.status = 0
        self.num_chunks = 0
        """Chunks written to a stream, if they are counted."""

    async def whole(
        self, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Sequence[Header] = ()
    ) -> None:
        """Send a whole answer."""
        length = str(len(body)).encode()
        head = self._head(status, ((b"content-type", content_type), (b"content-length", length), *headers))
        await self._wire.write(head + body if self._has_body else head)
        self._end()

    async def unfinished(self, body: bytes) -> None:
        """Send half of an answer."""
        length = str(len(body)).encode()
        head = self._head(200, ((b"content-type", JSON), (b"content-length", length)))
        await self._wire.write(head + body[: len(body) // 2])

    async def error(self, error: ApiError, body: bytes) -> None:
        """Send an error, in an envelope."""
        await self.whole(body, status=error.status, headers=error.headers or ())

    async def begin_stream(self) -> None:
        """Begin a stream of events."""
        frame = ((b"transfer-encoding", b"chunked"),) if self._has_chunks else ()
        events = (b"content-type", b"text/event-stream; charset=utf-8")
        await self._wire.write(self._head(200, (events, (b"cache-control", b"no-cache"), *frame)))

    @property
    def is_ready(self) -> bool:
        """Whether a part of a stream can be written now without waiting for the client to read."""
        return not (self._wire.is_full or self._wire.is_lost)

    def write(self, payload: bytes) -> None:
        """Write a part of a stream that `is_ready`."""
        self._wire.transport.write(self._chunk(payload))

    async def more(self, payload: bytes) -> None:
        """Send a part of a stream, waiting while the client does not read."""
        if payload:
            await self._wire.write(self._chunk(payload))

    async def end_stream(self) -> None:
        """End a stream."""
        if self._has_chunks:
            await self._wire.write(b"0\r\n\r\n")
        self._end()

    def _chunk(self, payload: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(payload), payload) if self._has_chunks else payload

    def _head(self, status: int, headers: Sequence[Header]) -> bytes:
        parts = [STATUS_LINES[status], _date(int(time()))]
        for name, value in (*headers, *self.extra_headers):
            if b"\r" in value or b"\n" in value:
                raise ValueError(f"the header {name!r} has a line break")
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"connection: close\r\n\r\n" if self.is_last else b"\r\n")
        self.has_begun = True
        self.status = status
        return b"".join(parts)

    def _end(self) -> None:
        self.has_ended = True
        if self.is_last:
            self._wire.transport.close()
        self._ended()


@lru_cache(1)
def _date(now_s: int) -> bytes:
    return f"date: {formatdate(now_s, usegmt=True)}\r\n".encode()


class Body:
    """The bytes of one body, from its arrival until its release."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.num_bytes = 0
        self.moved_s = monotonic()
        self.reader: asyncio.Task[object] | None = None
        """The task that reads it, while it is being read."""
        self.gave_way = False


class Intake:
    """Owner of the byte count of bodies that are read, or wait to be parsed. For one event loop.

    `num_bytes`: limit of all bodies together. `shares`: shares of owners, see Shares.
    """

    def __init__(self, num_bytes: int, shares: Mapping[str, float] | None = None) -> None:
        self._shares = Shares(num_bytes, shares)
        self._reading: OrderedDict[Body, None] = OrderedDict()
        """The bodies that are being read, least recently progressed first."""

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._shares.num_used

    async def read(self, request: HttpRequest, body: Body, max_bytes: int, *, timeout_s: float) -> bytes:
        """Return the body of a request, whose bytes are counted in `body` until `drop`.

        Raise ApiError if it is too long, too slow, or lacks room; ClientGone if it is cut off.
        """
        if (whole := request.whole_body(max_bytes)) is not None:
            if whole:
                self._take(body, len(whole))
            return whole
        body.reader = asyncio.current_task()
        self._reading[body] = None
        try:
            return await request.body(max_bytes, timeout_s=timeout_s, came=lambda count: self._take(body, count))
        except asyncio.CancelledError:
            if body.gave_way and body.reader is not None and body.reader.uncancel() == 0:
                raise ApiError(408, "other requests needed the room of this body, which did not come") from None
            raise
        finally:
            body.reader = None
            self._reading.pop(body, None)

    def drop(self, body: Body) -> None:
        """Release the bytes of a body."""
        if body.num_bytes:
            self._shares.give(body.owner, body.num_bytes)
            body.num_bytes = 0

    def _take(self, body: Body, count: int) -> None:
        """Reserve room for `count` more bytes. Raise ApiError if the room is exhausted."""
        body.moved_s = monotonic()
        if body in self._reading:
            self._reading.move_to_end(body)
        while not self._has_room(body, count):
            if not self._make_room(body):
                raise ApiError(503, "the server reads as many bytes of requests as it may", retry_after_s=1.0)
        self._shares.force(body.owner, count)
        body.num_bytes += count

    def _has_room(self, body: Body, count: int) -> bool:
        room = self._shares.room(body.owner)
        if body.num_bytes + count > FREE_BYTES:
            room -= self._shares.total // 4
        return count <= room

    def _make_room(self, body: Body) -> bool:
        """Drop the body that has stalled longest. Return whether one had stalled."""
        for other in self._reading:
            if monotonic() - other.moved_s < STALLED_S:
                return False
            if other is not body and other.num_bytes and other.reader is not None:
                other.gave_way = True
                other.reader.cancel()
                del self._reading[other]
                self.drop(other)
                return True
        return False
