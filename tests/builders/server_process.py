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
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MIB", "Process", "Waits", "kvarts_process", "waits_of"]

MIB = 1 << 20
START_S = 60.0


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


@contextmanager
def kvarts_process(*arguments: str, cwd: Path | None = None, umask: int | None = None) -> Iterator[Process]:
    """`kvarts ARGUMENTS`, killed at the end if it still runs."""
    popen = subprocess.Popen(
        [sys.executable, "-m", "kvarts", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        umask=-1 if umask is None else umask,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
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
    """How long the calls of an innocent client took, in seconds."""

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
def waits_of(call: Callable[[], object], *, every_s: float = 0.02) -> Iterator[Waits]:
    """Call again and again in a thread while the block runs. Fails at its end if a call did."""
    waits, stop = Waits(), threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            start = time.perf_counter()
            try:
                call()
            except Exception as error:
                waits.errors.append(error)
                return
            waits.seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield waits
    finally:
        stop.set()
        thread.join(30)
    assert not waits.errors, waits.errors
