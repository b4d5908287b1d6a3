"""Types of paths on the command line, by use: every path is an input, an output or both.

No type looks at the file system. `kvarts.files` reports paths that cannot be read or written, with the library's exit
codes and messages.
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
            self.fail("standard output is not a directory; use ./- for a directory of that name", param, ctx)
        return Path(value)


INPUT = _PathType("input")
"""A file, or a directory, that is read."""
OUTPUT = _PathType("output")
"""A file that is written."""
DERIVED = _PathType("derived")
"""A name from which those of several files are made, one per replica or model; the command checks them."""
DIRECTORY = _PathType("directory")
"""A directory that only the command writes to."""


def role_of(param: click.Parameter) -> PathRole | None:
    """Return how a command uses the path of a parameter; None if the parameter is not a path."""
    role: PathRole | None = getattr(param.type, "role", None)
    return role
