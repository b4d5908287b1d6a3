"""Ports of the loopback address for servers that are told their port."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

__all__ = ["free_port", "free_ports"]

PORTS = range(10_000, 30_000)
"""Below those that systems give to sockets without a port, which another process may get before the server binds it."""


def free_port() -> int:
    """A port that is free now."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now."""
    chosen = random.SystemRandom()  # processes that test at the same time share a seed
    for _ in range(1000):
        first = chosen.randrange(PORTS.start, PORTS.stop - count)
        with ExitStack() as opened:
            try:
                for port in range(first, first + count):
                    opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError(f"no {count} ports in a row are free")
