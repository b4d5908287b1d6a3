"""Addresses that other machines can reach, and the protection required there. The rule is the same for every door.

Beyond loopback, a door must use encryption and ask for a token. To omit either, --insecure must be given.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from pathlib import Path

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.base.files import reading
from kvarts.base.limits import brief

__all__ = ["check_certificate", "check_endpoint", "check_reach", "host_port", "is_loopback"]

_ENDPOINT = re.compile(r"tcp://[^\s/]+:(?P<port>\d{1,5})|ipc://\S+|inproc://\S+")
MAX_PORT = 65_535


def host_port(host: str, port: int) -> str:
    """Return an address as text; an IPv6 host is put into brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`. Names other than localhost are assumed to be reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_reach(host: str, *, field: str, insecure: bool, encrypts: bool, asks_for_token: bool, missing: str) -> None:
    """Raise ConfigError for a door that other machines can reach and that is not protected.

    `insecure`: waive the rule. `missing`: the options that would protect it.
    """
    if is_loopback(host) or (encrypts and asks_for_token) or insecure:
        return
    lacks = [text for has, text in ((encrypts, "nothing would be encrypted"),
                                    (asks_for_token, "no token would be asked for")) if not has]  # fmt: skip
    raise ConfigError(
        f"other machines reach {host}, and {' and '.join(lacks)}",
        field=field,
        hint=f"{missing}, use a loopback address such as 127.0.0.1, or give --insecure.",
    )


def check_endpoint(endpoint: str, *, field: str, binds: bool, offset: int = 0) -> None:
    """Raise ConfigError for an invalid ZMQ endpoint, or one whose port plus `offset` is not a valid port.

    `binds`: port 0 is allowed and stands for any free port.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None:
        raise ConfigError(
            f"is no endpoint: {brief(endpoint)}", field=field, hint="An endpoint is tcp://HOST:PORT or ipc://PATH."
        )
    port = match["port"]
    if port is not None and not (0 if binds else 1) <= int(port) + offset <= MAX_PORT:
        what = f"has no port for rank {offset}" if offset else "is no port that can be used"
        raise ConfigError(f"{what}: {endpoint}", field=field, hint=f"A port is a number from 1 to {MAX_PORT}.")


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raise ConfigError if only one is given; MissingFileError or InputError if the files are not a matching pair."""
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
