"""Address and protection of a server, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import msgspec

from kvarts.errors import ConfigError
from kvarts.reach import check_certificate, check_reach

__all__ = ["Binding"]


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
