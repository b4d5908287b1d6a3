"""`kvarts report`."""

from __future__ import annotations

from pathlib import Path

import click

from kvarts.base.files import check_writable, is_standard_output
from kvarts.cli.options import INPUT, OUTPUT, Command, open_option
from kvarts.cli.outputs import check_opening, write_run_page
from kvarts.cli.process import Progress

__all__ = ["report_command"]


@click.command("report", cls=Command)
@click.argument("run_dir", type=INPUT)
@click.option("--html", "html_file", metavar="FILE", type=OUTPUT,
              help="Write one page that needs no network: KV use, queues, latencies, hits, the longest "
              "waits.")  # fmt: skip
@open_option()
def report_command(run_dir: Path, html_file: Path | None, opens: bool) -> None:
    """Show a run: a sparkline of KV use and a short table; with --html, a page.

    RUN_DIR is written by `kvarts replay --run-dir`. With several models, each is shown.
    """
    from kvarts.sim.report.run_directory import RunDirectory
    from kvarts.sim.report.run_page import render_text

    if html_file is not None:
        check_writable(html_file)
    check_opening(html_file, opens=opens)
    with Progress(f"reading {run_dir}"):
        text = render_text(RunDirectory(run_dir))
    if not is_standard_output(html_file):
        click.echo(text, nl=False)
    if html_file is not None:
        write_run_page(run_dir, html_file, opens=opens)
