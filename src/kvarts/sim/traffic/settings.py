"""The traffic of a replay as settings: a trace, how to read it and how its sessions are sent, or a workload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from kvarts.base.errors import ConfigError, parts_of
from kvarts.base.settings import AtLeastOne, Given, Section, setting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvarts.sim.traffic.agentic_replay import AgenticReplay
    from kvarts.sim.traffic.trace import Trace

__all__ = ["OF_TEXTS", "READING", "SECTION", "TrafficSettings", "load_given", "reading_of"]

MadeT = TypeVar("MadeT")


class TrafficSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic settings of a file. On the command line, the trace is an argument instead."""

    trace: Annotated[str | None, setting("Path of a trace, relative to this file.", flag=None)] = None
    trace_block_size: Annotated[
        AtLeastOne | None,
        setting("Tokens per hash id of the trace.", metavar="TOKENS", default="512"),
    ] = None
    skip_bad_lines: Annotated[bool, setting("Skip lines that cannot be read; the report has their number.")] = False
    session_turns: Annotated[
        Literal["whole", "deltas"] | None,
        setting(
            "Whether later turns of sessions in Mooncake's form have whole prompts, or only their new part.",
            metavar="KIND",
            default="whole, refused if they look like deltas",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        setting("Tokenizer of messages: a directory, a name on Hugging Face, or words.", metavar="NAME",
                default="words"),
    ] = None  # fmt: skip
    chat_template: Annotated[
        str | None,
        setting("Chat template of messages: a file of jinja2.", metavar="FILE",
                default="the tokenizer's, else ChatML"),
    ] = None  # fmt: skip
    column: Annotated[
        str | None,
        setting(
            "What a table calls the fields of a request: input_tokens=prompt_tokens,time=ts:ms.",
            metavar="FIELD=NAME,..",
            default="names that are known",
        ),
    ] = None
    run: Annotated[
        AtLeastOne | None,
        setting("Number of a run, from 1, in a file of several.", metavar="N", default="the only one"),
    ] = None
    output_tokens: Annotated[
        AtLeastOne | None,
        setting("Length of answers that the file does not record.", metavar="TOKENS", default="they are an error"),
    ] = None
    answers: Annotated[
        Literal["recorded", "implied"],
        setting(
            "Whether answers that the trace lacks are taken from the next turn's prompt, if it contains them.",
            metavar="KIND",
        ),
    ] = "recorded"
    workload: Annotated[Any, setting("Table of a Workload: traffic made from a seed.", flag=None)] = None
    agentic_replay: Annotated[
        Any, setting("Table of an AgenticReplay: the trace's plays of agents, as AIPerf runs them.", flag=None)
    ] = None


OF_TEXTS = ("tokenizer", "chat_template", "output_tokens")
"""The settings of messages."""
READING = ("trace_block_size", "skip_bad_lines", "session_turns", "column", "run", *OF_TEXTS)
"""The options of `load_trace`."""
SECTION = Section(struct=TrafficSettings, title="Traffic")


def reading_of(given: Given) -> dict[str, Any]:
    """Return the given options of `load_trace`."""
    return {key: given[key] for key in READING if key in given}


def load_given(
    given: Given, trace: Path | str | None = None, on_read: Callable[[int], object] | None = None
) -> Trace | None:
    """Load `trace`, or else the traffic named in `given`; None if there is neither. `on_read`: see `load_trace`.

    Raise ConfigError for an invalid workload or one given together with a trace; InputError for a trace.
    """
    if "workload" in given:
        if trace is not None or "trace" in given:
            raise given.error("workload", "cannot be combined with a trace", hint="Keep one of them.")
        return _workload(given)
    agentic = _agentic(given) if "agentic_replay" in given else None
    if trace is None and "trace" in given:
        trace = given.path_of("trace")
    if trace is None:
        return None
    from kvarts.sim.traffic.formats import load_trace

    found = _answered(load_trace(trace, **reading_of(given), on_read=on_read), given)
    return found if agentic is None else agentic.of(found)


def _answered(trace: Trace, given: Given) -> Trace:
    """Return the trace with implied answers, if the settings ask for them."""
    if "answers" not in given or given["answers"] == "recorded":
        return trace
    from kvarts.sim.traffic.implied import with_implied_answers

    return with_implied_answers(trace)


def _workload(given: Given) -> Trace:
    from kvarts.sim.traffic.workload import Workload

    return _of_table(given, "workload", lambda table: msgspec.convert(table, Workload).trace())


def _agentic(given: Given) -> AgenticReplay:
    from kvarts.sim.traffic.agentic_replay import AgenticReplay

    for key in ("concurrency", "speedup"):
        if key in given:
            what = "cannot be combined with agentic_replay"
            raise given.error(key, what, hint="Give agentic_replay.concurrency, the number of lanes.")
    return _of_table(given, "agentic_replay", lambda table: msgspec.convert(table, AgenticReplay))


def _of_table(given: Given, name: str, make: Callable[[Any], MadeT]) -> MadeT:
    """Return what the table `name` describes. Raise ConfigError that names its field."""
    try:
        return make(given[name])
    except msgspec.ValidationError as error:
        what, inner = parts_of(error)
        raise given.named(ConfigError(what, field=f"{name}.{inner}" if inner else name), ()) from error
    except ConfigError as error:
        inner = (error.field or "").removeprefix(f"{name}.")
        raise given.named(ConfigError(error.what, field=f"{name}.{inner}", hint=error.hint), ()) from error
