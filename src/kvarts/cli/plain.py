"""Command lines that are plain enough to be read without click, whose import takes longer than a short replay.

These are `--version`, and `replay` with a trace, numbers, names and the options that print or write its results.
Anything else, such as help, options of parts, mistakes and completion, is left to click: `plain_call` returns None.
A command line that is read here has the meaning that it has for click.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from kvarts.cli.process import load_msgspec
from kvarts.errors import ConfigError, renamed
from kvarts.files import spelled

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["plain_call"]

RESULTS = {"--report": "report_file", "--requests": "requests_file"}
"""Options of results whose value is a path, with their parameters."""


def plain_call(words: Sequence[str]) -> Callable[[], int] | None:
    """Return a function that runs a command line and returns its exit code; None if click has to read it."""
    if not words or any(name.startswith("_") and name.endswith("_COMPLETE") for name in os.environ):
        return None
    if words[0] == "replay":
        load_msgspec()
        return _replay(words[1:])
    return _print_version if list(words) == ["--version"] else None


def _print_version() -> int:
    from kvarts.cli.process import print_bytes, version_line

    print_bytes(f"{version_line()}\n".encode())
    return 0


def _replay(words: Sequence[str]) -> Callable[[], int] | None:
    trace: str | None = None
    as_json = False
    typed: dict[str, Any] = {}
    kinds: Mapping[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not _is_plain(word):
            return None
        if not word.startswith("-"):
            if trace is not None:
                return None
            trace = spelled(word)
            continue
        flag, equals, text = word.partition("=")
        if flag in typed:
            return None
        if word == "--json":
            as_json = True
            continue
        if flag not in RESULTS:
            kinds = kinds or _kinds()
            if flag not in kinds:
                return None
            if kinds[flag] is bool:
                if equals:
                    return None
                typed[flag] = True
                continue
        if not equals:
            text = next(rest, "")
        if not text or text.startswith("-") or not _is_plain(text):
            return None
        value = _path_of(text) if flag in RESULTS else _value(text, kinds[flag])
        if value is None or (flag == "--model" and "=" in text):
            return None
        typed[flag] = value
    return lambda: _run(trace, typed, as_json=as_json)


def _path_of(text: str) -> Path:
    from pathlib import Path

    return Path(text)


def _is_plain(word: str) -> bool:
    """Return whether a word can have been typed: bytes that are not UTF-8 are lone surrogates."""
    return word.isprintable() and bool(word)


def _kinds() -> dict[str, Any]:
    """Return the kinds of the values of settings by their options."""
    from kvarts.cli.replaying import OWN_SECTIONS
    from kvarts.settings import settings_by_param, value_kind

    settings = settings_by_param(OWN_SECTIONS).values()
    return {setting.flag: value_kind(setting.kind) for setting in settings if setting.flag is not None}


def _value(text: str, kind: Any) -> Any:
    """Return `text` as a value of the kind; None if it is not obviously one."""
    match kind:
        case tuple():
            return text if text in kind else None
        case each if each is str:
            return text
    try:
        value = int(text) if kind is not float else float(text)
    except ValueError:
        return None
    is_fine = value in kind if isinstance(kind, range) else isfinite(value)
    return value if is_fine else None


def _run(trace: str | None, typed: Mapping[str, Any], *, as_json: bool) -> int:
    from kvarts.cli.replaying import OWN_SECTIONS, run_replay
    from kvarts.settings import Given, given_by_flags, settings_by_param

    places = {
        "as_json": as_json,
        "run_dir": None,
        "workers": None,
        **{name: typed.get(flag) for flag, name in RESULTS.items()},
    }
    options = {param: flag for flag, param in RESULTS.items()}
    given = Given()
    if not typed.keys() <= RESULTS.keys():
        options |= {param: setting.flag or "" for param, setting in settings_by_param(OWN_SECTIONS).items()}
        given = given_by_flags({param: typed.get(flag) for param, flag in options.items()}, OWN_SECTIONS)

    def check(is_set: Callable[[str], bool]) -> None:
        if typed:
            from kvarts.cli.effects import check_typed

            check_typed("replay", options.values(), typed, is_set=is_set)

    try:
        return run_replay(given, trace, OWN_SECTIONS, (), places, check_effects=check)
    except ConfigError as error:
        fields = {flag.removeprefix("--").replace("-", "_"): flag for flag in options.values()}
        named = renamed(error, {"trace": "TRACE", **options, **fields})
        if named is error:
            raise
        raise named from error
