"""A replay of several models: their traces, and the destinations of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts.cli.outputs import ReplayFiles
from kvarts.cli.printing import print_bytes, tell_whole_pages
from kvarts.cli.progress import Progress
from kvarts.cli.sharing_table import render_shared_table
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_standard_output, write_whole, writing
from kvarts.report.run_directory import REPORT, named
from kvarts.settings import Given, Section
from kvarts.sharing.config import SharingConfig, resolve_shares
from kvarts.traffic.formats import load_trace
from kvarts.traffic.settings import reading_of

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.sharing.config import ObserversOf
    from kvarts.sharing.report import SharedReport
    from kvarts.traffic.trace import Trace

__all__ = ["SharedOutputs", "SharedRun"]

LOANS = "loans.jsonl"


class SharedRun:
    """One replay of several models. Raises ConfigError when constructed, before any work is done."""

    def __init__(self, given: Given, trace: Path | None, sections: Sequence[Section], loans_file: Path | None) -> None:
        if trace is not None:
            raise ConfigError("each model has its own", field="TRACE", hint="Give --trace NAME=FILE for each.")
        for key in ("trace", "workload"):
            if key in given:
                raise given.error(key, "is for a replay of one model", hint="Each of several has its own trace.")
        self._given = given
        self._loans_file = loans_file
        self._paths: dict[str, Path] = {}
        for key in given.in_table("models"):
            if key.endswith(".trace"):
                self._paths[key.removeprefix("models.").removesuffix(".trace")] = given.path_of(key)
        self.config: SharingConfig = resolve_shares(given, sections)
        try:
            self.config.check_traces(self._paths)
        except ConfigError as error:
            raise given.named(error, ()) from error
        for name, of_model in self.config.configs.items():
            tell_whole_pages(of_model, name)

    @property
    def inputs(self) -> list[Path]:
        """The traces."""
        return list(self._paths.values())

    def outputs(self, places: Mapping[str, Any]) -> SharedOutputs:
        """Return the outputs, with their paths checked."""
        return SharedOutputs(self.config, loans_file=self._loans_file, **places)

    def load(self) -> tuple[dict[str, Trace], Sequence[Trace]]:
        """Load the trace of each model."""
        with Progress("reading traces"):
            traces = {name: load_trace(self._paths[name], **reading_of(self._given)) for name in self.config.models}
        return traces, list(traces.values())


class SharedOutputs:
    """The files of one replay of several models, checked before it begins; a model's files have its name.

    Raises ConfigError and OutputError.
    """

    def __init__(
        self,
        config: SharingConfig,
        *,
        as_json: bool,
        report_file: Path | None,
        requests_file: Path | None,
        run_dir: Path | None,
        loans_file: Path | None,
        html_file: Path | None = None,
        **places: Any,
    ) -> None:
        self._as_json = as_json
        self._num_replicas = config.each.replicas
        self._reports = [path for path in (report_file,) if path is not None]
        self._loans = [path for path in (loans_file,) if path is not None]
        named_paths = [*self._reports, *self._loans, *(path for path in (html_file,) if path is not None)]
        for path in named_paths:
            check_writable(path)
        if run_dir is not None:
            self._reports.append(run_dir / REPORT)
            self._loans.append(run_dir / LOANS)
            for name in config.configs:
                with writing(run_dir / name):
                    (run_dir / name).mkdir()
        self._outputs = {
            name: ReplayFiles(
                of_model,
                as_json=False,
                report_file=None,
                requests_file=named(requests_file, name),
                run_dir=None if run_dir is None else run_dir / name,
                model=name,
                **places,
            )
            for name, of_model in config.configs.items()
        }
        self.paths = [*named_paths, *(path for outputs in self._outputs.values() for path in outputs.paths)]

    @contextmanager
    def observers(self) -> Iterator[ObserversOf]:
        """Yield a function that returns the observers of a model's events, or of a model on one replica."""
        with ExitStack() as stack:
            observers: dict[str | tuple[str, int], Sequence[EventReader]] = {}
            for name, outputs in self._outputs.items():
                of_replica = stack.enter_context(outputs.observers())
                observers[name] = of_replica(0)
                observers.update({(name, number): of_replica(number) for number in range(self._num_replicas)})
            yield observers.__getitem__

    def write(self, report: SharedReport) -> None:
        """Write the remaining files, and print the report unless one of the files is standard output."""
        for name, outputs in self._outputs.items():
            outputs.write_files(report.reports[name])
        for path in self._reports:
            write_whole(path, report.to_json())
        for path in self._loans:
            write_whole(path, report.loans_jsonl())
        if not any(map(is_standard_output, self.paths)):
            print_bytes(report.to_json() if self._as_json else render_shared_table(report.summary).encode())
