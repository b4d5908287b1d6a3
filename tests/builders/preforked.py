"""Commands in processes of their own, forked from one that has imported what most commands import.

`python -m kvarts mock` spends nearly all of the time until it listens on imports. So each test process that needs such
a command starts one *stem*: a process without threads, which imports and then forks for each command that is asked
for. The command runs from `kvarts.__main__.run` on, with real arguments, environment, folder, streams and signals.

    test process              stem                keeper              command
      start() -- JSON, 3 streams --> fork ---------> fork --------------> run()
      pid     <---------------------- pid of the command
      wait()  <-------------------------------------- its exit status

What a fork cannot show needs `python_process` or `subprocess`: what is imported, the seed of hashes, the encodings that
Python chooses when it starts.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any

IMPORTED = (
    "kvarts.cli.commands",
    "kvarts.cli.main",
    "kvarts.cli.mock",
    "kvarts.cli.replay",
    "kvarts.cli.serve",
    "kvarts.proof.audit",
    "kvarts.sim.fleet",
    "kvarts.doors.openai.http",
    "kvarts.doors.grpc",
    "kvarts.run.sessions",
    "httptools",
    "prometheus_client",
    "uvloop",
    "zmq.asyncio",
)
"""What the stem imports, where it is installed. More would do no harm, less makes commands slower."""

STATUS = struct.Struct("=q")

__all__ = ["Command", "run", "start"]


class Command:
    """A command that is running, with as much of subprocess.Popen as tests use. Its streams are text."""

    def __init__(self, pid: int, status: int, out: IO[str] | None, err: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = out
        self.stderr = err
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return its exit code if it has ended, negative for a signal."""
        return self._ended_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code when it has ended; raise TimeoutExpired if that takes too long."""
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("kvarts", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """End it as a user does."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def _ended_within(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, STATUS.size)
            os.close(self._status)
            self.returncode = STATUS.unpack(said)[0] if said else -signal.SIGKILL
        return self.returncode


def start(
    *arguments: object,
    out: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Command:
    """Start `kvarts ARGUMENTS`: standard error is a pipe, and so is standard output if `out` is subprocess.PIPE."""
    outs = os.pipe() if out == subprocess.PIPE else None
    errs = os.pipe()
    to = outs[1] if outs is not None else os.open(os.devnull, os.O_WRONLY) if out is None else os.dup(_number(out))
    pid, status = _started(arguments, to, errs[1], env, cwd)
    return Command(pid, status, None if outs is None else os.fdopen(outs[0]), os.fdopen(errs[0]))


def run(
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run `kvarts ARGUMENTS` to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid, status = _started(arguments, os.dup(out.fileno()), os.dup(err.fileno()), env, cwd)
        with Command(pid, status, None, None) as command:
            code = command.wait(timeout)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(list(map(str, arguments)), code, out.read(), err.read())


def _number(stream: int | IO[Any]) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def _started(
    arguments: Sequence[object], out: int, err: int, env: Mapping[str, str] | None, cwd: str | Path | None
) -> tuple[int, int]:
    """Have the stem start a command, and close its ends of the streams here; return its pid and the pipe of its status.

    A stem that has come to its end does not answer: then unpacking fails.
    """
    status, status_end = os.pipe()
    asked = json.dumps([list(map(str, arguments)), dict(os.environ if env is None else env), str(cwd or Path.cwd())])
    stem = _stem()
    try:
        socket.send_fds(stem, [STATUS.pack(len(asked.encode()))], [out, err, status_end])
        stem.sendall(asked.encode())
    finally:
        for number in (out, err, status_end):
            os.close(number)
    return STATUS.unpack(stem.recv(STATUS.size, socket.MSG_WAITALL))[0], status


@cache
def _stem() -> socket.socket:
    """Return the connection to this test process's stem, which ends with it."""
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "builders.preforked", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[number],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
    )
    theirs.close()

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait(10)

    return ours


# The stem -------------------------------------------------------------------------------------------------


def _grow(control: socket.socket) -> None:
    """Fork for each command that is asked for; return in the command."""
    while True:
        head, numbers, _, _ = socket.recv_fds(control, STATUS.size, 3)
        if not head:
            os._exit(0)
        arguments, env, cwd = json.loads(control.recv(STATUS.unpack(head)[0], socket.MSG_WAITALL))
        if not (keeper := os.fork()):
            _keep(control, numbers, arguments, env, cwd)
            return
        for number in numbers:
            os.close(number)
        del keeper  # the system forgets it when it ends, since nobody asks for SIGCHLD


def _keep(control: socket.socket, numbers: Sequence[int], arguments: list[str], env: dict[str, str], cwd: str) -> None:
    """Fork the command, tell its pid, and its status when it has ended; return in the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, err, status = numbers
    command = os.fork()
    if command:
        os.close(out)
        os.close(err)
        control.sendall(STATUS.pack(command))
        control.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _kill_if_nobody_waits(command, status)
        _, ended = os.waitpid(command, 0)
        os.write(status, STATUS.pack(os.waitstatus_to_exitcode(ended)))
        os._exit(0)
    control.close()
    os.close(status)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what is in the background ignore it
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # As with `python -m kvarts`: help names the program after it, and processes that the command starts import it.
    sys.modules["__main__"] = import_module("kvarts.__main__")
    sys.argv = [str(sys.modules["__main__"].__file__), *arguments]


def _kill_if_nobody_waits(command: int, status: int) -> None:
    """Return when `command` has ended; kill it if the test process ends first, even by SIGKILL: no server is left."""
    if hasattr(os, "pidfd_open"):
        either = select.poll()
        either.register(pidfd := os.pidfd_open(command), select.POLLIN)
        either.register(status, 0)  # an error is told: nobody has the other end
        if pidfd not in dict(either.poll()):
            os.kill(command, signal.SIGKILL)
            os._exit(1)


def _import_what_there_is() -> None:
    for name in IMPORTED:
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Be a stem, and in each process that it forks a command."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end this
    _import_what_there_is()
    _grow(control)
    from kvarts.__main__ import run as run_command

    run_command()


if __name__ == "__main__":
    main()
