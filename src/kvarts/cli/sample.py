"""What `kvarts replay` replays: a trace, traffic that a file describes, or the bundled sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import msgspec

from kvarts.errors import ConfigError, parts_of
from kvarts.settings import AtLeastOne, Flags, Given, Section, setting

if TYPE_CHECKING:
    from kvarts.traffic.trace import Trace

__all__ = ["SECTION", "TrafficSettings", "load_traffic", "over_sample_settings", "reading_of"]

SAMPLE = "coding-agents"
SAMPLE_SOURCE = "twelve sessions of coding agents from kv-cache-tester (Apache-2.0)"
SAMPLE_SETTINGS = {"model": "llama-3.1-8b", "device": "h100-80gb"}
"""By their keys. With these, the pages nearly suffice for what the sessions come back to."""


class TrafficSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed, as a file says it, and how a trace is read. A trace is the argument of the command."""

    trace: Annotated[str | None, setting("Path of a trace, relative to this file.", flag=None)] = None
    trace_block_size: Annotated[
        AtLeastOne | None,
        setting("Tokens that a hash id of the trace stands for.", metavar="TOKENS", default="512"),
    ] = None
    skip_bad_lines: Annotated[bool, setting("Leave out lines that cannot be read; the report says how many.")] = False
    session_turns: Annotated[
        Literal["whole", "deltas"] | None,
        setting(
            "Whether later turns of sessions in Mooncake's form have whole prompts, or only what is new.",
            metavar="KIND",
            default="whole, refused if they look like deltas",
        ),
    ] = None
    workload: Annotated[Any, setting("Table of a Workload: traffic made from a seed.", flag=None)] = None


SECTION = Section(struct=TrafficSettings, title="Traffic")


def reading_of(given: Given) -> dict[str, Any]:
    """Return how traces are read, see load_trace."""
    return {key: given[key] for key in ("trace_block_size", "skip_bad_lines", "session_turns") if key in given}


def load_traffic(given: Given, trace: Path | None) -> Trace:
    """Load the trace named on the command line, or what the file describes, or the sample."""
    from kvarts.traffic.formats import load_trace

    if "workload" in given:
        if trace is not None or "trace" in given:
            raise given.error("workload", "is given beside a trace", hint="Keep one of them.")
        return _workload(given)
    if trace is None and "trace" in given:
        trace = given.path_of("trace")
    if trace is not None:
        return load_trace(trace, **reading_of(given))
    from importlib.resources import as_file, files

    click.echo(f"kvarts: replaying {SAMPLE_SOURCE}; give a TRACE to replay your own", err=True)
    with as_file(files("kvarts") / "data" / SAMPLE) as directory:
        return load_trace(directory, **reading_of(given))


def over_sample_settings(given: Given, sections: Sequence[Section]) -> Given:
    """Return what is given on the command line, laid over the sample's own settings.

    A given `cost` stands alone: how long steps take is then not a matter of model and device.
    """
    sample = Given()
    spellings = Flags({key: f"{key} of the sample" for key in SAMPLE_SETTINGS})
    if "cost" not in given:
        for setting in (setting for section in sections if not section.is_named for setting in section.settings):
            if setting.key in SAMPLE_SETTINGS:
                sample.add(setting, SAMPLE_SETTINGS[setting.key], spellings)
    return given.over(sample)


def _workload(given: Given) -> Trace:
    from kvarts.traffic.workload import Workload

    try:
        return msgspec.convert(given["workload"], Workload).trace()
    except msgspec.ValidationError as error:
        what, inner = parts_of(error)
        raise given.named(ConfigError(what, field=f"workload.{inner}" if inner else "workload"), ()) from error
    except ConfigError as error:
        inner = (error.field or "").removeprefix("workload.")
        raise given.named(ConfigError(error.what, field=f"workload.{inner}", hint=error.hint), ()) from error
