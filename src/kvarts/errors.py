"""Errors that a user can cause, with the place, the problem, and what to do next.

Bugs of kvarts are assertions, and an expected outcome ("no free page") is a return value: neither is here.
Each class has the exit code that the command line ends with.
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
    """An invalid setting: an unknown name, a value out of range, or settings that exclude each other."""


class MissingFileError(KvartsError):
    """A file that does not exist."""

    exit_code = 3


class InputError(KvartsError):
    """A file that exists and cannot be read in the expected format."""

    exit_code = 4


class OutputError(KvartsError):
    """A result that could not be written. No partial file is left behind."""

    exit_code = 7


def parts_of(error: Exception) -> tuple[str, str | None]:
    """Return the problem and the field of msgspec's ``what - at `$.field` ``; the field is None for the whole value."""
    what, _, where = str(error).partition(" - at ")
    return what, where.strip("`").removeprefix("$").removeprefix(".") or None
