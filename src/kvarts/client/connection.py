"""Connection of a client to a server: address, TLS and token, shared by both clients."""

from __future__ import annotations

from pathlib import Path

import grpc

from kvarts.files import read_bytes

__all__ = ["credentials_of", "metadata_of", "options_of"]

OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a list of all sessions may be long
    # A server whose connection broke sends nothing: during a call, pings detect it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


HERE = ("localhost", "127.0.0.1", "[::1]")


def options_of(address: str) -> list[tuple[str, int]]:
    """Return the options of a channel. A proxy set in the environment is not used for this machine."""
    return [*OPTIONS, ("grpc.enable_http_proxy", int(address.rpartition(":")[0] not in HERE))]


def credentials_of(tls: bool, tls_ca: Path | str | None) -> grpc.ChannelCredentials | None:
    """Return the credentials of a TLS channel; None without TLS. Raise MissingFileError or InputError."""
    if tls_ca is None:
        return grpc.ssl_channel_credentials() if tls else None
    return grpc.ssl_channel_credentials(read_bytes(Path(tls_ca), hint="Check the path of the certificate."))


def metadata_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of each call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)
