"""The part of `kvarts replay` that simulates prefill and decode on separate workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.cli import record
from kvarts.cli.fleet_table import render_fleet
from kvarts.cli.parts import Part, Run
from kvarts.cli.printing import print_bytes
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_standard_output, write_whole
from kvarts.fleet.config import SECTIONS, FleetConfig, is_of_fleet, resolve_fleet
from kvarts.report.run_directory import per_replica
from kvarts.settings import Given, Section

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.fleet.report import FleetReport
    from kvarts.traffic.trace import Trace

__all__ = ["PART", "FleetRun"]

NOT_YET = {
    "run_dir": "--run-dir",
    "html_file": "--html",
    "events_file": "--events",
}
"""Results that a fleet does not write yet, by parameter."""


class FleetPart(Part):
    """Options of pools and links."""

    sections = SECTIONS

    def run(self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]) -> Run | None:
        """Return the run if any setting of a pool is given."""
        if not is_of_fleet(given):
            return None
        if given.names("models"):
            raise ConfigError("is of one model", field="--prefill-replicas", hint="Leave out --model NAME=MODEL.")
        return FleetRun(given, trace, sections)


class FleetRun:
    """A replay on a fleet. Raises ConfigError when constructed, before any work is done."""

    def __init__(self, given: Given, trace: Path | None, sections: Sequence[Section]) -> None:
        self._given = given
        self._trace = trace
        self.config = resolve_fleet(given, sections)

    @property
    def inputs(self) -> list[Path]:
        """The trace that the settings file names."""
        return [self._given.path_of("trace")] if "trace" in self._given else []

    def outputs(self, places: Mapping[str, Any]) -> FleetOutputs:
        """Return the outputs, with their paths checked."""
        return FleetOutputs(self.config, places)

    def load(self) -> tuple[Trace, Sequence[Trace]]:
        """Load the trace."""
        from kvarts.cli.sample import load_traffic

        trace = load_traffic(self._given, self._trace)
        return trace, [trace]


class FleetOutputs:
    """The files of one replay on a fleet, checked before it begins. Raises ConfigError and OutputError."""

    def __init__(self, config: FleetConfig, places: Mapping[str, Any]) -> None:
        for name, flag in NOT_YET.items():
            if places.get(name) is not None:
                raise ConfigError("is not written of a fleet yet", field=flag, hint="Leave it out.")
        self._as_json: bool = places["as_json"]
        self._report: Path | None = places["report_file"]
        self._requests: Path | None = places["requests_file"]
        timeline: Path | None = places.get("timeline_file")
        self._timeline = timeline
        self._every: int = places.get("timeline_every", 1)
        named = [path for path in (self._report, self._requests) if path is not None]
        self.paths = [*named, *(() if timeline is None else per_replica(timeline, config.replicas))]
        if timeline is not None:
            record.check_timelines([timeline])
        for path in self.paths:
            check_writable(path)

    @contextmanager
    def observers(self) -> Iterator[Callable[[int], Sequence[EventReader]]]:
        """Yield a function that returns the observers of a worker: none."""
        yield lambda worker: ()

    def write(self, report: FleetReport) -> None:
        """Write all files, and print the report unless one of them is standard output."""
        if self._requests is not None:
            write_whole(self._requests, report.requests_jsonl())
        if self._timeline is not None:
            paths = per_replica(self._timeline, len(report.step_logs))  # scaling may have added workers
            record.write_timelines(report, [paths], every=self._every)
        if self._report is not None:
            write_whole(self._report, report.to_json())
        if not any(map(is_standard_output, self.paths)):
            print_bytes(report.to_json() if self._as_json else render_fleet(report.summary).encode())


PART = FleetPart()
