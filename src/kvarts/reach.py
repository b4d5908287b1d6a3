"""Addresses that other machines reach, and the protection that a door needs there. One rule for every door.

Beyond loopback a door encrypts and asks for a token. Without one of the two, --insecure is needed twice: once is easily
copied from an example.
"""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path

from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.files import reading

__all__ = ["INSECURE", "check_certificate", "check_reach", "is_loopback"]

INSECURE = 2
"""The number of times that --insecure is given to waive the rule."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`. A name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_reach(host: str, *, field: str, insecure: int, encrypts: bool, asks_for_token: bool, missing: str) -> None:
    """Raise ConfigError for a door that other machines reach and that does not protect what passes through it.

    `insecure`: how often --insecure was given. `missing`: the options that would protect it.
    """
    if is_loopback(host) or (encrypts and asks_for_token) or insecure >= INSECURE:
        return
    lacks = [text for has, text in ((encrypts, "nothing would be encrypted"),
                                    (asks_for_token, "no token would be asked for")) if not has]  # fmt: skip
    raise ConfigError(
        f"other machines reach {host}, and {' and '.join(lacks)}",
        field=field,
        hint=f"{missing}, use a loopback address such as 127.0.0.1, or give --insecure twice.",
    )


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raise ConfigError for one without the other, MissingFileError or InputError for files that are no such pair."""
    if (cert is None) != (key is None):
        raise ConfigError("a certificate and its key go together", field="tls_cert", hint="Give both files.")
    if cert is None or key is None:
        return
    for path in (cert, key):
        with reading(path):
            is_there = path.exists()
        if not is_there:
            raise MissingFileError("no such file", path=path, hint="Check the paths of the certificate and its key.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise InputError(f"is not a certificate for the key {key}: {error}", path=cert) from None
