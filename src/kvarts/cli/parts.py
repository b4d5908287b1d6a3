"""Removable parts of `kvarts replay`: each is a room, a module of this package, and a line in PARTS."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from kvarts.base.settings import Given, Section

if TYPE_CHECKING:
    from pathlib import Path

    import click

    from kvarts.sim.config import ReplayConfig
    from kvarts.sim.traffic.trace import Trace

__all__ = ["CommandPart", "Outputs", "ReplayRun", "concern_parts", "engine_options", "load_parts"]
__all__ += ["check_engine_options", "with_engine_options"]

PARTS: tuple[str, ...] = (
    "fleet",
    "kv_events",
    "offload",
    "plan_policy",
    "record",
    "routers",
    "session_replay",
    "sharing",
)
"""Modules of this package; each has a `PART`."""

READ_BY_PARTS = ("--config", "--html", "--run-dir")
"""Options of the command itself that parts read as well."""


class Outputs(Protocol):
    """Destinations of the results of a replay, or of a part's own results. The constructor checks its files."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files that options name."""

    def observers(self) -> AbstractContextManager[Callable[[Any], Sequence[Any]]]:
        """Yield a function that returns the observers of a replica or a model, for the time of the replay."""

    def write(self, report: Any) -> None:
        """Write the report, and all files that are made from it."""


class ReplayRun(Protocol):
    """One call of `kvarts replay` after parsing: its traffic, configuration, and destinations of results."""

    config: Any

    @property
    def inputs(self) -> Sequence[Path]:
        """The files that are read, and directories of such files."""

    def outputs(self, places: Mapping[str, Any]) -> Outputs:
        """Return the outputs, with their paths checked. Raise ConfigError and OutputError before any work is done."""

    def load(self) -> tuple[Any, Sequence[Trace]]:
        """Return the traffic that `kvarts.replay` replays on `config`, and the traces in it."""


class CommandPart:
    """A room's additions to `kvarts replay`. By default it adds nothing."""

    sections: tuple[Section, ...] = ()
    """Settings: command-line options, and tables of a settings file."""
    of_one_model = True
    """Whether its settings also apply to replays of one model; `kvarts plan` has only those."""
    is_of_engines = False
    """Whether its own options are settings of an engine, which `kvarts plan` and `kvarts mock` have as well."""
    tier_flag: str | None = None
    """The option that adds pages below the device."""

    def options(self) -> Sequence[click.Option]:
        """Return options besides those of `sections`. Each replaces any other option with the same flag."""
        return ()

    def given(self, params: dict[str, Any]) -> Given:
        """Return the settings from the part's own options, and remove these from `params`."""
        return Given()

    def check(self, given: Given) -> None:
        """Raise ConfigError for settings of the command line and the file that cannot be combined."""

    def run(
        self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]
    ) -> ReplayRun | None:
        """Return the run if the settings are for this part, else None. Removes the part's own options from `places`."""
        return None

    def results(
        self, config: ReplayConfig, places: Mapping[str, Any], run_dir: Path | None, model: str | None
    ) -> Outputs | None:
        """Return the results requested by the part's own options, in `places`, and by `run_dir`.

        Names of files include `model`, if given. Raises ConfigError and OutputError.
        """
        return None


@cache
def load_parts() -> tuple[CommandPart, ...]:
    """Return the parts that are installed."""
    return tuple(import_module(f"kvarts.cli.{name}").PART for name in PARTS)


def engine_options() -> list[click.Option]:
    """Return the parts' own options that are settings of an engine."""
    return [option for part in load_parts() if part.is_of_engines for option in part.options()]


def check_engine_options(given: Given) -> None:
    """Raise ConfigError for settings of an engine, of parts with options of their own, that cannot be combined."""
    for part in load_parts():
        if part.is_of_engines:
            part.check(given)


def with_engine_options(params: dict[str, Any], given: Given) -> Given:
    """Return `given` below the settings from these options, and remove the options from `params`."""
    for part in load_parts():
        if part.is_of_engines:
            given = part.given(params).over(given)
    return given


def concern_parts(args: Sequence[str], own: Collection[str]) -> bool:
    """Return whether a part may have to see `args`: they contain an option that is not in `own`, or that parts read.

    `own`: the options that are declared without parts. Importing all parts takes longer than a short replay.
    """
    models = []
    for place, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name == "--model":
            models.append(value if equals else "".join(args[place + 1 : place + 2]))
        elif word.startswith("-") and (name not in own or name in READ_BY_PARTS):
            return True
    return len(models) > 1 or any("=" in model for model in models)  # models with names are a part's
