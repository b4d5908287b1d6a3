"""Paths on the command line, by what a command does with them: every one is an input, an output or both.

No type looks at the file system: what cannot be read or written is found by `kvarts.files`, with the exit code and the
words that the library has for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

__all__ = ["DERIVED", "DIRECTORY", "INPUT", "OUTPUT", "PathRole", "role_of"]

PathRole = Literal["input", "output", "derived", "directory"]


class _PathType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    name = "path"

    def __init__(self, role: PathRole) -> None:
        self.role: PathRole = role

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if value == "":
            self.fail("a path is not empty", param, ctx)
        if value == "-" and self.role == "directory":
            self.fail("standard output is no directory; write ./- for one of that name", param, ctx)
        return Path(value)


INPUT = _PathType("input")
"""A file, or a directory, that is read."""
OUTPUT = _PathType("output")
"""A file that is written."""
DERIVED = _PathType("derived")
"""The name of files that are written, one for each replica or model: the command checks them."""
DIRECTORY = _PathType("directory")
"""A directory of the command's own."""


def role_of(param: click.Parameter) -> PathRole | None:
    """Return what a command does with the path of a parameter; None where it is none."""
    role: PathRole | None = getattr(param.type, "role", None)
    return role
