"""Parts of `kvarts replay` that can be taken away: each is a room, a file of its own here, and a line below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from kvarts.settings import Given, Section

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.report.report import Report
    from kvarts.sim.config import ReplayConfig
    from kvarts.traffic.trace import Trace

__all__ = ["Outputs", "Part", "Results", "Run", "load_parts"]

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


class Outputs(Protocol):
    """Where the results of a replay go."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files that options name."""

    def observers(self) -> AbstractContextManager[Callable[[Any], Sequence[Any]]]:
        """Answer, while the replay runs, what observes a replica or a model."""

    def write(self, report: Any) -> None:
        """Write the report, and everything that is made from it."""


class Results(Protocol):
    """More results of a replay of one model. What is wrong with its files is found when it is made."""

    @property
    def paths(self) -> Sequence[Path]:
        """The files that options name."""

    def observers(self) -> AbstractContextManager[Callable[[int], Sequence[EventReader]]]:
        """Answer, while the replay runs, what observes each replica."""

    def write(self, report: Report) -> None:
        """Write what is made from the report."""


class Run(Protocol):
    """One call of `kvarts replay`, understood: what is replayed, on what, and where its results go."""

    config: Any

    @property
    def inputs(self) -> Sequence[Path]:
        """The files that are read, and directories of such."""

    def outputs(self, places: Mapping[str, Any]) -> Outputs:
        """Check where results go. Raise ConfigError and OutputError before anything is done."""

    def load(self) -> tuple[Any, Sequence[Trace]]:
        """Load what `kvarts.replay` replays on `config`, and return it and the traces in it."""


class Part:
    """What a room adds to `kvarts replay`: nothing, unless it says otherwise."""

    sections: tuple[Section, ...] = ()
    """Settings: options of the command line and tables of a file."""
    of_one_model = True
    """Whether its settings are about replays of one model as well, which are all that is planned."""
    tier_flag: str | None = None
    """The option that adds pages below the device."""

    def options(self) -> Sequence[click.Option]:
        """Return options besides those of `sections`. One stands in for any other with the same flag."""
        return ()

    def given(self, params: dict[str, Any]) -> Given:
        """Return what its own options say, and take them out of `params`."""
        return Given()

    def check(self, given: Given) -> None:
        """Raise ConfigError for what the command line and the file say together and cannot."""

    def run(self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]) -> Run | None:
        """Return the run where it is for this part, or None. What of `places` is its own it takes out."""
        return None

    def results(
        self, config: ReplayConfig, places: Mapping[str, Any], run_dir: Path | None, model: str | None
    ) -> Results | None:
        """Return what its own options, in `places`, and `run_dir` ask for; files of a `model` carry its name.

        Raises ConfigError and OutputError.
        """
        return None


@cache
def load_parts() -> tuple[Part, ...]:
    """Return the parts that there are."""
    return tuple(import_module(f"kvarts.cli.{name}").PART for name in PARTS)
