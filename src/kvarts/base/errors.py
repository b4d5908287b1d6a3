"""Errors that a user can cause, with the place, the problem, and a hint.

Bugs of kvarts are assertions, and expected outcomes ("no free page") are return values; neither is defined here.
Each class has the exit code of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "ENDS_EARLY",
    "ConfigError",
    "InputError",
    "KvartsError",
    "MissingFileError",
    "OutputError",
    "did_you_mean",
    "first_line",
    "parts_of",
    "problem_of",
    "renamed",
    "with_type",
]

ENDS_EARLY = "ends too early, or has half of a character's two escapes, such as \\ud83d alone"
"""The problem of JSON that ends early."""
MOST_PROBLEM_CHARS = 200
MOST_MATCHES = 4


class KvartsError(Exception):
    """Base of every error a user can cause. `str()` is one line: `where: what. What to do next.`

    >>> from kvarts import KvartsError, load_trace
    >>> try:
    ...     load_trace("sample:moncake")
    ... except KvartsError as error:
    ...     print(error)
    sample:moncake: is not bundled. Did you mean sample:mooncake?
    """

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the error to another process as it is, whatever the arguments of its class are."""
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[KvartsError], args: tuple[object, ...]) -> KvartsError:
    return kind.__new__(kind, *args)


class ConfigError(KvartsError):
    """An invalid setting: an unknown name, a value out of range, or settings that exclude each other.

    >>> from kvarts import ConfigError, ReplayConfig
    >>> try:
    ...     ReplayConfig(num_pages=0)
    ... except ConfigError as error:
    ...     print(error.field, error.what)
    num_pages must be ...
    """


def renamed(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    """Return `error`; if its field has another name in `names`, with that name. The field of a file stays."""
    name = None if error.path is not None or error.field is None else names.get(error.field)
    return error if name is None else ConfigError(error.what, hint=error.hint, field=name)


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
    """Return the problem and the field of msgspec's ``what - at `$.field` ``; the field is None for the whole value.

    msgspec quotes a value or a name in full, however long it is: the problem is cut.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply", None
    what, at, where = str(error).rpartition(" - at `$")
    if not at:
        what, where = where, ""
    if what == "Input data was truncated":  # msgspec says so of a lone surrogate, too, wherever it stands
        what = ENDS_EARLY
    if len(what) > MOST_PROBLEM_CHARS:
        what = f"{what[:MOST_PROBLEM_CHARS]}..."
    return what, where.removesuffix("`").removeprefix(".") or None


def problem_of(error: Exception) -> str:
    """Return why a value cannot be decoded, as `FIELD: PROBLEM` where msgspec names a field."""
    what, field = parts_of(error)
    return what if field is None else f"{field}: {what}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def with_type(error: BaseException) -> str:
    """Return the name of an error's type, and the first line of its message if it has one."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line[:MOST_PROBLEM_CHARS]}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return `Did you mean NAME?` with the closest of `known`, or an empty text if none is close.

    Case, punctuation and an owner before a slash (`meta-llama/`) are ignored. A name that is a prefix of a known name,
    or begins with one, is close.
    """
    matches = _closest(name, known)
    if not matches:
        return ""
    *others, last = matches
    return f"Did you mean {' or '.join([', '.join(others), last] if others else [last])}?"


def _closest(name: str, known: Sequence[str]) -> list[str]:
    from difflib import SequenceMatcher  # most runs have no misspelled name

    asked = _bare(name)
    if not asked:
        return []
    bare = {each: _bare(each) for each in known}
    same = [each for each, text in bare.items() if text == asked]
    if same:
        return same[:MOST_MATCHES]
    within = [each for each, text in bare.items() if text.startswith(asked) or (text and asked.startswith(text))]
    if within:
        return sorted(within, key=lambda each: abs(len(bare[each]) - len(asked)))[:MOST_MATCHES]
    ratios = {each: SequenceMatcher(None, asked, text).ratio() for each, text in bare.items()}
    best = max(ratios.values(), default=0.0)
    return [each for each, ratio in ratios.items() if ratio >= max(0.7, best - 0.02)][:MOST_MATCHES]


def _bare(name: str) -> str:
    """Return the letters and digits of a name, without its owner and the maker's prefix."""
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower().removeprefix("nvidia-").removeprefix("meta-"))
