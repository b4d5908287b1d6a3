"""HTML pages that commands write and open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.cli.progress import Progress
from kvarts.errors import ConfigError
from kvarts.files import is_standard_output, write_whole

if TYPE_CHECKING:
    from kvarts.report.run_page import ShownOverview

__all__ = ["check_opening", "open_option", "open_page", "write_run_page"]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

LARGE_RUN_BYTES = 4_000_000
OPEN_HELP = "Open the page in the browser as well."


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
