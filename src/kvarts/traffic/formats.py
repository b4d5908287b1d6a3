"""Reads a trace of any known form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvarts.errors import ConfigError, InputError
from kvarts.files import reading
from kvarts.samples import sample_of
from kvarts.traffic.deltas import broken_sessions
from kvarts.traffic.forms import FORMS, TraceForm, form_of, nearest
from kvarts.traffic.mooncake import Turns
from kvarts.traffic.trace import Trace
from kvarts.traffic.trace_file import TraceFile

__all__ = ["load_trace"]

SUFFIXES = (".json", ".jsonl", ".csv", ".gz")
"""Suffixes of the files considered in a directory."""
MOST_NAMES, MOST_SHOWN = 12, 40
"""Most fields of an unknown form to show in an error, and most characters of each."""


def load_trace(
    path: Path | str,
    *,
    trace_block_size: int | None = None,
    skip_bad_lines: bool = False,
    session_turns: Turns | None = None,
) -> Trace:
    """Read a trace of any form in `kvarts.traffic.forms`, recognised by its content. Files may be gzipped.

    `sample:mooncake` is a bundled trace, see `kvarts.samples`.

    `trace_block_size`: tokens that a hash id stands for; default 512 in Mooncake's form, 16 in Qwen-Bailian's.
    `skip_bad_lines`: skip and count malformed lines. `session_turns`: whether later turns of Mooncake's sessions have
    `whole` prompts or only `deltas`. Raise MissingFileError; InputError, with file and place, also for an unknown form;
    ConfigError for an option that the form does not accept.
    """
    if Path(path).suffix == ".toml":
        raise ConfigError("is a configuration, not a trace", path=path, hint="Use --config FILE.")
    sample = sample_of(path)
    if sample is not None:
        trace_block_size = trace_block_size or sample.trace_block_size
    file = TraceFile(path)
    form = _form(file)
    options: dict[str, Any] = {}
    for name, value in (
        ("trace_block_size", trace_block_size),
        ("skip_bad_lines", skip_bad_lines or None),
        ("session_turns", session_turns),
    ):
        if value is None:
            continue
        if name not in form.takes:
            why = form.refuses.get(name, f"this is {form.title}")
            raise ConfigError(f"is given, and {why}", path=file.path, field=name, hint="Leave it out.")
        options[name] = value
    trace = form.load(file, options)
    _warn_of_broken_sessions(trace, session_turns)
    return trace


def _form(file: TraceFile) -> TraceForm:
    """Return the form of a file. Raise InputError, listing the known forms and the nearest one."""
    if file.is_directory:
        return _form_of_directory(file)
    form = form_of(file)
    if form is not None:
        return form
    if file.is_json and not file.first_fields:
        raise file.malformed()
    if not file.is_json and not any(file.header):
        raise InputError(
            "has no requests", path=file.path, hint="`kvarts trace forms` lists the forms that can be read."
        )
    names = list(file.header or sorted(file.first_fields[0]))
    shown = ", ".join(name[:MOST_SHOWN] for name in names[:MOST_NAMES])
    more = ", ..." if len(names) > MOST_NAMES else ""
    found = nearest(file)
    near = ""
    if found is not None:
        near = f"Nearest is {found[0].name}, which has {', '.join(sorted(found[1]))} as well. "
    raise InputError(
        f"is not of a known form: its first {'line' if file.header else 'record'} has {shown}{more}",
        path=file.path,
        hint=f"{near}Known are {', '.join(form.name for form in FORMS)}; `kvarts trace forms` has an example of each.",
    )


def _form_of_directory(directory: TraceFile) -> TraceForm:
    """Return the form of the first candidate file. Raise InputError without one, or if its form is a single file."""
    with reading(directory.path):
        files = sorted(path for path in directory.path.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())
    if not files:
        raise InputError(
            f"has no file that ends in {', '.join(SUFFIXES)}",
            path=directory.path,
            hint="Give the directory that holds the traces.",
        )
    form = _form(TraceFile(files[0]))
    if not form.reads_directories:
        raise InputError(
            f"is a directory, and a trace of this form ({form.name}) is a file",
            path=directory.path,
            hint=f"Give the file, such as {files[0]}.",
        )
    return form


def _warn_of_broken_sessions(trace: Trace, turns: Turns | None) -> None:
    """Warn if later turns never share their first id with the turn before: the trace may have been misread."""
    if not trace.knows_prefixes or not trace.has_sessions:
        return
    broken, num_sessions = broken_sessions(trace)
    if broken:
        read_as = " as --session-turns says" if turns == "whole" else ""
        trace.warnings.append(
            f"in {len(broken):,} of {num_sessions:,} sessions no turn shares its first id with the turn before: they "
            f"are read as whole prompts{read_as}, and hit nothing of each other"
        )
