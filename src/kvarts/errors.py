"""The user's mistakes, as exceptions that say where, what, and what to do next.

Our own bugs are assertions, and an expected outcome ("no free page") is a return value: neither is here.
Each class carries the exit code that the command line answers with.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["ConfigError", "InputError", "KvartsError", "MissingFileError", "OutputError", "parts_of"]


class KvartsError(Exception):
    """Base of every error a user can cause. `str()` is one line: `where: what. What to do next.`"""

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        hint: str | None = None,
        path: Path | str | None = None,
        line: int | None = None,
        field: str | None = None,
    ) -> None:
        self.what = what
        self.hint = hint
        self.path = path
        self.line = line
        self.field = field
        super().__init__(what)

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.path, self.line) if part is not None)
        parts = [part for part in (place, self.field, self.what) if part]
        message = ": ".join(parts)
        return f"{message}. {self.hint}" if self.hint else message


class ConfigError(KvartsError):
    """A setting that cannot be: an unknown name, a value out of range, two settings that exclude each other."""


class MissingFileError(KvartsError):
    """A file that is not there."""

    exit_code = 3


class InputError(KvartsError):
    """A file that is there and cannot be read as what it should be."""

    exit_code = 4


class OutputError(KvartsError):
    """A result that could not be written. Nothing half written is left behind."""

    exit_code = 7


def parts_of(error: Exception) -> tuple[str, str | None]:
    """What msgspec found wrong, and the field, from ``what - at `$.field` ``; None for the whole value."""
    what, _, where = str(error).partition(" - at ")
    return what, where.strip("`").removeprefix("$").removeprefix(".") or None
