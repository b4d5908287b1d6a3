"""The server around the application: uvicorn, a socket, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvarts.base.errors import ConfigError
from kvarts.base.signals import asked_to_stop
from kvarts.doors.exposure import check_certificate, check_reach
from kvarts.doors.openai.app import ABORT, OpenAIApp
from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.http import DIRECT, Direct
from kvarts.doors.openai.served import Models

__all__ = ["Address", "OpenAIServer", "serve_until_signal"]

BACKLOG = 4096
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

UPGRADE = re.compile(rb"\r\n(?i:upgrade)[ \t]*:[^\r\n]*")
LATE_S = 0.1
"""A mock reports a lag above this."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens; port 0: a free one. `tls_cert` and `tls_key`: PEM files for encryption.

    `insecure`: how often --insecure was given, see kvarts.doors.exposure. Raises ConfigError for an address that other
    machines can reach without protection, and MissingFileError or InputError for the files of a certificate and its
    key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    has_keys: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: int = 0
    field: str = "host"
    """The option that names the host, for errors."""
    key_option: str = "--api-key-file"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"must be from 0 to 65535, got {self.port}", field="port")
        check_certificate(self.tls_cert, self.tls_key)
        check_reach(
            self.host,
            field=self.field,
            insecure=self.insecure,
            encrypts=self.is_encrypted,
            asks_for_token=self.has_keys,
            missing=f"Give --tls-cert, --tls-key and {self.key_option}",
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether the server uses TLS."""
        return self.tls_cert is not None

    def listen(self) -> socket.socket:
        """Return a listening socket. Raise ConfigError if the address is not available."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self.host, self.port))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror or error})",
                field="port",
                hint="Is the port taken, or the host not here?",
            ) from None
        return listening

    def url_of(self, listening: socket.socket) -> str:
        """Return the URL of a socket."""
        host, port = listening.getsockname()[:2]
        scheme = "https" if self.is_encrypted else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class _Protocol(HttpToolsProtocol):
    """HTTP that the application can cut off, for failures on purpose, with errors in the envelope.

    The head of a request is bounded in size and time, and so are the trailers of a chunked body. Requests to change the
    protocol are ignored, as HTTP prescribes for a server that does not support it: the body is read. If a client
    disconnects, all of its pipelined requests are notified. At most MAX_PIPELINED requests wait for the answers to
    earlier ones; a further one ends the connection.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._waits_since_s: float | None = self.loop.time()
        """Since when it waits for a head; None from there to the end of the answer."""
        self._under_way: deque[Direct] = deque()
        """Unanswered requests in order, possibly after answered ones."""
        self._is_full = False
        """Whether there were too many: further data is not read, and the connection ends after the last answer."""
        self._num_head_bytes = 0
        """Bytes of the head that is being read, including data received with it."""
        self._num_between_bytes = 0
        """Bytes of the body that is being read, received since its last part."""
        self._num_parts = self._num_part_bytes = 0
        # One timer per connection: two for each request would be a tenth of the cost of a short answer.
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all requests; uvicorn notifies only the last one."""
        super().connection_lost(exc)
        self._timer.cancel()
        for direct in self._under_way:
            if not direct.cycle.response_complete:
                direct.cycle.disconnected = True
                direct.cycle.message_event.set()
                direct.disconnected()

    def data_received(self, data: bytes) -> None:
        """Parse received data, which may contain part of a head."""
        if self._is_full:
            return
        is_head, num_parts = self._is_in_head, self._num_parts
        if is_head:
            self._num_head_bytes += len(data)
            data = _without_upgrade(data)
        super().data_received(data)
        if not (is_head or self._is_in_head):
            self._num_between_bytes = self._num_between_bytes + len(data) if self._num_parts == num_parts else 0
            if self._num_between_bytes > MAX_BETWEEN_BYTES:
                self._break(ApiError(431, f"{MAX_BETWEEN_BYTES} bytes of a body are no part of it, at most"))
        if is_head and self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the head of a request has {MAX_HEAD_BYTES} bytes at most"))

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP."""
        if not self._is_full:
            self._refuse(ApiError(400, msg))

    def on_message_begin(self) -> None:
        """Start the timeout of a head."""
        super().on_message_begin()
        self._waits_since_s = self.loop.time()
        self._has_begun = True

    def on_headers_complete(self) -> None:
        """Add the extensions to the scope before the application is called."""
        self._is_in_head = self._has_begun = False
        self._waits_since_s = None
        self._num_between_bytes = self._num_parts = self._num_part_bytes = 0
        if self._is_full:
            return
        if len(self.pipeline) >= MAX_PIPELINED:
            self._is_full = True
            self.flow.pause_reading()
            return
        super().on_headers_complete()
        while self._under_way and self._under_way[0].cycle.response_complete:
            self._under_way.popleft()
        direct = Direct(self.cycle, self.flow, self.transport, STATUS_LINE)
        self._under_way.append(direct)
        extensions = self.scope.setdefault("extensions", {})
        extensions[ABORT] = {"call": self.transport.abort}
        extensions[DIRECT] = {"call": direct}

    def on_message_complete(self) -> None:
        """Expect the next head."""
        if self._is_full:
            return
        super().on_message_complete()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Read a part of a body, and check the average size of parts."""
        if self._is_full:
            return
        self._num_parts += 1
        self._num_part_bytes += len(body)
        if self._num_parts > FREE_PARTS and self._num_part_bytes < LEAST_PART_BYTES * (self._num_parts - FREE_PARTS):
            self._break(ApiError(400, f"the parts of a long body have {LEAST_PART_BYTES} bytes on average"))
        else:
            super().on_body(body)

    def on_response_complete(self) -> None:
        """Continue with the next request, or refuse the excess ones."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._has_begun:
            self._waits_since_s = self.loop.time()
        if self._is_full:
            self.flow.pause_reading()
            if not self.pipeline and self._under_way[-1].cycle.response_complete:
                self._refuse(ApiError(429, f"at most {MAX_PIPELINED} requests of a connection wait for their turn"))

    _is_in_head = True
    """Whether the next bytes belong to a head."""
    _has_begun = False
    """Whether a part of that head has arrived."""

    def _break(self, error: ApiError) -> None:
        """End a connection within a body; the rest of the body is not read."""
        self._is_full = True
        self._refuse(error)

    def _look(self) -> None:
        """Close a connection that has waited too long for a head: without an error if it has had an answer."""
        waited_s = 0.0 if self._waits_since_s is None else self.loop.time() - self._waits_since_s
        if waited_s < HEAD_TIMEOUT_S - TIMER_S:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S - waited_s, self._look)
        elif self._has_begun or self.cycle is None:
            self._refuse(ApiError(408, f"a request begins within {HEAD_TIMEOUT_S:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Close the connection with an error, or without one if an answer is incomplete."""
        if self.transport.is_closing():
            return
        if any(not cycle.response_complete and (cycle.response_started or cycle is not self.cycle)
               for cycle in (direct.cycle for direct in self._under_way)):  # fmt: skip
            self.transport.abort()
            return
        body, reason = error.body, HTTPStatus(error.status).phrase
        head = f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """Return the data without the Upgrade header, with which the parser would not read a body."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"", head) + end + rest if b"pgrade" in head.lower() else data


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals, and stops without delay on `tell_to_stop`."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def tell_to_stop(self) -> None:
        """Make the main loop end."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """Call `on_tick` every 100 ms until shutdown."""
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 864_000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 0.1)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, because the caller handles signals."""
        yield


class OpenAIServer:
    """One application on one socket, in the event loop that runs `start`. `listening`: the socket, if it is open."""

    def __init__(
        self, app: OpenAIApp, models: Models, address: Address, listening: socket.socket | None = None
    ) -> None:
        self._app = app
        self._models = models
        self._socket = address.listen() if listening is None else listening
        self.url = address.url_of(self._socket)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=True,
            backlog=BACKLOG,
            proxy_headers=app.logs_addresses,
            ssl_certfile=address.tls_cert,
            ssl_keyfile=address.tls_key,
        )
        self._server = _Server(config)
        self.urls: list[tuple[str, str]] = []
        """The name and the URL of each worker behind it."""
        self._running: asyncio.Task[None] | None = None

    def models(self) -> list[Models]:
        """Return the models of each door that is there; of a fleet, the router's first."""
        return [self._models]

    async def start(self) -> None:
        """Start accepting connections."""
        self._models.open()
        self._app.open()
        self._running = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._running.done():
                await self._running
                raise ConfigError("the server did not start", field="port")
            await asyncio.sleep(0.001)

    async def stop(self, drain_s: float = 30.0) -> bool:
        """Refuse new requests, wait for those under way, and close. Return whether all of them ended normally."""
        is_whole = await self._models.drained(drain_s)
        if not is_whole:
            self._models.abort_all()
        self._server.config.timeout_graceful_shutdown = 2
        self._server.tell_to_stop()
        if self._running is not None:
            await self._running
        await self._models.close()
        self._app.close()
        return is_whole


async def serve_until_signal(
    server: OpenAIServer,
    listening: Callable[[str], None],
    *,
    startup_delay_s: float = 0.0,
    drain_s: float = 30.0,
    drain_delay_s: float = 0.0,
    say: Callable[[str], object] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the process at once.

    After the signal, /health answers 503. Requests are accepted for `drain_delay_s` more, for load balancers to notice;
    those under way then have `drain_s`. `listening` is called with the URL once the server accepts connections.
    Until `startup_delay_s` is over, requests are answered with 503. `say` receives messages about lag.
    """
    stopping = asked_to_stop()
    for each in server.models():
        each.set_starting(is_starting=startup_delay_s > 0)
    await server.start()
    listening(server.url)
    starting = asyncio.ensure_future(_start_later(server, startup_delay_s))
    watching = asyncio.ensure_future(_watch_lag(server, say))
    try:
        await stopping.wait()
        for each in server.models():
            each.leave()
        await asyncio.sleep(drain_delay_s)
    finally:
        starting.cancel()
        watching.cancel()
        if num_live := sum(each.num_live for each in server.models()):
            say(f"{num_live} requests are under way: they have {drain_s:g} s")
        if not await server.stop(drain_s):
            say("not all of them ended in time")


async def _start_later(server: OpenAIServer, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    for each in server.models():
        each.set_starting(is_starting=False)


async def _watch_lag(server: OpenAIServer, say: Callable[[str], object]) -> None:
    """Report a mock's lag above LATE_S, and again when it has grown by half."""
    told_ns = 0
    while True:
        await asyncio.sleep(1.0)
        most_ns = server.models()[0].most_late_ns
        if most_ns > max(LATE_S * 1e9, 1.5 * told_ns):
            told_ns = most_ns
            say(f"the mock is late: a step ended {most_ns / 1e9:.2f} s after its time. Timings of clients include that")
