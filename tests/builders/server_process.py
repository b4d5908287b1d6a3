"""A server in a process of its own, watched from outside: its memory, and what another client of it has to wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

__all__ = ["MIB", "Process", "Waits", "kvarts_process", "python_process", "waits_of"]

MIB = 1 << 20
START_S = 60.0
PATIENCE_S = 5.0
"""How long a machine with other work may keep a call waiting."""


class Process:
    """A command that is running; what it wrote to standard error so far is in `lines`."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.lines: list[str] = []
        self._come = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._come:
                self.lines.append(line)
                self._come.notify_all()
        with self._come:
            self._come.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that matches. Fails if there is none in time."""
        deadline = time.monotonic() + START_S
        with self._come:
            while True:
                for line in self.lines:
                    if (match := re.search(pattern, line)) is not None:
                        return match
                left = deadline - time.monotonic()
                assert left > 0 and self.popen.poll() is None, "".join(self.lines)
                self._come.wait(min(left, 0.5))

    @property
    def resident_bytes(self) -> int:
        """Its memory now."""
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The most that it has had since `forget_peak`, or its beginning."""
        return self._status("VmHWM")

    @property
    def busy_s(self) -> float:
        """The processor time that it has used."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def seconds_of(self, call: Callable[[], object]) -> float:
        """How long `call` waits for this process: while it computes, and what is beyond the patience with a machine."""
        begin_s, busy_s = time.perf_counter(), self.busy_s
        call()
        took_s = time.perf_counter() - begin_s
        return min(took_s, max(self.busy_s - busy_s, took_s - PATIENCE_S))

    def forget_peak(self) -> None:
        """Begin to look for the peak now."""
        Path(f"/proc/{self.popen.pid}/clear_refs").write_text("5")

    def stop(self) -> int:
        """End it as a user does; its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(30)

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.popen.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", text)
        assert found is not None, text
        return int(found[1]) * 1024


def kvarts_process(*arguments: str, cwd: Path | None = None) -> AbstractContextManager[Process]:
    """`kvarts ARGUMENTS`, killed at the end if it still runs."""
    return python_process("kvarts", *arguments, cwd=cwd)


@contextmanager
def python_process(*arguments: str, cwd: Path | None = None) -> Iterator[Process]:
    """`python -m ARGUMENTS`, killed at the end if it still runs."""
    popen = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
    )
    process = Process(popen)
    try:
        yield process
    finally:
        popen.kill()
        popen.wait()
        process._reader.join(10)
        for stream in (popen.stdout, popen.stderr):
            assert stream is not None
            stream.close()


class Waits:
    """How long the calls of an innocent client waited for a process, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.errors: list[BaseException] = []

    @property
    def p99_s(self) -> float:
        """The 99th percentile, nearest rank."""
        ordered = sorted(self.seconds)
        assert ordered, "no call was made"
        return ordered[max(0, -(-len(ordered) * 99 // 100) - 1)]


@contextmanager
def waits_of(process: Process, call: Callable[[], object], *, every_s: float = 0.02) -> Iterator[Waits]:
    """Call `process` again and again in a thread while the block runs. Fails at its end if a call did."""
    waits, stop = Waits(), threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            try:
                waits.seconds.append(process.seconds_of(call))
            except Exception as error:
                waits.errors.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield waits
    finally:
        stop.set()
        thread.join(30)
    assert not waits.errors, waits.errors
