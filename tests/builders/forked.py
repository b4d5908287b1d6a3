"""A command in a process of its own, made by fork: what it needs is imported already."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from kvarts.cli.main import run_main

SIGNALS = (signal.SIGINT, signal.SIGTERM)

__all__ = ["Ended", "fork", "opened", "run_forked", "wait_for"]


class Ended:
    """How a process ended, and what it said on standard error. `code`: negative for a signal."""

    def __init__(self, code: int, err: str) -> None:
        self.code = code
        self.err = err


def fork(arguments: Sequence[object], err: Path, prepare: Callable[[], object] = lambda: None) -> int:
    """Start `kvarts` with `arguments`; return the process. `prepare` runs in it, before its streams are looked at."""
    sys.stdout.flush()
    # A signal that comes at once must not reach what the child has of the test runner.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    process = os.fork()
    if process:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return process
    try:
        for number in SIGNALS:
            signal.signal(number, _end_at_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 2)
        sys.stdin = sys.__stdin__
        sys.stdout, sys.stderr = opened(1, "utf-8"), opened(2, "utf-8")
        sys.argv = ["kvarts", *map(str, arguments)]
        prepare()
        run_main()
    except BaseException:
        import traceback

        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _end_at_once(number: int, _: object) -> None:
    os._exit(128 + number)


def opened(number: int, encoding: str) -> IO[str]:
    """Return a standard stream of that encoding."""
    return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding)


def wait_for(process: int, err: Path, *, limit_s: float = 60.0) -> Ended:
    """Wait until a process has ended; kill it, and fail, if that takes too long."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return Ended(os.waitstatus_to_exitcode(status), err.read_text() if err.exists() else "")
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError(f"it hangs: {err.read_text()}")


def run_forked(arguments: Sequence[object], err: Path, prepare: Callable[[], object] = lambda: None) -> Ended:
    """Run `kvarts` with `arguments` to its end."""
    return wait_for(fork(arguments, err, prepare), err)
