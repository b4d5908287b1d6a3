"""`kvarts report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvarts.cli.options import Command
from kvarts.cli.paths import INPUT, OUTPUT
from kvarts.cli.progress import Progress
from kvarts.files import check_writable, is_standard_output, write_whole

if TYPE_CHECKING:
    from kvarts.report.render import Overview

__all__ = ["report_command"]

LARGE_RUN_BYTES = 4_000_000


@click.command("report", cls=Command)
@click.argument("run_dir", type=INPUT)
@click.option("--html", "html_file", metavar="FILE", type=OUTPUT,
              help="Write one page that needs no network: KV use, queues, latencies, hits, the longest "
              "waits.")  # fmt: skip
def report_command(run_dir: Path, html_file: Path | None) -> None:
    """Show a run: a sparkline of KV use and a short table; with --html, a page.

    RUN_DIR is what `kvarts replay --run-dir` wrote. Of a run of several models, each is shown.
    """
    from kvarts.report.render import render_html, render_text
    from kvarts.report.run_directory import RunDirectory

    if html_file is not None:
        check_writable(html_file)
    run = RunDirectory(run_dir)
    if not is_standard_output(html_file):
        click.echo(render_text(run), nl=False)
    if html_file is None:
        return
    overviews: dict[Path, Overview | None] = {}
    runs = run.runs()
    num_bytes = sum(path.stat().st_size for each in runs for _, path in (*each.journals(), *each.timelines()))
    with Progress(f"reading {run_dir}", num_bytes, "bytes", large=LARGE_RUN_BYTES) as progress:
        from kvarts.cli import explain

        overviews.update({each.path: explain.overview_for(each, progress.update) for each in runs})
        page = render_html(run, overviews)
    write_whole(html_file, page)
    click.echo(f"kvarts: wrote {html_file}", err=True)
