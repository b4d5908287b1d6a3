"""A gRPC server for the sessions door: health, reflection, tokens, and an orderly shutdown.

Its address and protection are checked before anything is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvarts.errors import ConfigError
from kvarts.reach import check_certificate, check_reach
from kvarts.serve.owners import CallGate, Owners
from kvarts.serve.sessions import CONTRACT, SERVICE, SessionService
from kvarts.session.runtime import SessionRuntime
from kvarts.signals import asked_to_stop

__all__ = ["MAX_MESSAGE_BYTES", "Binding", "SessionServer", "serve_until_signal"]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Size limit of a request."""

MAX_STREAMS = 4096
"""Concurrent calls per connection; further ones wait at the client."""

OPTIONS = [
    ("grpc.so_reuseport", 0),  # two servers on one port would each get some of the calls
    # A client whose connection broke sends nothing: during a call, pings detect it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # With probes, windows grow with the network's speed, and each call waiting to be read holds megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
]

WATCHERS_S = 0.5
"""Time for calls still open at shutdown, which watch the server's health, to learn of its end."""

M_MMAP_THRESHOLD = -3
"""Parameter of mallopt."""

SERVICES = ("", CONTRACT, SERVICE)


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """An address, `HOST:PORT` with port 0 for a free one, and its protection: TLS, and whether a token is required.

    `insecure`: number of times --insecure was given, see kvarts.reach. Raises ConfigError for an address that other
    machines reach without protection, and MissingFileError or InputError for the files of a certificate and its key.
    """

    address: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    asks_for_token: bool = False
    insecure: int = 0

    def __post_init__(self) -> None:
        host, colon, port = self.address.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"{self.address!r} is no address", field="bind", hint="Write HOST:PORT.")
        check_certificate(self.tls_cert, self.tls_key)
        check_reach(
            host,
            field="bind",
            insecure=self.insecure,
            encrypts=self.is_encrypted,
            asks_for_token=self.asks_for_token,
            missing="Give --tls-cert, --tls-key and --token-file",
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether it has TLS."""
        return self.tls_cert is not None

    def add_to(self, server: Any) -> str:
        """Make a server listen; return the address with the actual port. Raise ConfigError if it is taken."""
        try:
            if self.tls_cert is not None and self.tls_key is not None:
                pair = (self.tls_key.read_bytes(), self.tls_cert.read_bytes())
                port = server.add_secure_port(self.address, grpc.ssl_server_credentials([pair]))
            else:
                port = server.add_insecure_port(self.address)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {self.address}", field="bind", hint="Is the port taken, or the host not here?"
            ) from None
        return f"{self.address.rpartition(':')[0]}:{port}"


class SessionServer:
    """Sessions of one runtime on one port, for one event loop.

    `owners`: the owners of sessions, by token; without them, all sessions belong to the owner ``, and no token is
    needed. `max_message_bytes`: a longer request is refused with RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        runtime: SessionRuntime,
        binding: Binding,
        *,
        owners: Owners | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._binding = binding
        self._door = SessionService(runtime)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._server = grpc.aio.server(
            interceptors=[CallGate(owners)],
            options=[*OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)],
        )
        self._server.add_generic_rpc_handlers(self._door.handlers())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*SERVICES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self) -> str:
        """Listen; return the address with the actual port. Raise ConfigError if that is not possible."""
        address = self._binding.add_to(self._server)
        for service in SERVICES:
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return address

    async def stop(self, grace_s: float = 5.0) -> None:
        """Report the end to health checks, shut the runtime down, let calls in progress end, and stop listening."""
        await self._health.enter_graceful_shutdown()
        try:
            await self._door.close(grace_s)
        finally:
            await self._server.stop(WATCHERS_S)


def give_back_large_blocks() -> None:
    """Make glibc return each freed block of a megabyte or more to the system at once.

    By default, glibc keeps freed blocks of up to 32 MiB: in total, the peak of the largest messages held together.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


async def serve_until_signal(server: SessionServer, listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; call `listening` with the address once clients can connect.

    A second signal ends the process immediately.
    """
    stopping = asked_to_stop()
    give_back_large_blocks()
    try:
        listening(await server.start())
        await stopping.wait()
    finally:
        await server.stop()
