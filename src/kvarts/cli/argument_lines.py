"""Argument lines of other servers, in the settings of kvarts: `--vllm-args` and `--sglang-args`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

import click
import msgspec

from kvarts.base.errors import ConfigError, did_you_mean
from kvarts.base.files import read_text

__all__ = [
    "Pairs",
    "Server",
    "WrittenOption",
    "options_in",
    "options_of",
    "refuse",
    "server_of",
    "settings_of_line",
]

Pairs = list[tuple[str, str]]
"""Keys of settings and their values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """What the options of a server mean here. `name`: the option that takes its line; `command`: what starts it.

    `starts`: the words that a line may begin with. `keys`: options with a value, and the keys of settings with the same
    meaning and values; `counts`: those of them that `counted` reads first. `flags`: options without a value, and the
    settings that they give, None: what kvarts does anyway. `anyway`: keys of what kvarts does anyway, in commands that
    do not have them. `defaults`: options that give no setting with these values, which are what kvarts does anyway.
    `readers`: options that need more than that; each gets the name as it was written and the value. `instead`: keys of
    commands that do not have the key on the left. `short`: names of options. `abbreviates`: an option may be cut.
    `ignored`: returns which keys have no effect beside the others of a line. `finish`: completes what a line gives; it
    gets the other words of the command line, and whether the command knows a key.
    """

    name: str
    command: str
    starts: Sequence[Sequence[str]]
    keys: Mapping[str, str]
    counts: Collection[str]
    counted: Callable[[str], str]
    flags: Mapping[str, tuple[str, str] | None]
    anyway: Collection[str] = ()
    defaults: Mapping[str, Sequence[str]]
    readers: Mapping[str, Callable[[str, str], Pairs]]
    instead: Mapping[str, str]
    short: Mapping[str, str]
    abbreviates: bool = False
    ignored: Callable[[Mapping[str, str]], Collection[str]] | None = None
    finish: Callable[[Pairs, Sequence[str], Callable[[str], bool]], Pairs] | None = None


@cache
def server_of(name: str) -> Server:
    """Return the server whose argument line the option `name` takes."""
    server: Server = import_module(f"kvarts.cli.{name[2:].replace('-', '_')}").SERVER
    return server


@cache
def options_of(name: str) -> dict[str, tuple[str, ...]]:
    """Return the names of all options of the server, without dashes: `flags`, `values`, and `several` values."""
    path = Path(__file__).with_name(f"{name.removeprefix('--').removesuffix('-args')}_options.json")
    found = msgspec.json.decode(path.read_bytes())
    return {kind: tuple(found[kind]) for kind in ("flags", "values", "several")}


class WrittenOption(NamedTuple):
    """An option of a server as it was written, in `words`. `option`: its full name, without dashes.

    `name`: the first word, without a value; `value`: empty for a flag. A word that is not an option is the value of "".
    """

    option: str
    name: str
    value: str
    words: tuple[str, ...]


def refuse(name: str, why: str) -> NoReturn:
    """Raise UsageError for a line that the option `name` takes."""
    raise click.UsageError(f"Invalid value for '{name}': {why}")


def options_in(words: Sequence[str], server: Server) -> Iterator[WrittenOption]:
    """Yield the options of an argument line; a name that is not known as one without a value.

    Raise UsageError for a missing value.
    """
    theirs = options_of(server.name)
    left = list(words)[::-1]
    while left:
        word = left.pop()
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            yield WrittenOption("", "", word, (word,))
            continue
        option = name.lstrip("-").replace("_", "-")
        option = server.short.get(option, option)
        if server.abbreviates:
            option = _whole(option, theirs)
        taken = [word]
        if option in theirs["values"] or option in theirs["several"]:
            if not equals:
                if not left:
                    refuse(server.name, f"{name} needs a value.")
                value = left.pop()
                taken.append(value)
            while option in theirs["several"] and left and not left[-1].startswith("-"):
                taken.append(left.pop())
        yield WrittenOption(option, name, value, tuple(taken))


def _whole(option: str, theirs: Mapping[str, Sequence[str]]) -> str:
    """Return the only option that begins like `option`, which may be one itself."""
    begin_so = [each for names in theirs.values() for each in names if each.startswith(option)]
    return begin_so[0] if len(begin_so) == 1 else option


def settings_of_line(
    text: str,
    name: str,
    knows: Callable[[str], bool],
    *,
    has_model: bool = False,
    takes_unknown: bool = False,
    beside: Sequence[str] = (),
    say: Callable[[str], object] = click.echo,
) -> Pairs:
    """Return the keys and values of the argument line that the option `name` takes, or of the file after an `@`.

    `knows`: whether the command has a key. `has_model`: the command has a model of its own. `takes_unknown`: names that
    are not known are those of a later version, without effect here. `beside`: the other words of the command line.
    Names without effect here are passed to `say`. Raise UsageError for a name or value that is not known,
    MissingFileError or InputError for the file.
    """
    server = server_of(name)
    found: Pairs = []
    idle: list[str] = []
    theirs = {each for names in options_of(name).values() for each in names} | server.flags.keys()
    for option, written, value, _ in options_in(_words(text, server), server):
        if not option:
            found.append(("model", value))
        elif value in server.defaults.get(option, ()):
            continue
        elif option in server.readers:
            found += server.readers[option](written, value)
        elif option in server.flags:
            given = server.flags[option]
            found += [] if given is None else [given]
        elif option not in theirs and not takes_unknown:
            raise _unknown(server, written, option)
        elif option in server.keys:
            found.append((server.keys[option], server.counted(value) if option in server.counts else value))
        elif option in server.defaults:
            choices = ", ".join(server.defaults[option])
            refuse(name, f"{written} {value} is not known. Use one of {choices}.")
        else:
            idle.append(written)
    if server.ignored is not None:
        ignored = server.ignored(dict(found))
        idle = [*(_spelled(key, server) for key, _ in found if key in ignored), *idle]
        found = [pair for pair in found if pair[0] not in ignored]
    if server.finish is not None:
        found = server.finish(found, beside, knows)
    if has_model:
        found = [(key, value) for key, value in found if key != "model"]
    found = [(key if knows(key) else server.instead.get(key, key), value) for key, value in found]
    idle += [_spelled(key, server) for key, _ in found if not knows(key) and key not in server.anyway]
    if idle:
        say(f"kvarts: {name}: without effect here: {', '.join(idle)}")
    return [(key, value) for key, value in found if knows(key)]


def _words(text: str, server: Server) -> list[str]:
    """Return the words of an argument line or its file, without those that start the server."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("is not text in UTF-8", field=server.name) from None
    if text.startswith("@"):
        text = read_text(Path(text[1:]), hint=f"Check the path of {server.name}.")
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        refuse(server.name, f"{error}.")
    return next((words[len(start) :] for start in server.starts if words[: len(start)] == list(start)), words)


def _spelled(key: str, server: Server) -> str:
    names: Mapping[str, str] = {server.instead.get(key, key): name for name, key in server.keys.items()}
    names = {**names, **{key: name for name, key in server.keys.items()}}
    flags = {given[0]: name for name, given in server.flags.items() if given is not None}
    return f"--{names.get(key) or flags.get(key) or key.replace('_', '-')}"


def _unknown(server: Server, written: str, option: str) -> click.UsageError:
    known: Sequence[str] = [name for names in options_of(server.name).values() for name in names]
    close = did_you_mean(option, known) or "Leave it out."
    return click.UsageError(
        f"Invalid value for '{server.name}': {server.command}'s {written} is not known here. {close}"
    )
