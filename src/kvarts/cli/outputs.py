"""Where a replay's results go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from kvarts.cli.table import render_table
from kvarts.errors import OutputError
from kvarts.files import check_writable, whole_file, write_whole
from kvarts.record.timeline import form_of, import_parquet
from kvarts.report.rundir import DISTRIBUTIONS, EVENTS, REPORT, REQUESTS, TIMELINE, per_replica

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.report.report import Report
    from kvarts.sim.config import ReplayConfig

__all__ = ["Outputs", "make_directory", "print_bytes"]


class Outputs:
    """The files of one replay, checked before it begins. Raises ConfigError and OutputError."""

    def __init__(
        self,
        config: ReplayConfig,
        *,
        as_json: bool,
        report_file: Path | None,
        requests_file: Path | None,
        timeline_file: Path | None,
        timeline_every: int,
        events_file: Path | None,
        run_dir: Path | None,
    ) -> None:
        self._config = config
        self._as_json = as_json
        self._every = timeline_every
        self._reports = [path for path in (report_file,) if path is not None]
        self._requests = [path for path in (requests_file,) if path is not None]
        self._timelines = [list(per_replica(path, config.replicas)) for path in (timeline_file,) if path is not None]
        self._journals = [list(per_replica(path, config.replicas)) for path in (events_file,) if path is not None]
        for paths in self._timelines:
            if form_of(paths[0])[0] == "parquet":
                import_parquet()
        for path in (*self._reports, *self._requests, *chain.from_iterable(self._timelines + self._journals)):
            check_writable(path)
        self._run_dir = run_dir
        if run_dir is not None:
            make_directory(run_dir)
            self._reports.append(run_dir / REPORT)
            self._requests.append(run_dir / REQUESTS)
            self._timelines.append(list(per_replica(run_dir / TIMELINE, config.replicas)))
            self._journals.append(list(per_replica(run_dir / EVENTS, config.replicas)))

    @contextmanager
    def journals(self) -> Iterator[Callable[[int], list[EventReader]]]:
        """Who writes down the events of each replica, while the replay runs; files appear when it has ended well."""
        if not self._journals:
            yield lambda _: []
            return
        with ExitStack() as stack:
            from kvarts.record.journal import JournalWriter

            writers: list[list[EventReader]] = [[] for _ in range(self._config.replicas)]
            closing = []
            for paths in self._journals:
                for replica, path in enumerate(paths):
                    writer = JournalWriter(
                        stack.enter_context(whole_file(path)),
                        total_blocks=self._config.num_pages,
                        block_size_tokens=self._config.page_size,
                        is_packed=path.suffix == ".gz",
                    )
                    writers[replica].append(writer)
                    closing.append(writer)
            yield writers.__getitem__
            for writer in closing:
                writer.close()

    def write(self, report: Report) -> None:
        """Everything else, and the report on standard output."""
        self.write_files(report)
        print_bytes(report.to_json() if self._as_json else render_table(report.summary).encode())

    def write_files(self, report: Report) -> None:
        """Everything but what observers wrote."""
        requests = report.requests_jsonl() if self._requests else b""
        for path in self._requests:
            write_whole(path, requests)
        for paths in self._timelines:
            for path, timeline in zip(paths, report.timelines, strict=True):
                timeline.write(path, every=self._every)
        if self._run_dir is not None:
            write_whole(self._run_dir / DISTRIBUTIONS, report.distributions_json())
        for path in self._reports:
            write_whole(path, report.to_json())


def print_bytes(text: bytes) -> None:
    """To standard output. Raises OutputError."""
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", path="standard output") from error


def make_directory(path: Path) -> None:
    """A new directory, or one with nothing in it. Raises OutputError."""
    try:
        path.mkdir(exist_ok=True)
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise OutputError(f"cannot become a directory: {error.strerror}", path=path) from error
    if not is_empty:
        raise OutputError("is not empty", path=path, hint="Give a new directory, so that two runs are never mixed.")
