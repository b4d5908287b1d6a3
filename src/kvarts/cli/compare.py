"""`kvarts compare`."""

from __future__ import annotations

from pathlib import Path

import click

from kvarts.cli.calibrate import columns_of
from kvarts.cli.printing import print_json
from kvarts.files import check_writable, write_whole

__all__ = ["compare_command"]


@click.command("compare")
@click.argument("replayed", metavar="REPLAY", type=click.Path(path_type=Path))
@click.argument("measured", type=click.Path(path_type=Path))
@click.option("--series", metavar="FILE", type=click.Path(path_type=Path),
              help="CSV of t, running, waiting and kv_cache_pct, second by second. REPLAY must be a run "
              "directory.")  # fmt: skip
@click.option("--column", "columns", metavar="FIELD=NAME", multiple=True,
              help="What MEASURED calls a field, as in `kvarts calibrate`.")  # fmt: skip
@click.option("--time-unit", metavar="UNIT", default="s", show_default=True, help="s, ms, us or ns.")
@click.option("--html", "html_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Write one page that needs no network: the distributions and the curves of both.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare_command(
    replayed: Path,
    measured: Path,
    series: Path | None,
    columns: tuple[str, ...],
    time_unit: str,
    html_file: Path | None,
    as_json: bool,
) -> None:
    """State how far a replay is from what was measured.

    REPLAY is what `kvarts replay --run-dir` or `--requests` wrote, of the requests in MEASURED.
    """
    from kvarts.calibrate import compare, load_measured, load_series
    from kvarts.calibrate.page import render_page
    from kvarts.calibrate.replayed import load_replayed

    if html_file is not None:
        check_writable(html_file)
    theirs = load_measured(measured, columns=columns_of(columns), time_unit=time_unit)
    ours = load_replayed(replayed)
    curve = None if series is None else load_series(series)
    comparison = compare(theirs, ours, curve)
    if as_json:
        print_json(comparison.to_builtins())
    else:
        click.echo(comparison.to_text(), nl=False)
    if html_file is not None:
        write_whole(html_file, render_page(theirs, ours, curve, comparison))
        click.echo(f"kvarts: wrote {html_file}", err=True)
