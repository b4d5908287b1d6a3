"""Values that a shell completes: names of models, devices, routers, samples, eviction orders and keys of `--set`.

Commands attach them by the names of options and arguments. Modules with the names are imported while a shell asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import scandir
from typing import Any, Literal

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from kvarts.base.errors import ConfigError
from kvarts.base.files import PREFIX, SAMPLES

__all__ = ["NamesType", "PathRole", "complete_in_shells", "keys_completed", "names_of", "path_completed"]

PathRole = Literal["input", "output", "derived", "directory"]
"""How a command uses a path."""


def _models() -> Iterable[str]:
    from kvarts.cost.hardware.model_config import hub_models, preset_names

    return (*preset_names(), *sorted(hub_models(), key=str.lower))


def _downloads() -> Iterable[str]:
    from kvarts.run.model_files import MODELS

    return MODELS


def _devices() -> Iterable[str]:
    from kvarts.cost.hardware.device import device_names

    return device_names()


def _torch_devices() -> Iterable[str]:
    return ("auto", "cpu", "cuda")


def _routers() -> Iterable[str]:
    from kvarts.sim.routers.policies import POLICIES

    return POLICIES


def _orders() -> Iterable[str]:
    from kvarts.sim.eviction import ALL_POLICIES

    return ALL_POLICIES


def _samples() -> Iterable[str]:
    return (f"{PREFIX}{name}" for name in SAMPLES)


Names = Callable[[], Iterable[str]]
OPTIONS: Mapping[str, Names] = {
    "--device": _devices,
    "--eviction": _orders,
    "--model": _models,
    "--policy": _orders,
    "--router": _routers,
    "--routers": _routers,
    "--set eviction": _orders,
    "MODEL": _models,
    "NAME": _downloads,
}
"""By option, key of `--set`, or argument."""
OF_WEIGHTS: Mapping[str, Names] = {"--device": _torch_devices, "--model": _downloads, "MODEL": _downloads}
"""For commands that run weights."""
TRACES = ("TRACE", "TRACES", "[TRACE]", "TRACE...", "--trace")
MOST_ENTRIES = 200


def names_of(param: click.Parameter, *, has_weights: bool) -> Names | None:
    """Return what lists the names that a parameter takes; None for other values."""
    place = param.opts[0] if param.param_type_name == "option" else param.human_readable_name.strip("[].").upper()
    return (OF_WEIGHTS.get(place) if has_weights else None) or OPTIONS.get(place)


class NamesType(click.types.StringParamType):
    """A text that is often one of some names, also as the last of several with commas between them."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        """Return the names that begin like this, or else let the shell complete a path."""
        first, comma, last = incomplete.rpartition(",")
        found = [
            CompletionItem(f"{first}{comma}{name}") for name in self._names() if name.lower().startswith(last.lower())
        ]
        return found or [_by_shell(incomplete, "file")]


def path_completed(role: PathRole, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
    """Return the samples that begin like this, for a trace, with the files here; or else let the shell complete."""
    is_trace = param.metavar in TRACES or param.human_readable_name in TRACES or param.opts[0] in TRACES
    samples = [name for name in _samples() if name.startswith(incomplete)] if is_trace and role == "input" else []
    if not samples:
        return [_by_shell(incomplete, "dir" if role == "directory" else "file")]
    with scandir() as entries:
        names = [each.name for each in entries if each.name.startswith(incomplete) and each.name[0] != "."]
    here = sorted(name for name in names if name.isprintable())  # an answer is a line of UTF-8
    return [CompletionItem(name) for name in (*samples, *here[:MOST_ENTRIES])]


def _by_shell(incomplete: str, kind: str) -> CompletionItem[Any]:
    """Let the shell complete a path, which need not be UTF-8."""
    return CompletionItem(incomplete.encode(errors="replace").decode(), type=kind)


def keys_completed(
    keys: Mapping[str, click.Parameter], ctx: click.Context, incomplete: str
) -> list[CompletionItem[Any]]:
    """Return the keys of `--set` that begin like this, or the values of one."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [CompletionItem(f"{name}=") for name in keys if name.startswith(key)]
    if key not in keys:
        return []
    param = keys[key]
    found = param.type.shell_complete(ctx, param, value)
    if param.type is click.BOOL:
        found = [CompletionItem(name) for name in ("true", "false") if name.startswith(value)]
    return [CompletionItem(f"{key}={item.value}") for item in found if item.type == "plain"]


class _Guarded(ShellComplete):
    """The variables of a shell are texts like others: ones that no shell sets are refused."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one at it. Raise ConfigError."""
        try:
            return super().get_completion_args()
        except (LookupError, ValueError):
            raise ConfigError(
                "are not those of a command line in a shell",
                field="COMP_WORDS and COMP_CWORD",
                hint="Shells set them: `kvarts completion` installs what does.",
            ) from None


class _BashWords(BashComplete):
    """Bash divides words at `:` and `=`: they are joined again, and answers leave out what it has."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one at it."""
        from os import environ

        words, place = split_arg_string(environ["COMP_WORDS"]), int(environ["COMP_CWORD"])
        words = [*words, ""][: place + 1]
        whole: list[str] = []
        for word in words:
            if whole and (word in (":", "=") or whole[-1][-1:] in (":", "=")):
                whole[-1] += word
            else:
                whole.append(word)
        self._has = max(whole[-1].rfind(":"), whole[-1].rfind("=")) + 1
        if whole[-1].startswith("--"):  # click itself divides --option=value
            self._has = max(0, whole[-1].rfind(":") - whole[-1].find("="))
        return whole[1:-1], whole[-1]

    def format_completion(self, item: CompletionItem[Any]) -> str:
        """Return an answer without what bash has already."""
        return f"{item.type},{item.value[self._has :]}"


class _Bash(_Guarded, _BashWords):
    pass


class _Zsh(_Guarded, ZshComplete):
    pass


class _Fish(_Guarded, FishComplete):
    pass


def complete_in_shells() -> None:
    """Let click complete command lines, in bash with names that have colons."""
    for kind in (_Bash, _Zsh, _Fish):
        add_completion_class(kind)
