"""`kvarts trace`: properties of traces, and traces made from traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarts.base.errors import ConfigError
from kvarts.base.files import PREFIX, SAMPLES
from kvarts.base.settings import given_by_flags
from kvarts.base.units import parse_duration_s
from kvarts.cli.options import INPUT, OUTPUT, Command, Group, key_option, options_of
from kvarts.cli.process import print_bytes, print_json, print_text, reading_progress
from kvarts.sim.traffic.settings import READING, SECTION, reading_of

if TYPE_CHECKING:
    from kvarts.sim.traffic.trace import Trace

__all__ = ["trace_command"]


class _Duration(click.ParamType[int]):
    """A duration such as 10m, in nanoseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return nanoseconds."""
        try:
            return value if isinstance(value, int) else round(parse_duration_s(value) * 1e9)
        except ConfigError as error:
            self.fail(f"{error.what}. {error.hint}", param, ctx)


def _reading(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for reading traces."""
    params = command.__dict__.setdefault("__click_params__", [])
    params += options_of([SECTION], only=READING, shown=())
    return command


def _writing(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option for the output file, and those for reading."""
    command = click.option("-o", "--output", metavar="FILE", type=OUTPUT,
                           help="Write to FILE instead of standard output.")(command)  # fmt: skip
    return _reading(command)


@click.group("trace", cls=Group)
def trace_command() -> None:
    """Look at traces, and make traces from traces.

    A TRACE is as in `kvarts replay`, or a bundled one: `sample:mooncake`. Traces are written as Mooncake's JSON lines
    on standard output; those in which requests wait for requests, as lines of Dynamo's agentic traces.
    """


@trace_command.command("list", cls=Command)
def list_command() -> None:
    """List the bundled traces: each name can stand for a TRACE in any command, and in `kvarts.load_trace`."""
    names = {f"{PREFIX}{name}": sample.what for name, sample in SAMPLES.items()}
    width = max(map(len, names)) + 2
    for name, what in names.items():
        click.echo(f"{name:<{width}}{what}")


@trace_command.command("info", cls=Command)
@click.argument("trace", type=INPUT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_reading
def info_command(trace: Path, as_json: bool, **reading: Any) -> None:
    """Print what a TRACE contains, and whether it identifies shared prefixes."""
    from kvarts.sim.traffic.info import trace_info

    traffic = _load(trace, reading)
    info = trace_info(traffic)
    _say(traffic)
    if as_json:
        print_bytes(info.to_json())
    else:
        print_text(info.to_text())


@trace_command.command("forms", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def forms_command(as_json: bool) -> None:
    """List the forms of traces that are read, with an example of each."""
    from kvarts.sim.traffic.formats import FORMS

    if as_json:
        print_json([{"name": form.name, "title": form.title, "example": form.example,
                     "tells_prefixes": form.tells_prefixes} for form in FORMS])  # fmt: skip
        return
    content = {True: "with the prefixes that prompts share", False: "lengths and times only"}
    print_bytes("\n".join(
        f"{form.name}: {form.title}; {content[form.tells_prefixes]}\n{form.example}\n" for form in FORMS
    ).encode())  # fmt: skip


@trace_command.command("convert", cls=Command)
@click.argument("trace", type=INPUT)
@click.option("--to", "tool", type=click.Choice(["aiperf", "guidellm", "dynamo"]),
              help="Write rows that this tool reads alike, and name what it reads otherwise.")  # fmt: skip
@_writing
def convert_command(trace: Path, tool: str | None, output: Path | None, **reading: Any) -> None:
    """Write a TRACE of any form as JSON lines."""
    _write(_load(trace, reading), output, tool)


@trace_command.command("slice", cls=Command)
@click.argument("trace", type=INPUT)
@click.option("--from", "begin_ns", metavar="TIME", type=_Duration(), default="0s", help="Requests from TIME on.")
@click.option("--to", "end_ns", metavar="TIME", type=_Duration(), help="Requests before TIME, such as 10m.")
@key_option("--first", metavar="N", type=click.IntRange(min=0), default=0, help="Leave out N requests of these.")
@key_option("--count", metavar="N", type=click.IntRange(min=1), help="Keep N of the remaining requests.")
@_writing
def slice_command(
    trace: Path, output: Path | None, begin_ns: int, end_ns: int | None, first: int, count: int | None, **reading: Any
) -> None:
    """Cut a part out of a TRACE; the first request of the part arrives at 0."""
    from kvarts.sim.traffic.editing import sliced

    part = sliced(_load(trace, reading), begin_ns=begin_ns, end_ns=end_ns, first=first, count=count)
    _write(part, output)


@trace_command.command("merge", cls=Command)
@click.argument("traces", type=INPUT, nargs=-1, required=True)
@key_option("--same-ids", is_flag=True, help="Equal hash ids of two traces stand for equal tokens.")
@click.option("--models", metavar="NAME,..", default="", help="The model that the requests of each trace ask for.")
@_writing
def merge_command(traces: tuple[Path, ...], output: Path | None, same_ids: bool, models: str, **reading: Any) -> None:
    """Write all requests of several TRACES, each at its time. They share nothing without `--set same_ids=true`."""
    from kvarts.sim.traffic.editing import merged

    names = [name.strip() for name in models.split(",")] if models else []
    _write(merged([_load(trace, reading) for trace in traces], same_ids=same_ids, models=names), output)


@trace_command.command("scale", cls=Command)
@click.argument("trace", type=INPUT)
@click.option("--rate", metavar="X", type=float, default=1.0, help="Divide times and delays by X.")
@click.option("--copies", metavar="N", type=click.IntRange(min=1), default=1,
              help="Write each request N times: users that share nothing.")  # fmt: skip
@key_option("--spread", "spread_ns", metavar="TIME", type=_Duration(),
              help="Let sessions begin evenly over TIME.")  # fmt: skip
@_writing
def scale_command(
    trace: Path, output: Path | None, rate: float, copies: int, spread_ns: int | None, **reading: Any
) -> None:
    """Write a TRACE at another rate, for more users, or with sessions that begin one after the other."""
    from kvarts.sim.traffic.editing import repeated, scaled, spread

    changed = _load(trace, reading)
    if copies > 1:
        changed = repeated(changed, copies)
    if spread_ns is not None:
        changed = spread(changed, spread_ns)
    _write(scaled(changed, rate), output)


@trace_command.command("anonymize", cls=Command)
@click.argument("trace", type=INPUT)
@_writing
def anonymize_command(trace: Path, output: Path | None, **reading: Any) -> None:
    """Renumber ids, sessions, tenants and models of a TRACE, so that only lengths, times and shared prefixes remain."""
    from kvarts.sim.traffic.editing import anonymized

    _write(anonymized(_load(trace, reading)), output)


def _load(path: Path, reading: dict[str, Any]) -> Trace:
    from kvarts.sim.traffic.formats import load_trace

    with reading_progress(path) as progress:
        return load_trace(path, **reading_of(given_by_flags(reading, [SECTION])), on_read=progress.update)


def _write(trace: Trace, output: Path | None, tool: str | None = None) -> None:
    from kvarts.base.files import check_writable, whole_file
    from kvarts.sim.traffic.editing import tool_lines, trace_lines

    lines, warnings = (trace_lines(trace), []) if tool is None else tool_lines(trace, tool)
    if output is None:
        print_bytes(b"".join(lines))
    else:
        check_writable(output)
        with whole_file(output) as file:
            file.writelines(lines)
    _say(trace)
    for warning in warnings:
        click.echo(f"kvarts: {warning}", err=True)
    if tool is not None:
        return
    is_agentic = any(request.after for request in trace.requests or ())
    if trace.unit_tokens != 512 and not is_agentic:  # the header of agentic lines has the block size
        click.echo(f"kvarts: a hash id stands for {trace.unit_tokens} tokens: read it with "
                   f"--trace-block-size {trace.unit_tokens}", err=True)  # fmt: skip


def _say(trace: Trace) -> None:
    """Write the warnings of a trace to standard error."""
    for warning in trace.said():
        click.echo(f"kvarts: {warning}", err=True)
