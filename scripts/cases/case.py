"""What a case of `same_bytes.py` is: a name, commands, and the files they need."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Case", "Command", "case"]


@dataclass(frozen=True)
class Command:
    """A command: `kvarts` with arguments, or `python` with a program, and the exit code that it must have."""

    program: str
    arguments: tuple[str, ...]
    exit_code: int = 0

    def __str__(self) -> str:
        expected = f"[{self.exit_code}] " if self.exit_code else ""
        return f"{expected}{self.program} {shlex.join(self.arguments)}"


@dataclass(frozen=True)
class Case:
    """Commands that run one after the other in a directory with the inputs and `files`, texts by name.

    `needs`: files outside the checkouts, without which it is left out. `is_whole`: it runs whole traces.
    """

    name: str
    commands: tuple[Command, ...]
    files: dict[str, str] = field(default_factory=dict)
    needs: tuple[Path, ...] = ()
    is_whole: bool = False
    needs_torch: bool = False


def case(
    name: str,
    text: str,
    *,
    files: dict[str, str] | None = None,
    needs: tuple[Path, ...] = (),
    is_whole: bool = False,
    needs_torch: bool = False,
) -> Case:
    """Return a case whose commands are the lines of `text`, each behind `[CODE]` if its exit code is not 0."""
    commands = []
    for line in filter(None, map(str.strip, text.splitlines())):
        words = shlex.split(line)
        exit_code = int(words.pop(0)[1:-1]) if words[0].startswith("[") else 0
        commands.append(Command(words[0], tuple(words[1:]), exit_code))
    return Case(name, tuple(commands), files or {}, needs, is_whole, needs_torch)
