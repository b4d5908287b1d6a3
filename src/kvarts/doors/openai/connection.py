"""One HTTP/1.1 connection: heads and bodies are parsed and bounded, and requests are answered in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import httptools

from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.http import STATUS_LINES, Header, HttpRequest, HttpResponse, Wire

__all__ = ["Application", "Connection"]

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 64
MAX_BETWEEN_BYTES = 64 * 1024
"""Limit of the bytes between the parts of a body, or after the last one: sizes, extensions, trailers."""
FREE_PARTS = 4096
LEAST_PART_BYTES = 64
"""Required average size of a body's parts beyond FREE_PARTS."""
HEAD_TIMEOUT_S = 75.0
"""Time limit of a connection that sends nothing between requests, or an incomplete head."""
TIMER_S = 0.01
"""More than the error of a timer."""
LOG = logging.getLogger("kvarts.doors.openai")

Application = Callable[[HttpRequest, HttpResponse], Awaitable[None]]
"""Answers one request. The connection of an answer that has not ended when it returns is closed at once."""


class Connection(asyncio.Protocol):
    """One connection, from its beginning until its end a member of `connections`.

    The head of a request is bounded in size and time, and so are the trailers of a chunked body. Requests to change the
    protocol are ignored, as HTTP prescribes for a server that does not support it: the body is read. A CONNECT request
    is the last one of its connection. If a client disconnects, all of its pipelined requests are notified. At most
    MAX_PIPELINED requests wait for the answers to earlier ones; a further one ends the connection.
    """

    def __init__(self, app: Application, connections: set[Connection]) -> None:
        self._app = app
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = self._new_parser()
        self._turns: deque[tuple[HttpRequest, HttpResponse]] = deque()
        """Requests without a whole answer, in order: the first is being answered."""
        self._task: asyncio.Task[None] | None = None
        """Answers the first of them."""
        self._request: HttpRequest | None = None
        """The one whose body is being read; None if its rest is not needed."""
        self._has_answered = False
        self._is_stopping = False
        self._url = b""
        self._headers: list[Header] = []
        self._is_in_head = True
        """Whether the next bytes belong to a head."""
        self._has_begun = False
        """Whether a part of that head has arrived."""
        self._waits_since_s: float | None = self._loop.time()
        """Since when it waits for a head; None from there to the end of the answer."""
        self._is_full = False
        """Whether it ends: further data is not read."""
        self._num_head_bytes = 0
        """Bytes of the head that is being read, including data received with it."""
        self._num_between_bytes = 0
        """Bytes of the body that is being read, received since its last part."""
        self._num_parts = self._num_part_bytes = 0

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a last request is ignored when it is answered, and is no error before.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # The connection ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout of the first request."""
        self._wire = Wire(transport)  # type: ignore[arg-type]  # of a stream: a transport that writes
        self._connections.add(self)
        # One timer per connection: two for each request would be a tenth of the cost of a short answer.
        self._timer = self._loop.call_later(HEAD_TIMEOUT_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all requests."""
        self._connections.discard(self)
        self._timer.cancel()
        self._wire.is_lost = True
        self._wire.drain()
        for request, _ in self._turns:
            request.lose()
        self._parser = self._request = None  # the parser holds this
        if self._task is None or self._task.done():
            self._turns.clear()

    def pause_writing(self) -> None:
        """Make answers wait for the client."""
        self._wire.fill()

    def resume_writing(self) -> None:
        """Let answers continue."""
        self._wire.drain()

    def stop(self) -> None:
        """Close after the answers to what has arrived."""
        self._is_stopping = True
        if self._turns:
            self._turns[-1][1].is_last = True
        else:
            self._wire.transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._wire.transport.abort()
        if self._task is not None:
            self._task.cancel()

    # Requests ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received data, which may contain part of a head."""
        if self._is_full:
            return
        is_head, num_parts = self._is_in_head, self._num_parts
        if is_head:
            self._num_head_bytes += len(data)
        self._parse(data)
        if not (is_head or self._is_in_head):
            self._num_between_bytes = self._num_between_bytes + len(data) if self._num_parts == num_parts else 0
            if self._num_between_bytes > MAX_BETWEEN_BYTES:
                self._break(ApiError(431, f"{MAX_BETWEEN_BYTES} bytes of a body are no part of it, at most"))
        if is_head and self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"the head of a request has {MAX_HEAD_BYTES} bytes at most"))

    def _parse(self, data: bytes) -> None:
        while data and self._parser is not None and not self._is_full:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as error:
                if not self._has_other_protocol:
                    return
                # The parser stops where another protocol would begin. Here the request goes on: its head is read again.
                line = b"%b %b HTTP/%b\r\n" % (
                    self._parser.get_method(), self._url, self._parser.get_http_version().encode()
                )  # fmt: skip
                kept = (b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade")
                data = b"".join((line, *kept, b"\r\n", data[error.args[0] :]))
                self._parser = self._new_parser()
            except httptools.HttpParserError:
                if not self._is_full:
                    self._refuse(ApiError(400, "the request is not valid HTTP"))
                return
            else:
                return

    @property
    def _has_other_protocol(self) -> bool:
        """Whether the head has an Upgrade header. A CONNECT request is answered; what follows it is not HTTP."""
        parser = self._parser
        return parser is not None and parser.should_upgrade() and parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        """Start the timeout of a head."""
        self._url = b""
        self._headers = []
        self._waits_since_s = self._loop.time()
        self._has_begun = True

    def on_url(self, url: bytes) -> None:
        """Receive a part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receive a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Let the request be answered in its turn. Its body may not have arrived."""
        parser = self._parser
        assert parser is not None
        if self._has_other_protocol:
            return
        method = parser.get_method()
        self._is_in_head = self._has_begun = False
        self._waits_since_s = None
        self._num_between_bytes = self._num_parts = self._num_part_bytes = 0
        if self._is_full:
            return
        if len(self._turns) > MAX_PIPELINED:
            self._is_full = True
            self._wire.pause_reading()
            return
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        path = unquote(path) if "%" in path else path
        is_modern = parser.get_http_version() >= "1.1"
        request = HttpRequest(method.decode("ascii"), path, url.query or b"", self._headers, self._wire)
        response = HttpResponse(
            self._wire,
            has_body=method != b"HEAD",
            is_last=self._is_stopping or method == b"CONNECT" or not (is_modern and parser.should_keep_alive()),
            has_chunks=is_modern,
            ended=self._answered,
        )
        self._request = request
        self._turns.append((request, response))
        if len(self._turns) == 1:
            self._begin(request, response)
        else:
            self._wire.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Read a part of a body, and check the average size of parts."""
        if self._is_full:
            return
        self._num_parts += 1
        self._num_part_bytes += len(body)
        if self._num_parts > FREE_PARTS and self._num_part_bytes < LEAST_PART_BYTES * (self._num_parts - FREE_PARTS):
            self._break(ApiError(400, f"the parts of a long body have {LEAST_PART_BYTES} bytes on average"))
        elif self._request is not None:
            self._request.add(body)

    def on_message_complete(self) -> None:
        """Expect the next head."""
        if self._is_full or self._has_other_protocol:
            return
        if self._request is not None:
            self._request.end()
            self._request = None
        self._is_in_head = True
        self._num_head_bytes = 0

    # Answers ----------------------------------------------------------------------------------------------

    def _begin(self, request: HttpRequest, response: HttpResponse) -> None:
        self._task = self._loop.create_task(self._answer(request, response))

    async def _answer(self, request: HttpRequest, response: HttpResponse) -> None:
        try:
            await self._app(request, response)
        except Exception:
            LOG.exception("an unexpected error")
        finally:
            if not response.has_ended:
                self._wire.transport.abort()
            if self._wire.is_lost:
                self._turns.clear()

    def _answered(self) -> None:
        """Continue with the next request, or refuse the excess ones."""
        if self._wire.is_lost:
            return
        request, _ = self._turns.popleft()
        self._has_answered = True
        if self._request is request:
            self._request = None
        if self._wire.transport.is_closing():
            return
        self._wire.resume_reading()
        if self._turns:
            self._begin(*self._turns[0])
        elif not self._has_begun:
            self._waits_since_s = self._loop.time()
        if self._is_full:
            self._wire.pause_reading()
            if not self._turns:
                self._refuse(ApiError(429, f"at most {MAX_PIPELINED} requests of a connection wait for their turn"))

    def _break(self, error: ApiError) -> None:
        """End a connection within a body; the rest of the body is not read."""
        self._is_full = True
        self._refuse(error)

    def _look(self) -> None:
        """Close a connection that has waited too long for a head: without an error if it has had an answer."""
        waited_s = 0.0 if self._waits_since_s is None else self._loop.time() - self._waits_since_s
        if waited_s < HEAD_TIMEOUT_S - TIMER_S:
            self._timer = self._loop.call_later(HEAD_TIMEOUT_S - waited_s, self._look)
        elif self._has_begun or not self._has_answered:
            self._refuse(ApiError(408, f"a request begins within {HEAD_TIMEOUT_S:g} s"))
        else:
            self._wire.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Close the connection with an error, or without one if an earlier answer is incomplete."""
        transport = self._wire.transport
        if transport.is_closing():
            return
        if len(self._turns) > 1 or (self._turns and self._turns[0][1].has_begun):
            transport.abort()
            return
        body = error.body
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        transport.write(STATUS_LINES[error.status] + head + body)
        transport.close()
