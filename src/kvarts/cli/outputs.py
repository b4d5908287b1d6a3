"""Destinations of a replay's results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvarts import __version__
from kvarts.cli.parts import CommandPart, RoomResults, load_parts
from kvarts.cli.process import print_bytes
from kvarts.cli.table import render_advice, render_table
from kvarts.files import check_writable, is_standard_output, write_whole
from kvarts.report.run_directory import DISTRIBUTIONS, REPORT, REQUESTS, RUN

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.report.report import Report
    from kvarts.sim.config import ReplayConfig

__all__ = ["ReplayFiles", "write_about"]


class ReplayFiles:
    """The files of one replay, checked before it begins. Raises ConfigError and OutputError.

    `paths`: the files that options name; `run_dir`: an existing folder for all other files. `html_file`: a page, which
    is made from that folder. `model`: added to the names of the parts' files; None for one model. `parts`: those that
    may have results; None for all. `places`: values of the parts' options.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        as_json: bool,
        report_file: Path | None,
        requests_file: Path | None,
        run_dir: Path | None,
        html_file: Path | None = None,
        model: str | None = None,
        parts: Sequence[CommandPart] | None = None,
        **places: Any,
    ) -> None:
        self._as_json = as_json
        self._reports = [path for path in (report_file,) if path is not None]
        self._requests = [path for path in (requests_file,) if path is not None]
        of_parts = [part.results(config, places, run_dir, model) for part in (load_parts() if parts is None else parts)]
        self._more: list[RoomResults] = [results for results in of_parts if results is not None]
        pages = [path for path in (html_file,) if path is not None]
        for path in (*self._reports, *self._requests, *pages):
            check_writable(path)
        of_results = (path for results in self._more for path in results.paths)
        self.paths = [*self._reports, *self._requests, *pages, *of_results]
        self._run_dir = run_dir
        if run_dir is not None:
            self._reports.append(run_dir / REPORT)
            self._requests.append(run_dir / REQUESTS)

    @contextmanager
    def observers(self) -> Iterator[Callable[[int], list[EventReader]]]:
        """Yield a function that returns the observers of a replica's events, for the time of the replay."""
        with ExitStack() as stack:
            of_parts = [stack.enter_context(results.observers()) for results in self._more]
            yield lambda replica: [observer for observers_of in of_parts for observer in observers_of(replica)]

    def write(self, report: Report) -> None:
        """Write the remaining files, and print the report unless one of the files is standard output."""
        self.write_files(report)
        if not any(map(is_standard_output, self.paths)):
            if self._as_json:
                print_bytes(report.to_json())
                return
            print_bytes(render_table(report.summary).encode())
            print_bytes(render_advice(report.advice).encode())  # computing the advice may take several replays

    def write_files(self, report: Report) -> None:
        """Write all files except those of the observers."""
        requests = report.requests_jsonl() if self._requests else b""
        for path in self._requests:
            write_whole(path, requests)
        for results in self._more:
            results.write(report)
        if self._run_dir is not None:
            write_about(self._run_dir, report)
        for path in self._reports:
            write_whole(path, report.to_json())


def write_about(run_dir: Path, report: Report) -> None:
    """Write the files of a run directory that no option names: distributions, and the command."""
    from kvarts.report.run_directory import run_json

    write_whole(run_dir / DISTRIBUTIONS, report.distributions_json())
    write_whole(run_dir / RUN, run_json(__version__, ["kvarts", *_without_page(sys.argv[1:])]))


def _without_page(words: Sequence[str]) -> list[str]:
    """Return a command line without its page options, so that a page does not depend on its own name."""
    kept: list[str] = []
    for place, word in enumerate(words):
        is_value = place > 0 and words[place - 1] == "--html"
        if word not in ("--html", "--open") and not word.startswith("--html=") and not is_value:
            kept.append(word)
    return kept
