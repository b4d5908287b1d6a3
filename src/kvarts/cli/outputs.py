"""Destinations of a command's results: files, the terminal, and pages of HTML that are written and opened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts import __version__
from kvarts.cli.parts import CommandPart, Outputs, load_parts
from kvarts.cli.process import Progress, print_bytes
from kvarts.cli.table import render_advice, render_table
from kvarts.errors import ConfigError
from kvarts.files import check_writable, is_standard_output, write_whole
from kvarts.report.run_directory import DISTRIBUTIONS, REPORT, REQUESTS, RUN

if TYPE_CHECKING:
    from kvarts.event_log import EventReader
    from kvarts.report.report import Report
    from kvarts.report.run_page import ShownOverview
    from kvarts.sim.config import ReplayConfig

__all__ = ["ReplayFiles", "check_opening", "open_option", "open_page", "write_about", "write_run_page"]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

LARGE_RUN_BYTES = 4_000_000
OPEN_HELP = "Open the page in the browser as well."


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
        self._more: list[Outputs] = [results for results in of_parts if results is not None]
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


def open_option(option: Callable[..., Decorator] = click.option) -> Decorator:
    """Return the `--open` option of a command that has `--html`; `option` is its decorator."""
    return option("--open", "opens", is_flag=True, help=OPEN_HELP)


def check_opening(html_file: Path | None, *, opens: bool) -> None:
    """Raise ConfigError if a page is to be opened but is not a file."""
    if opens and html_file is not None and is_standard_output(html_file):
        raise ConfigError("opens a file", field="--open", hint="Give --html the path of a file.")


def open_page(html_file: Path | None, *, opens: bool) -> None:
    """Open a page that was written in the browser, if `opens`; print a note if no browser is found."""
    if not opens or html_file is None:
        return
    import webbrowser

    if not webbrowser.open(html_file.resolve().as_uri()):
        click.echo(f"kvarts: found no browser; open {html_file} yourself", err=True)


def write_run_page(run_dir: Path, html_file: Path, *, opens: bool) -> None:
    """Write the page of a run directory, and open it if `opens`."""
    from kvarts.report.run_directory import RunDirectory
    from kvarts.report.run_page import render_html

    run = RunDirectory(run_dir)
    overviews: dict[Path, ShownOverview | None] = {}
    runs = run.runs()
    num_bytes = sum(path.stat().st_size for each in runs for _, path in (*each.journals(), *each.timelines()))
    with Progress(f"reading {run_dir}", num_bytes, "bytes", large=LARGE_RUN_BYTES) as progress:
        from kvarts.cli import explain

        overviews.update({each.path: explain.overview_for(each, progress.update) for each in runs})
        page = render_html(run, overviews)
    write_whole(html_file, page)
    if not is_standard_output(html_file):
        click.echo(f"kvarts: wrote {html_file}", err=True)
    open_page(html_file, opens=opens)
