"""`kvarts story`, and what the page of `kvarts report` shows of why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvarts.cli.options import Command
from kvarts.cli.paths import INPUT
from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.files import reading

if TYPE_CHECKING:
    from kvarts.explain.overview import Overview
    from kvarts.report.run_directory import RunDirectory

__all__ = ["overview_for", "story_command"]

MOST_CHARACTERS = 1000
"""Of the name of a block."""


@click.command("story", cls=Command)
@click.argument("file", type=INPUT)
@click.option("--request", "request_name", metavar="ID", help="A request, by its id in requests.jsonl.")
@click.option("--block", "block_name", metavar="HASH",
              help="A block: six or more hex digits of its key (sha256, as in vLLM), or REQUEST:PAGE.")  # fmt: skip
@click.option("--hits", is_flag=True, help="The hit ledger: why each prompt token was, or was not, found.")
def story_command(file: Path, request_name: str | None, block_name: str | None, hits: bool) -> None:
    """Tell what happened to a request or a block, and why.

    FILE is a journal that `kvarts replay --events` wrote, or a run directory.
    """
    from kvarts.explain.hits import hit_ledger
    from kvarts.explain.reading import load_journal
    from kvarts.explain.story import story_of_block, story_of_request
    from kvarts.report.run_directory import RunDirectory

    if sum((request_name is not None, block_name is not None, hits)) != 1:
        raise ConfigError("say what to tell of", hint="Give one of --request ID, --block HASH and --hits.")
    if block_name is not None and len(block_name) > MOST_CHARACTERS:
        raise ConfigError("is no name of a block", field="--block", hint="Give hex digits, or REQUEST:PAGE.")
    with reading(file):
        is_run = file.is_dir()
    runs = RunDirectory(file).runs() if is_run else []
    paths = [path for run in runs for _, path in run.journals()] if is_run else [file]
    if not paths:
        raise MissingFileError("has no journal", path=file, hint="Write one with `kvarts replay --run-dir`.")
    failure: InputError | None = None
    told = False
    for path in paths:
        journal = load_journal(path)
        try:
            if request_name is not None:
                lines = story_of_request(journal, request_name)
            elif block_name is not None:
                lines = story_of_block(journal, block_name)
            else:
                lines = hit_ledger(journal).to_text().splitlines()
        except InputError as error:
            failure = error  # a replica that knows nothing of it; another may
            continue
        if len(paths) > 1:
            click.echo(f"{path.relative_to(file)}:")
        click.echo("\n".join(lines if journal.note is None else [*lines, f"note: {journal.note}"]))
        told = True
    if not told and failure is not None:
        raise failure


def overview_for(run: RunDirectory, on_progress: Callable[[int], object] | None = None) -> Overview | None:
    """Return what the journals of a run tell for its page; None where it has none."""
    from kvarts.explain.overview import overview_of
    from kvarts.explain.reading import load_journal

    journals = [load_journal(path, on_progress=on_progress) for _, path in run.journals()]
    return overview_of(journals) if journals else None
