"""The processes of workers: one parent, which only starts and ends them, and one child for each worker.

The port is shared by SO_REUSEPORT: each worker has a listening socket, and the kernel hands it a share of the
connections. A worker ends as a single server does, at SIGTERM. The parent passes on the signals that it receives, and
ends all workers if one of them ends on its own: clients would lose a share of their connections, without a sign. A
worker whose parent was killed ends as well, because its end of a pipe closes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvarts.errors import ConfigError
from kvarts.openai_api.server import Address
from kvarts.signals import SIGNALS

__all__ = ["WorkerProcess", "WorkersEndedError", "start_workers"]

MOST_WORKERS = 64
LONGEST_PATH = 100
"""Length limit of the path of a UNIX socket, which is 108 bytes on Linux."""


class WorkersEndedError(Exception):
    """All workers have ended, and have printed why. `code`: the exit code of the command."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class WorkerProcess:
    """The process of one worker, as it sees itself.

    `rank`: its place, from 0, which is the rank of its engine. `listening`: its socket on the common port. `paths`: the
    private socket of each worker, by rank.
    """

    def __init__(self, rank: int, listening: socket.socket, paths: Sequence[Path], life: int, ready: int) -> None:
        self.rank = rank
        self.listening = listening
        self.paths = tuple(paths)
        self._life = life
        self._ready = ready

    def report_ready(self, what: str) -> None:
        """Notify the parent that requests are accepted. `what`: a description of the server, without a line break."""
        os.write(self._ready, f"{what}\n".encode())

    def follow_parent(self) -> None:
        """End like at SIGTERM when the parent's end of the pipe closes. For the running event loop."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._life)
            os.kill(os.getpid(), signal.SIGTERM)

        loop.add_reader(self._life, gone)


class _Child:
    """A worker, as its parent sees it. `ready`: a pipe that becomes readable when it is ready, and again at its end."""

    def __init__(self, rank: int, pid: int, ready: int) -> None:
        self.rank = rank
        self.pid = pid
        self.ready = ready
        self.code: int | None = None
        """Its exit code, once it has ended; negative: minus the signal that ended it."""
        self.what = b""
        """Its description of the server, once it is ready."""

    def wait_until_ready(self) -> None:
        """Wait for it. Raise WorkersEndedError if it ends instead."""
        while not self.what.endswith(b"\n"):
            part = os.read(self.ready, 4096)
            if not part:
                self.reap()
                raise WorkersEndedError(_code_of([self]) or 1)
            self.what += part

    def reap(self) -> None:
        """Wait until it has ended."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.code is None:
            os.kill(self.pid, number)


def start_workers(
    num_workers: int, address: Address, *, ready: Callable[[str, str], object], say: Callable[[str], object]
) -> WorkerProcess:
    """Start `num_workers` processes, and return in each of them. In the parent, raise WorkersEndedError at the end.

    `ready` receives the URL and a description of the server when all workers accept connections. The first one starts
    alone, so an error of all of them is printed once. Raises ConfigError for a number out of range, for an address that
    is not available, and where processes cannot share one.
    """
    if not 1 < num_workers <= MOST_WORKERS:
        raise ConfigError(f"must be from 1 to {MOST_WORKERS}, got {num_workers}", field="workers")
    if not sys.platform.startswith("linux"):
        raise ConfigError("needs Linux, whose kernel shares out connections", field="workers", hint="Leave it out.")
    listening = address.listen_shared(num_workers)
    directory = Path(tempfile.mkdtemp(prefix="kvarts-workers-"))
    paths = [directory / str(rank) for rank in range(num_workers)]
    children: list[_Child] = []
    life, kept = os.pipe()
    try:
        if len(os.fsencode(paths[-1])) > LONGEST_PATH:
            what = f"needs a directory with a shorter path than {directory.parent}"
            raise ConfigError(what, field="workers", hint="Set TMPDIR to one.")
        for rank in range(num_workers):
            starts, started = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                os.setpgid(0, 0)  # a key of the terminal signals the parent, which passes it on: once, not twice
                os.close(kept)
                for other in listening:
                    if other is not listening[rank]:
                        other.close()
                return WorkerProcess(rank, listening[rank], paths, life, started)
            os.close(started)
            children.append(_Child(rank, pid, starts))
            if rank == 0:
                children[0].wait_until_ready()
        for child in children:
            child.wait_until_ready()
        url = address.url_of(listening[0])
        for each in listening:
            each.close()
        ready(url, children[0].what.decode().strip())
        asyncio.run(_watch(children, say))
        raise WorkersEndedError(_code_of(children))
    except BaseException:
        for child in children:
            child.send(signal.SIGTERM)
        for child in children:
            child.reap()
        shutil.rmtree(directory, ignore_errors=True)
        raise


async def _watch(children: Sequence[_Child], say: Callable[[str], object]) -> None:
    """Pass signals on until all workers have ended. If one ends without a signal, end the others."""
    loop = asyncio.get_running_loop()
    num_signals = 0

    def pass_on(number: int) -> None:
        nonlocal num_signals
        num_signals += 1
        for child in children:
            child.send(number)

    for number in (*SIGNALS, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, pass_on, number)
    ends = [loop.create_future() for _ in children]

    def ended(place: int) -> None:
        child = children[place]
        loop.remove_reader(child.ready)
        child.reap()
        ends[place].set_result(None)
        if not num_signals:
            say(f"worker {child.rank} {_how(child)}: all others end as well")
            pass_on(signal.SIGTERM)

    for place, child in enumerate(children):
        loop.add_reader(child.ready, ended, place)
    await asyncio.gather(*ends)


def _how(child: _Child) -> str:
    assert child.code is not None
    return f"was ended by signal {-child.code}" if child.code < 0 else f"has ended with code {child.code}"


def _code_of(children: Sequence[_Child]) -> int:
    """Return the exit code of the command: that of the first worker that has failed, as a shell reports it."""
    code = next((child.code for child in children if child.code), 0)
    return code if code >= 0 else 128 - code
