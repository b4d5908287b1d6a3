"""Runs of a command line: in this process, in another interpreter that answers many, or in a process of its own."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvarts
from kvarts.cli.main import main

from builders.calls import snapshot

__all__ = ["Ended", "Other", "run_here", "run_process", "serve"]

LIMIT_S = 60
"""A line that takes more processor time has failed."""


class LateError(BaseException):
    """A line takes too long; no command catches it."""


@dataclass(frozen=True)
class Ended:
    """How a line ended: exit code, standard output and error, and the files that it wrote, by their paths.

    `busy_s`: the processor time that it took here.
    """

    code: int
    out: bytes
    err: str
    files: dict[str, bytes | None]
    busy_s: float = 0.0


def run_here(arguments: Sequence[str], folder: Path) -> Ended:
    """Run a line in this process and a copy of `folder`; code 1 for an exception that leaves the command line."""
    with _copy(folder) as place:
        before = snapshot(place)
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        home, argv, begin_s = Path.cwd(), sys.argv, time.process_time()
        os.chdir(place)
        sys.argv = ["kvarts", *arguments]
        signal.signal(signal.SIGPROF, _late)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = main()
        except BaseException:  # whatever leaves it is a traceback for the user
            code = 1
            err.write(traceback.format_exc())
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.argv = argv
            os.chdir(home)
        busy_s = time.process_time() - begin_s
        return Ended(code, _bytes(out), _bytes(err).decode(), _written(before, place), busy_s)


def run_process(arguments: Sequence[str], folder: Path) -> Ended:
    """Run a line as its user does."""
    with _copy(folder) as place:
        before = snapshot(place)
        environment = {**os.environ, "PYTHONPATH": str(Path(kvarts.__file__).parents[1])}
        command = [sys.executable, "-m", "kvarts", *arguments]
        ended = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, timeout=LIMIT_S * 5, check=False
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr.decode(), _written(before, place))


class Other:
    """Another interpreter with kvarts from the folder `source`, such as a compiled build, that runs many lines."""

    def __init__(self, source: Path) -> None:
        paths = os.pathsep.join([str(source), str(Path(__file__).parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz", "--serve"],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: Sequence[str], folder: Path) -> Ended:
        """Do what `run_here` does, there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([list(arguments), str(folder)]), file=self._process.stdin, flush=True)
        answer: Any = json.loads(self._process.stdout.readline())
        files = {name: None if data is None else base64.b64decode(data) for name, data in answer["files"].items()}
        return Ended(answer["code"], base64.b64decode(answer["out"]), answer["err"], files)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Answer lines of standard input, for `Other`."""
    for text in sys.stdin:
        arguments, folder = json.loads(text)
        ended = run_here(arguments, Path(folder))
        files = {name: None if data is None else base64.b64encode(data).decode() for name, data in ended.files.items()}
        answer = {"code": ended.code, "out": base64.b64encode(ended.out).decode(), "err": ended.err, "files": files}
        print(json.dumps(answer), flush=True)


@contextmanager
def _copy(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvarts-fuzz-") as parent:
        yield Path(shutil.copytree(folder, Path(parent, "here")))


def _written(before: dict[str, bytes | None], place: Path) -> dict[str, bytes | None]:
    return {name: data for name, data in snapshot(place).items() if name not in before or before[name] != data}


def _bytes(stream: io.TextIOWrapper) -> bytes:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue()


def _late(number: int, frame: object) -> None:
    raise LateError(f"the line takes more than {LIMIT_S} s of processor time")
