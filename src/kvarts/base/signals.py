"""Signals that ask a server to stop."""

from __future__ import annotations

import asyncio
import signal

__all__ = ["SIGNALS", "asked_to_stop"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def asked_to_stop() -> asyncio.Event:
    """Return an event of the running loop that is set by the first SIGTERM or SIGINT. A second one ends the process."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    return stopping
