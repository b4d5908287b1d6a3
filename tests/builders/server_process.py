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

from builders import preforked

__all__ = ["MIB", "Process", "Waits", "kvarts_process", "python_process", "waits_of"]

MIB = 1 << 20
START_S = 180.0
THIS_THREAD = Path("/proc/thread-self")


class Process:
    """A command that is running; what it wrote to standard error so far is in `lines`."""

    def __init__(self, popen: subprocess.Popen[str] | preforked.Command) -> None:
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

    def seconds_of(self, call: Callable[[], object]) -> float:
        """How long `call` takes, less the time that the machine has no core for it.

        Other work on the machine delays a server and its clients alike; an attack delays a server that has a core.
        """
        before, own_s, begin_s = self._seconds_without_a_core(), _without_a_core(THIS_THREAD), time.perf_counter()
        call()
        took_s = time.perf_counter() - begin_s
        delayed_s = max(total - before.get(task, 0.0) for task, total in self._seconds_without_a_core().items())
        return max(0.0, took_s - delayed_s - (_without_a_core(THIS_THREAD) - own_s))

    def _seconds_without_a_core(self) -> dict[str, float]:
        """How long each of its threads was ready to run and had no core, since it began."""
        return {task.name: _without_a_core(task) for task in Path(f"/proc/{self.popen.pid}/task").iterdir()}

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
    """`kvarts ARGUMENTS`, forked from a process that has imported what it needs; killed at the end if it still runs."""
    return _killed_at_the_end(preforked.start(*arguments, cwd=cwd))


def python_process(*arguments: str, cwd: Path | None = None) -> AbstractContextManager[Process]:
    """`python -m ARGUMENTS`, killed at the end if it still runs."""
    return _killed_at_the_end(
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
        )
    )


@contextmanager
def _killed_at_the_end(popen: subprocess.Popen[str] | preforked.Command) -> Iterator[Process]:
    process = Process(popen)
    try:
        yield process
    finally:
        popen.kill()
        popen.wait()
        process._reader.join(10)
        for stream in (popen.stdout, popen.stderr):
            if stream is not None:
                stream.close()


def _without_a_core(task: Path) -> float:
    """Seconds that a thread was ready to run and had no core; 0 where Linux does not tell, or if it has ended."""
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


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


def assert_short_waits(
    process: Process,
    call: Callable[[], object],
    attack: Callable[[], object],
    *,
    most_s: float,
    least_s: float = 0.0,
    at_least: int = 1,
) -> Waits:
    """Attack so many times and so long, and hold `process` to a bound of what an innocent client's `call` waits.

    The machine has other work now and then, and an attack that is over soon leaves time for a few calls: where their
    99th percentile is above the bound, it is attacked again, for as long as it takes to make a hundred calls.
    """
    for least_calls in (0, 100, 100, 100):
        with waits_of(process, call) as waits:
            began, count, spent_s = time.monotonic(), 0, 0.0
            while count < at_least or spent_s < least_s or (len(waits.seconds) < least_calls and spent_s < 30.0):
                attack()
                count, spent_s = count + 1, time.monotonic() - began
        if waits.p99_s <= most_s:
            return waits
    raise AssertionError(f"of {len(waits.seconds)} calls, the longest took {sorted(waits.seconds)[-5:]} s")
