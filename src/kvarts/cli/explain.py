"""`kvarts story`, and the explanations on the page of `kvarts report`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import convert

from kvarts.base.errors import ConfigError, InputError, MissingFileError
from kvarts.base.files import reading
from kvarts.base.terminal import in_line
from kvarts.cli.options import INPUT, Command
from kvarts.cli.process import Progress

if TYPE_CHECKING:
    from kvarts.proof.explain.reading import Journal
    from kvarts.proof.explain.sums import RequestTimes
    from kvarts.sim.report.run_directory import RunDirectory
    from kvarts.sim.report.run_page import ShownOverview

__all__ = ["overview_for", "story_command"]

NUM_SLOWEST = 10
MOST_CHARACTERS = 1000
"""Most characters in the name of a block."""


@click.command("story", cls=Command)
@click.argument("file", type=INPUT)
@click.option("--request", "request_name", metavar="ID", help="A request, by its id in requests.jsonl.")
@click.option("--block", "block_name", metavar="HASH",
              help="A block: six or more hex digits of its key (sha256, as in vLLM), or REQUEST:PAGE.")  # fmt: skip
@click.option("--hits", is_flag=True, help="The hit ledger: why each prompt token was, or was not, found.")
def story_command(file: Path, request_name: str | None, block_name: str | None, hits: bool) -> None:
    """Explain what happened to a request or a block, and why; without options, list the slowest requests.

    FILE is a journal written by `kvarts replay --events`, or a run directory. Only a run directory has the times of
    first tokens.
    """
    from kvarts.proof.explain.hits import hit_ledger
    from kvarts.proof.explain.story import story_of_block, story_of_request
    from kvarts.sim.report.run_directory import RunDirectory

    asked = sum((request_name is not None, block_name is not None, hits))
    if asked > 1:
        raise ConfigError(
            "is one of three",
            field="--request" if request_name is not None else "--block",
            hint="Give one of --request ID, --block HASH, --hits.",
        )
    if block_name is not None and len(block_name) > MOST_CHARACTERS:
        raise ConfigError("is not a block name", field="--block", hint="Give hex digits, or REQUEST:PAGE.")
    with reading(file):
        is_run = file.is_dir()
    runs = RunDirectory(file).runs() if is_run else []
    paths = [path for run in runs for _, path in run.journals()] if is_run else [file]
    if not paths:
        raise MissingFileError("has no journal", path=file, hint="Write one with `kvarts replay --run-dir`.")
    if request_name is not None:
        request_name = in_line(request_name)
    failure: InputError | None = None
    told = False
    if not asked:
        click.echo("\n".join(_slowest_of(runs, paths, file)))
        return
    rows, in_router = _rows_of(runs)
    for path in paths:
        journal = _load(path)
        try:
            if request_name is not None:
                lines = story_of_request(journal, request_name)
                lines = [*_sum_of(request_name, journal, rows.get(path)), *lines]
            elif block_name is not None:
                lines = story_of_block(journal, block_name)
            else:
                lines = hit_ledger(journal).to_text().splitlines()
        except InputError as error:
            failure = error  # this replica does not know it; another may
            continue
        if len(paths) > 1:
            click.echo(f"{path.relative_to(file)}:")
        click.echo("\n".join(lines if journal.note is None else [*lines, f"note: {journal.note}"]))
        told = True
    given_up = next((each for each in in_router if each.name == request_name), None)
    if not told and given_up is not None:
        arrived = f"{given_up.arrival_ms / 1e3:,.3f} s"
        click.echo(f"{arrived}  arrived at the router, and was given up there: no replica got it")
    elif not told and failure is not None:
        raise failure


def overview_for(run: RunDirectory, on_progress: Callable[[int], object] | None = None) -> ShownOverview | None:
    """Return the overview of a run's journals for its page; None without journals."""
    from kvarts.proof.explain.reading import load_journal
    from kvarts.proof.explain.sums import overview_of
    from kvarts.sim.report.run_page import ShownOverview

    journals = [load_journal(path, on_progress=on_progress) for _, path in run.journals()]
    return convert(overview_of(journals), ShownOverview, from_attributes=True) if journals else None


def _load(path: Path) -> Journal:
    """Read a journal, with progress if it takes long."""
    from kvarts.proof.explain.reading import load_journal

    with reading(path):
        num_bytes = path.stat().st_size
    with Progress(f"reading {path}", num_bytes, "bytes") as progress:
        return load_journal(path, on_progress=progress.update)


def _rows_of(runs: Sequence[RunDirectory]) -> tuple[dict[Path, list[RequestTimes]], list[RequestTimes]]:
    """Return the requests of each journal, by its path, and those that no replica got: they were given up in a router.

    Runs whose requests lack ids are left out.
    """
    from kvarts.proof.explain.sums import RequestTimes
    from kvarts.sim.report.requests import NO_REPLICA

    found: dict[Path, list[RequestTimes]] = {}
    in_router: list[RequestTimes] = []
    for run in runs:
        rows = run.requests()
        if not any(row.request_id for row in rows):
            continue
        of_replica: dict[int, list[RequestTimes]] = {NO_REPLICA: in_router}
        for replica, path in run.journals():
            found[path] = of_replica.setdefault(replica, [])
        for row in rows:
            if row.replica in of_replica:
                of_replica[row.replica].append(
                    RequestTimes(
                        name=in_line(row.request_id),
                        arrival_ms=row.arrival_ms,
                        first_admitted_ms=row.first_admitted_ms,
                        first_token_ms=row.first_token_ms,
                        last_token_ms=row.last_token_ms,
                        num_output_tokens=row.output_tokens,
                        num_preemptions=row.preemptions,
                    )
                )
    return found, in_router


def _sum_of(name: str, journal: Journal, rows: Sequence[RequestTimes] | None) -> list[str]:
    """Return the summary at the head of a request's story; empty if the journal lacks the request's times."""
    from kvarts.proof.explain.sums import sum_of, times_in

    times = rows if rows is not None else times_in(journal)
    return [f"{sum_of(each, journal)}\n" for each in times if each.name == name and each.slowness_ms >= 0][:1]


def _slowest_of(runs: Sequence[RunDirectory], paths: Sequence[Path], file: Path) -> list[str]:
    """Return the slowest requests of all journals, one line each."""
    from kvarts.proof.explain.sums import Sums, slowest, times_in

    rows, in_router = _rows_of(runs)
    found: list[tuple[RequestTimes, str]] = []
    num_requests = len(in_router)
    has_first_tokens = True
    for path in paths:
        journal = _load(path)
        times = rows.get(path)
        if times is None:
            times, has_first_tokens = times_in(journal), False
        num_requests += len(times)
        sums = Sums(journal)
        found += [(each, sums.text(each)) for each in slowest(times, NUM_SLOWEST)]
    found.sort(key=lambda each: -each[0].slowness_ms)
    del found[NUM_SLOWEST:]
    by = "time to first token" if has_first_tokens else "time to last token: first tokens are timed in a run directory"
    if not found:
        return [f"no request of {num_requests:,} made a token"]
    width = max(len(each.name) for each, _ in found) + 2
    return [
        f"the slowest {len(found)} of {num_requests:,} requests, by {by}",
        "",
        *(f"{each.name:<{width}}{text}" for each, text in found),
        "",
        f"why: {shlex.join(['kvarts', 'story', str(file), '--request', found[0][0].name])}",
    ]
