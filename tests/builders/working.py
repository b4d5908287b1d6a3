"""Work in a thread beside a command that runs until a signal ends it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["give_time", "working"]


def give_time(seconds: float) -> None:
    """Wait in pieces: a machine that stalls takes one of them away, and leaves the others to the command."""
    for _ in range(5):
        time.sleep(seconds / 5)


@contextmanager
def working(work: Callable[[], object], *, seconds_after: float = 0.5) -> Iterator[None]:
    """Do `work` in a thread, give the command some time for what came of it, and end it as Ctrl-C does."""

    def run() -> None:
        try:
            work()
            give_time(seconds_after)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
