"""The part of `kvarts replay` that simulates prefill and decode on separate workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.cli import record
from kvarts.cli.fleet_table import render_fleet
from kvarts.cli.parts import CommandPart, ReplayRun
from kvarts.cli.printing import print_bytes, tell_whole_pages
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_standard_output, write_whole
from kvarts.fleet.config import SECTIONS, FleetConfig, is_of_fleet, resolve_fleet
from kvarts.report.run_directory import REPORT, REQUESTS, TIMELINE, per_replica
from kvarts.settings import Given, Section

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.fleet.report import FleetReport
    from kvarts.traffic.trace import Trace

__all__ = ["PART", "FleetRun"]


class FleetPart(CommandPart):
    """Options of pools and links."""

    sections = SECTIONS

    def run(
        self, given: Given, trace: Path | None, sections: Sequence[Section], places: dict[str, Any]
    ) -> ReplayRun | None:
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
        for pool in self.config.pools:
            tell_whole_pages(pool.each, f"the workers in pool {pool.name or pool.role}")

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
        if places.get("events_file") is not None:
            raise ConfigError("is not written of a fleet yet", field="--events", hint="Leave it out.")
        self._as_json: bool = places["as_json"]
        self._every: int = places.get("timeline_every", 1)
        self._reports = _given(places["report_file"])
        self._requests = _given(places["requests_file"])
        self._timelines = _given(places.get("timeline_file"))
        record.check_timelines(self._timelines)
        of_workers = [each for path in self._timelines for each in per_replica(path, config.replicas)]
        self.paths = [*self._reports, *self._requests, *_given(places.get("html_file")), *of_workers]
        for path in self.paths:
            check_writable(path)
        self._run_dir: Path | None = places.get("run_dir")
        if self._run_dir is not None:
            self._reports.append(self._run_dir / REPORT)
            self._requests.append(self._run_dir / REQUESTS)
            self._timelines.append(self._run_dir / TIMELINE)

    @contextmanager
    def observers(self) -> Iterator[Callable[[int], Sequence[EventReader]]]:
        """Yield a function that returns the observers of a worker: none."""
        yield lambda worker: ()

    def write(self, report: FleetReport) -> None:
        """Write all files, and print the report unless one of them is standard output."""
        for path in self._requests:
            write_whole(path, report.requests_jsonl())
        if self._timelines:
            num_workers = len(report.step_logs)  # scaling may have added some
            groups = [per_replica(path, num_workers) for path in self._timelines]
            record.write_timelines(report, groups, every=self._every)
        if self._run_dir is not None:
            from kvarts.cli.outputs import write_about

            write_about(self._run_dir, report)
        for path in self._reports:
            write_whole(path, report.to_json())
        if not any(map(is_standard_output, self.paths)):
            print_bytes(report.to_json() if self._as_json else render_fleet(report.summary).encode())


def _given(path: Path | None) -> list[Path]:
    return [] if path is None else [path]


PART = FleetPart()
