"""`kvarts sweep`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

from kvarts.cli.options import DIRECTORY, INPUT, Command
from kvarts.cli.process import print_bytes, print_json
from kvarts.cli.progress import Progress

__all__ = ["sweep_command"]

PICTURES = ("png", "svg")


@click.command("sweep", cls=Command)
@click.argument("config_file", metavar="CONFIG", type=INPUT)
@click.option("-o", "--output", "directory", metavar="DIR", type=DIRECTORY, required=True,
              help="Directory of the results, where an interrupted sweep also resumes.")  # fmt: skip
@click.option("--workers", metavar="N", type=click.IntRange(min=1), help="Processes. [as many as there are cores]")
@click.option("--ray", "ray_address", metavar="ADDRESS",
              help="Run points on the Ray cluster at ADDRESS, or auto, instead. Needs kvarts[ray]; the trace must be "
              "at the same path on its nodes.")  # fmt: skip
@click.option("--plot", "with_pictures", is_flag=True,
              help="Write the charts of the page as points.png and points.svg too. Needs kvarts[plan].")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON instead of the Pareto front.")
def sweep_command(
    config_file: Path,
    directory: Path,
    workers: int | None,
    ray_address: str | None,
    with_pictures: bool,
    as_json: bool,
) -> None:
    """Replay every point of a grid.

    CONFIG is a file of `kvarts replay --config` with a table [grid] of lists, whose combinations are the points, or
    with tables [[points]]. DIR gets points.json, and points.parquet if pyarrow is installed: one row per point; and
    points.html, a page with charts. The Pareto front of KV memory, TTFT and throughput is printed on standard output.
    """
    from kvarts.files import write_whole
    from kvarts.plan.sweeping import sweep
    from kvarts.report.pictures import check_installed

    if with_pictures:
        check_installed("--plot")
    with Progress("sweeping", None, "points") as progress:
        found = sweep(
            config_file,
            directory,
            workers=workers or os.cpu_count() or 1,
            ray_address=ray_address,
            on_done=progress.reach,
        )
        for form in PICTURES if with_pictures else ():
            write_whole(directory / f"points.{form}", found.picture(form))
    if find_spec("pyarrow") is None:
        click.echo("kvarts: no points.parquet without pyarrow: pip install 'kvarts[parquet]'", err=True)
    if as_json:
        print_json(found.rows)
    else:
        print_bytes(found.to_text().encode())
