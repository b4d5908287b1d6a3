"""`kvarts report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvarts.files import check_writable, write_whole

if TYPE_CHECKING:
    from kvarts.report.render import Overview

__all__ = ["report_command"]


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--html", "html_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Write one page that needs no network: KV use, queues, latencies, hits, the longest "
              "waits.")  # fmt: skip
def report_command(run_dir: Path, html_file: Path | None) -> None:
    """Show a run: a sparkline of KV use and a short table; with --html, a page.

    RUN_DIR is what `kvarts replay --run-dir` wrote.
    """
    from kvarts.report.render import render_html, render_text
    from kvarts.report.run_directory import RunDirectory

    if html_file is not None:
        check_writable(html_file)
    run = RunDirectory(run_dir)
    click.echo(render_text(run), nl=False)
    if html_file is not None:
        overview: Overview | None = None
        from kvarts.cli import explain

        overview = explain.overview_for(run)
        write_whole(html_file, render_html(run, overview))
        click.echo(f"kvarts: wrote {html_file}", err=True)
