"""Where a server listens, and how: checked before anything is loaded."""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path
from typing import Any

import grpc
import msgspec

from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.files import reading

__all__ = ["Binding"]


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """An address, `HOST:PORT` with port 0 for a free one, and what protects it: TLS, or that it is this machine's own.

    Without TLS, an address that other machines can reach needs `insecure`. Raises ConfigError, and MissingFileError or
    InputError for the files of a certificate and its key.
    """

    address: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        host, colon, port = self.address.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"{self.address!r} is no address", field="bind", hint="Write HOST:PORT.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("a certificate and its key go together", field="tls_cert", hint="Give both files.")
        if self.tls_cert is not None and self.tls_key is not None:
            _check_certificate(self.tls_cert, self.tls_key)
        elif not self.insecure and not _is_loopback(host):
            raise ConfigError(
                f"other machines can reach {self.address}, and nothing would be encrypted",
                field="bind",
                hint="Give --tls-cert and --tls-key, bind to 127.0.0.1, or add --insecure.",
            )

    @property
    def is_encrypted(self) -> bool:
        """Whether it has TLS."""
        return self.tls_cert is not None

    def add_to(self, server: Any) -> str:
        """Let a server listen; return the address with the port that it got. Raise ConfigError if it is taken."""
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_certificate(cert: Path, key: Path) -> None:
    for path in (cert, key):
        with reading(path):
            is_there = path.exists()
        if not is_there:
            raise MissingFileError("no such file", path=path, hint="Check the paths of the certificate and its key.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise InputError(f"is no certificate for the key {key}: {error}", path=cert) from None
