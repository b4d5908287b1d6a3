"""Commands of the README and the docs: all of them parse, and those of the first pages run in a fresh environment.

A fresh environment is a clone without anything else, in which the commands of a page are typed in their order.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvarts.cli.commands import cli
from kvarts.cli.options import Command

from builders.ports import free_port

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "bash", "text")
LISTENS = re.compile(rb"on https?://|listening on ")
FRESH = ["README.md", "docs/start.md"]
"""Pages that begin without kvarts."""


def commands_of(page: Path) -> Iterator[str]:
    """The lines of a page in which a shell calls kvarts, without the folder of its environment."""
    for kind, text in BLOCK.findall(page.read_text()):
        if kind in SHELL:
            for line in text.replace("\\\n", " ").splitlines():
                called = re.match(r"(?:\$ )?(?:\w+=\S+ )?(?:\.venv/bin/)?(kvarts [a-z].*)", line)
                if called is not None and "<" not in line.partition("#")[0]:
                    yield called[1]


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_of(page))], ids=lambda page: page.name)
def test_each_command_has_the_options_that_are_there(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "invoke", lambda self, ctx: None)
    for line in commands_of(page):
        words = shlex.split(line.replace("$PID", "1"), comments=True)[1:]
        words = words[: next((place for place, word in enumerate(words) if word in ("|", ">", "&")), len(words))]
        try:
            cli.main(words, "kvarts", standalone_mode=False)
        except click.ClickException as error:
            pytest.fail(f"{line}\n{error.format_message()}")


def needs_network() -> None:
    try:
        socket.create_connection(("pypi.org", 443), timeout=5).close()
    except OSError:
        if not any(name in os.environ for name in ("PIP_INDEX_URL", "PIP_CONFIG_FILE")) and not _has_index():
            pytest.skip("a fresh environment needs a package index")


def _has_index() -> bool:
    ended = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False)
    return "index" in ended.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", FRESH)
def test_the_commands_of_a_first_page_run_in_a_fresh_environment(name: str, tmp_path: Path) -> None:
    needs_network()
    clone = tmp_path / "clone"
    clone.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    packed = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=files, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=clone, input=packed.stdout, check=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    num_run = 0
    with subprocess.Popen(
        ["bash"], cwd=clone, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            typed = Typed(shell, tmp_path)
            for kind, text in BLOCK.findall((ROOT / name).read_text()):
                if kind in ("sh", "bash") and "pytest" not in text:
                    typed.run(text)
                    num_run += 1
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
    assert num_run == 2


class Typed:
    """A shell for blocks of commands: each block must succeed, and one may start a server."""

    def __init__(self, shell: subprocess.Popen[bytes], folder: Path) -> None:
        self._shell = shell
        self._folder = folder
        self._seen = b""
        self._port = str(free_port())  # pages that are typed at the same time name one port

    def run(self, block: str, *, timeout_s: float = 600.0) -> None:
        """Run a block; wait until it has ended, or listens; at the end, stop the processes that it left."""
        lines = block.replace("8000", self._port).rstrip("\n").splitlines()
        serves = bool(re.match(r"(\.venv/bin/)?kvarts (mock|serve)\b(?!.*&$)", lines[-1]))
        text = "\n".join(lines) + (" &\n" if serves else "\n")
        assert self._shell.stdin is not None
        # Later commands send requests to a server in the background: wait for its port first.
        waits = f"until (: < /dev/tcp/127.0.0.1/{self._port}) 2>&-; do sleep 0.1; done"
        text = re.sub(r"(kvarts mock .*&)\n", rf"\1\n{waits}\n", text)
        script = self._folder / "block.sh"
        script.write_text(text)
        # Commands must not read what is typed after them.
        self._shell.stdin.write(f"set -e\n. {script} < /dev/null\necho 'block '$?' ended'\n".encode())
        self._shell.stdin.flush()
        self._wait(re.compile(rb"block 0 ended\n"), timeout_s)
        if serves:
            self._wait(LISTENS, 60)
        self._shell.stdin.write(b"kill $(jobs -p) 2>&- || true; wait\n")
        self._shell.stdin.flush()  # nothing is left to write once the shell is killed
        self._seen = b""

    def _wait(self, for_what: re.Pattern[bytes], timeout_s: float) -> None:
        assert self._shell.stdout is not None
        end_s = time.monotonic() + timeout_s
        while for_what.search(self._seen) is None:
            ready, _, _ = select.select([self._shell.stdout], [], [], max(0.0, end_s - time.monotonic()))
            data = os.read(self._shell.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                pytest.fail(f"waited for {for_what.pattern!r}:\n{self._seen.decode(errors='replace')[-3000:]}")
            self._seen += data
