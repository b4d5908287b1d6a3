"""`kvarts verify`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from kvarts.base.errors import ConfigError, KvartsError
from kvarts.base.units import parse_bytes
from kvarts.cli.options import INPUT, Command, key_option
from kvarts.cli.process import Progress, ReaderGoneError, print_json

__all__ = ["verify_command"]


class _Bytes(click.ParamType):  # type: ignore[type-arg]
    name = "bytes"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except (OverflowError, ValueError):
            raise ConfigError("is too large for a size", field=None if param is None else param.opts[0]) from None


@click.command("verify", cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=INPUT)
@key_option("--preempt-threshold", metavar="SHARE", type=float, default=0.95, show_default=True,
              help="Preemption below this share of used blocks is a violation, unless the step names the request "
                   "that needed blocks.")  # fmt: skip
@key_option("--max-bytes", metavar="BYTES", type=_Bytes(),
              help="Ask for boundedness too: never more than this (24GiB, 500MB, 1000), and no growth after "
              "warm-up.")  # fmt: skip
@key_option("--block-bytes", metavar="BYTES", type=_Bytes(),
              help="Bytes of a block, if the timeline does not state them.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print verdicts as JSON instead of text.")
def verify_command(
    files: tuple[Path, ...], preempt_threshold: float, max_bytes: int | None, block_bytes: int | None, as_json: bool
) -> int:
    """Judge KV timelines of any engine: are all blocks accounted for?

    A FILE may be a pipe, or a run directory: each timeline in it is judged. Prints a verdict for each: ok, violated, or
    inconclusive (empty, constant zero, or too short). The exit code is 5 if any is violated, else that of the first
    file that cannot be read, else 6 if any is inconclusive, else 0.
    """
    from kvarts.proof.verify.verifier import TimelineLimits, verify_file

    TimelineLimits.checked(preempt_threshold, max_bytes, block_bytes)
    codes = []
    answers: list[dict[str, Any]] = []
    for path, refused in _timelines(files):
        try:
            if refused is not None:
                raise refused
            with Progress(f"verifying {path}"):
                verdict = verify_file(
                    path, preempt_threshold=preempt_threshold, max_bytes=max_bytes, block_bytes=block_bytes
                )
        except KvartsError as error:
            click.echo(f"kvarts: {error}", err=True)
            codes.append(error.exit_code)
            answers.append({"file": str(path), "verdict": None, "error": str(error)})
            continue
        codes.append(verdict.exit_code)
        if as_json:
            answers.append({"file": str(path), **msgspec.to_builtins(verdict)})
        else:
            with suppress(ReaderGoneError):
                click.echo(f"{path}: {verdict.to_text()}", nl=False)
    if as_json:
        with suppress(ReaderGoneError):
            print_json(answers[0] if len(answers) == 1 else answers)
    return next((code for rank in ((5,), (3, 4), (6,)) for code in codes if code in rank), 0)


def _timelines(files: tuple[Path, ...]) -> Iterator[tuple[Path, KvartsError | None]]:
    """Yield the timelines among `files`, and those in run directories; a directory without any, with its error."""
    from kvarts.sim.report.run_directory import timelines_in

    for path in files:
        try:
            found = timelines_in(path) or [path]
        except KvartsError as error:
            yield path, error
            continue
        yield from ((each, None) for each in found)
