"""The part of HTTP over ASGI that this server needs: requests are read, and answers sent or streamed.

While request bodies are read, their bytes are limited, in total and per owner.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from random import Random, SystemRandom
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvarts.base.tenants import Shares
from kvarts.doors.openai.errors import ApiError

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = [
    "DIRECT",
    "Body",
    "ClientGone",
    "Direct",
    "HttpRequest",
    "HttpResponse",
    "Intake",
    "Receive",
    "Scope",
    "Send",
    "new_id",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
DIRECT = "kvarts.direct"
"""The extension of an ASGI scope that holds a Direct, as `call`."""
_RANDOM = Random(SystemRandom().getrandbits(256))
FREE_BYTES = 64 * 1024
"""Up to this size, a body may use all of the room; a quarter of it is reserved for the first bytes of bodies."""
STALLED_S = 1.0
"""A body that has not progressed for this time is dropped if others lack room."""


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


class ClientGone(Exception):  # noqa: N818  # not an error: there is no client left to inform
    """The client has closed its connection."""


class HttpRequest:
    """A request whose head has arrived. `direct`: set if the server provides it."""

    def __init__(self, scope: Scope, receive: Receive, direct: Direct | None = None) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._query: bytes = scope.get("query_string", b"")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.is_ambiguous = len(self.headers) < len(scope["headers"]) and any(
            [name for name, _ in scope["headers"]].count(single) > 1 for single in SINGLE
        )
        """Whether it has two values for a header of which a proxy in front may have checked the other one."""
        self.owner_name = ""
        """Of the owner of its key, once that is known."""
        self._receive = receive
        self._direct = direct
        self._gone: asyncio.Task[None] | None = None

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
        whole = None if self._direct is None else self._direct.whole_body()
        if whole is not None and len(whole) > max_bytes:
            raise ApiError(413, f"the body has {len(whole)} bytes, and {max_bytes} are read at most")
        return whole

    async def body(self, max_bytes: int, *, timeout_s: float, came: Callable[[int], object]) -> bytes:
        """Return the body, if it was not taken whole. `came` receives the size of each part, and may raise.

        Raise ApiError if it is too long or too slow, and ClientGone if it is cut off.
        """
        length = self.header("content-length") or ""
        if length.isdecimal() and int(length) > max_bytes:
            raise ApiError(413, f"the body has {length[:20]} bytes, and {max_bytes} are read at most")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._whole_body(max_bytes, came)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {timeout_s:g} s") from None

    async def _whole_body(self, max_bytes: int, came: Callable[[int], object]) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise ApiError(413, f"the body is longer than the {max_bytes} bytes that are read at most")
            if part:
                came(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def when_gone(self, gone: Callable[[], object]) -> None:
        """Call `gone` if the client closes its connection before `settle`. To be called after the body was read."""
        if self._direct is not None:
            self._direct.when_gone(gone)
            return

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            gone()

        self._gone = asyncio.ensure_future(watch())

    async def settle(self) -> None:
        """Stop the watch that `when_gone` began."""
        if self._direct is not None:
            self._direct.when_gone(None)
        if self._gone is not None:
            self._gone.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._gone
            self._gone = None


class Direct:
    """A connection without the tasks in between, for one request: reads and writes it as uvicorn does.

    `status_line`: the first line of an answer, by its status.
    """

    def __init__(
        self,
        cycle: RequestResponseCycle,
        flow: FlowControl,
        transport: asyncio.Transport,
        status_line: Mapping[int, bytes],
    ) -> None:
        self.cycle = cycle
        self._flow = flow
        self._transport = transport
        self._status_line = status_line
        self._gone: Callable[[], object] | None = None

    def whole_body(self) -> bytes | None:
        """Take the body of the request if all of it has arrived; None if it has not."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        self._flow.resume_reading()
        cycle.message_event.clear()
        whole, cycle.body = bytes(cycle.body), bytearray()
        return whole

    def when_gone(self, gone: Callable[[], object] | None) -> None:
        """Call `gone` if the client closes its connection; None: no longer call anything."""
        self._gone = gone
        if gone is not None:
            self._flow.resume_reading()  # else the end of the connection is not noticed
            if self.cycle.disconnected:
                asyncio.get_running_loop().call_soon(self.disconnected)

    def disconnected(self) -> None:
        """Notify the request that its client has closed the connection."""
        if self._gone is not None:
            gone, self._gone = self._gone, None
            gone()

    @property
    def is_ready(self) -> bool:
        """Whether a part can be written now without waiting for the client to read."""
        cycle = self.cycle
        return bool(cycle.chunked_encoding) and not (self._flow.write_paused or cycle.disconnected)

    def write(self, payload: bytes) -> None:
        """Write a chunk."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))

    def write_whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a whole answer at once, as uvicorn does in two parts. Return False if it cannot be written now.

        `headers` include the length of `body`.
        """
        cycle = self.cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_started or cycle.scope["method"] == "HEAD":
            return False
        parts = [self._status_line[status]]
        for name, value in (*cycle.default_headers, *headers):
            if b"\r" in value or b"\n" in value:
                return False  # uvicorn refuses it
            parts += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", body)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = cycle.chunked_encoding = False
        self._transport.write(b"".join(parts))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._transport.close()
        cycle.on_response()
        return True


class HttpResponse:
    """An answer on its way out. `extra_headers` are sent with every answer. `direct`: set if the server provides it."""

    def __init__(self, send: Send, direct: Direct | None = None) -> None:
        self._send = send
        self.direct = direct
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.has_begun = False
        self.has_ended = False
        self.status = 0
        self.num_chunks = 0
        """Chunks written to a stream, if they are counted."""

    async def whole(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = JSON,
        headers: list[tuple[bytes, bytes]] | None = None,
        without_body: bool = False,
    ) -> None:
        """Send a whole answer. `without_body`: for a HEAD request, whose headers describe the omitted body."""
        length = str(len(body)).encode()
        told = [(b"content-type", content_type), (b"content-length", length), *(headers or ())]
        direct = None if without_body else self.direct
        if direct is not None and direct.write_whole(status, [*told, *self.extra_headers], body):
            self.has_begun = self.has_ended = True
            self.status = status
            return
        await self._begin(status, told)
        await self._send({"type": "http.response.body", "body": b"" if without_body else body, "more_body": False})
        self.has_ended = True

    async def unfinished(self, body: bytes) -> None:
        """Send half of an answer."""
        await self._begin(200, [(b"content-type", JSON), (b"content-length", str(len(body)).encode())])
        await self.more(body[: len(body) // 2])

    async def error(self, error: ApiError, body: bytes, *, without_body: bool = False) -> None:
        """Send an error, in an envelope."""
        await self.whole(body, status=error.status, headers=error.headers, without_body=without_body)

    async def begin_stream(self) -> None:
        """Begin a stream of events."""
        await self._begin(
            200,
            [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
        )

    async def more(self, payload: bytes) -> None:
        """Send a part of a stream, waiting while the client does not read."""
        await self._send({"type": "http.response.body", "body": payload, "more_body": True})

    async def end_stream(self) -> None:
        """End a stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self.has_ended = True

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.extra_headers]})


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
