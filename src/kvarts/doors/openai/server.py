"""The server around the application: a socket, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.signals import asked_to_stop
from kvarts.doors.exposure import check_certificate, check_reach
from kvarts.doors.openai.app import OpenAIApp
from kvarts.doors.openai.connection import Connection
from kvarts.doors.openai.served import Models

if TYPE_CHECKING:
    import ssl

__all__ = ["Address", "OpenAIServer", "serve_until_signal"]

BACKLOG = 4096
CLOSING_S = 2.0
"""How long connections have for what is written at the end."""
LATE_S = 0.1
"""A mock reports a lag above this."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server listens; port 0: a free one. `tls_cert` and `tls_key`: PEM files for encryption.

    `insecure`: waive the protection of an address that other machines can reach. Raises ConfigError for such an address
    without it, and MissingFileError or InputError for the files of a certificate and its key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    has_keys: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    key_option: str = "--api-key-file"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"must be from 0 to 65535, got {self.port}", field="port")
        check_certificate(self.tls_cert, self.tls_key)
        check_reach(
            self.host,
            field="host",
            insecure=self.insecure,
            encrypts=self.is_encrypted,
            asks_for_token=self.has_keys,
            missing=f"Give --tls-cert, --tls-key and {self.key_option}",
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether the server uses TLS."""
        return self.tls_cert is not None

    def encryption(self) -> ssl.SSLContext | None:
        """Return the context of TLS connections; None without encryption."""
        if self.tls_cert is None:
            return None
        import ssl  # a server without encryption starts sooner

        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.tls_cert, self.tls_key)
        return context

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


class OpenAIServer:
    """One application on one socket, in the event loop that runs `start`. `listening`: the socket, if it is open."""

    def __init__(
        self, app: OpenAIApp, models: Models, address: Address, listening: socket.socket | None = None
    ) -> None:
        self._app = app
        self._models = models
        self._socket = address.listen() if listening is None else listening
        self.url = address.url_of(self._socket)
        self._encryption = address.encryption()
        self._connections: set[Connection] = set()
        self._accepting: asyncio.Server | None = None
        self.urls: list[tuple[str, str]] = []
        """The name and the URL of each worker behind it."""

    def models(self) -> list[Models]:
        """Return the models of each door that is there; of a fleet, the router's first."""
        return [self._models]

    async def start(self) -> None:
        """Start accepting connections."""
        self._models.open()
        self._app.open()
        self._accepting = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._app, self._connections), sock=self._socket, ssl=self._encryption, backlog=BACKLOG
        )

    async def stop(self, drain_s: float = 30.0) -> bool:
        """Refuse new requests, wait for those under way, and close. Return whether all of them ended normally."""
        is_whole = await self._models.drained(drain_s)
        if not is_whole:
            self._models.abort_all()
        if self._accepting is not None:
            self._accepting.close()
        self._socket.close()
        for connection in tuple(self._connections):
            connection.stop()
        deadline_s = monotonic() + CLOSING_S
        while self._connections and monotonic() < deadline_s:
            await asyncio.sleep(0.01)
        for connection in tuple(self._connections):
            connection.abort()
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
            say(f"requests under way: {num_live}; they have {drain_s:g} s")
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
