"""`kvarts why`: what costs cache hits, and the cheapest mend."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvarts.base.errors import MissingFileError
from kvarts.base.files import reading
from kvarts.cli.options import INPUT, Command, key_option
from kvarts.cli.process import print_bytes, print_text, reading_progress

__all__ = ["why_command"]


@click.command("why", cls=Command)
@click.argument("traces", type=INPUT, nargs=-1, required=True, metavar="TRACE...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@key_option(
    "--tokenizer", metavar="NAME", default="words", help="Tokenizer of messages: a directory, a name, or words."
)
@key_option("--chat-template", metavar="FILE", help="Chat template: a file of jinja2.")
@key_option("--page-size", metavar="TOKENS", type=click.IntRange(min=1), default=16, help="Tokens per page.")
@key_option("--pages", metavar="N", type=click.IntRange(min=1), help="Pages of the pool; without a limit by default.")
@key_option("--skip-bad-lines", is_flag=True, help="Leave out lines that cannot be read.")
def why_command(traces: tuple[Path, ...], as_json: bool, **settings: Any) -> None:
    """Say what costs cache hits, the most first, where prompts part, and the cheapest mend.

    TRACE is a trace or log, a directory of logs with messages, two files of one prompt each, the directory of a run, or
    a journal, of a replay or of the events of an engine (`kvarts watch --events`).
    Excerpts of up to 32 characters of messages are printed where two of them part.
    """
    from kvarts.plan.why import why

    with reading(traces[0]):
        is_run = len(traces) == 1 and (traces[0] / "report.json").is_file()
    if is_run:
        found = _of_run(traces[0])
    elif len(traces) == 1 and _is_journal(traces[0]):
        found = _of_journal(traces[0])
    else:
        with reading_progress(traces[0]) as progress:
            found = why(*traces, on_read=progress.update, **settings)
    if as_json:
        print_bytes(found.to_json())
    else:
        print_text(found.to_text())


def _of_run(directory: Path) -> Any:
    """Return what cost hits in a run that `kvarts replay --run-dir` recorded."""
    from kvarts.sim.report.run_directory import RunDirectory

    paths = [path for run in RunDirectory(directory).runs() for _, path in run.journals()]
    if not paths:
        raise MissingFileError("has no journal", path=directory, hint="Write one with `kvarts replay --run-dir`.")
    return _of_journal(paths[0])


def _of_journal(path: Path) -> Any:
    from kvarts.plan.why import why_of_journal
    from kvarts.proof.explain.reading import load_journal

    return why_of_journal(load_journal(path))


def _is_journal(path: Path) -> bool:
    """Return whether a file begins as a journal, packed or not."""
    if not path.is_file():
        return False
    with reading(path), path.open("rb") as file:
        begin = file.read(1 << 12)
    if begin.startswith(b"\x1f\x8b"):
        with suppress(zlib.error):  # the reader of traces names the damage
            begin = zlib.decompressobj(31).decompress(begin, 1 << 12)
    return begin.startswith(b'{"kvarts_journal"')
