"""Reads a trace of any known form: how each is recognised, an example, and its reader.

A form is recognised by the field names of its first records, or by its columns, never by the file name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.files import reading, sample_of
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_file import TraceFile

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.sim.traffic.mooncake import Turns

__all__ = ["FORMS", "TraceForm", "form_of", "load_trace", "nearest"]

NO_IDS = "the trace has no hash ids"
SAYS_ITSELF = "the trace says it itself"
SKIPPING, BLOCK_SIZE, TURNS = "skip_bad_lines", "trace_block_size", "session_turns"
SUFFIXES = (".json", ".jsonl", ".csv", ".gz")
"""Suffixes of the files considered in a directory."""
MOST_NAMES, MOST_SHOWN = 12, 40
"""Most fields of an unknown form to show in an error, and most characters of each."""


class TraceForm(msgspec.Struct, frozen=True, kw_only=True):
    """One form of traces.

    `signs`: sets of field names; the form is recognised if all fields of one set are present. `example`: the first
    record as published, or the header and a row. `reader`: MODULE:FUNCTION below `kvarts.sim.traffic`. `takes`: options
    of `load_trace` that apply; `refuses`: reasons why others do not.
    """

    name: str
    title: str
    signs: tuple[frozenset[str], ...]
    example: str
    reader: str
    takes: frozenset[str] = frozenset({SKIPPING})
    refuses: dict[str, str] = msgspec.field(default_factory=lambda: {BLOCK_SIZE: NO_IDS})
    is_table: bool = False
    reads_directories: bool = False
    tells_prefixes: bool = False

    def load(self, file: TraceFile, options: dict[str, Any]) -> Trace:
        """Read `file` with its reader. Raise InputError."""
        module, _, function = self.reader.partition(":")
        trace: Trace = getattr(import_module(f"kvarts.sim.traffic.{module}"), function)(file, **options)
        return trace


def _signs(*alternatives: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(names.split()) for names in alternatives)


def _columns(*names: str) -> tuple[frozenset[str], ...]:
    return (frozenset(names),)


FORMS: tuple[TraceForm, ...] = (
    TraceForm(
        name="recorded",
        title="what a live engine of kvarts recorded",
        signs=_signs("arrival_ns prompt num_output_tokens"),
        example='{"arrival_ns":0,"prompt":[5,6,7],"num_output_tokens":2,"output":[8,9]}',
        reader="logs:load_recorded",
        tells_prefixes=True,
    ),
    TraceForm(
        name="dynamo",
        title="request traces of NVIDIA Dynamo (dynamo.request.trace.v1)",
        signs=_signs("schema event_type"),
        example='{"schema":"dynamo.request.trace.v1","event_type":"request_end","event_time_unix_ms":1700000000900,'
        '"request":{"request_id":"a","request_received_ms":1700000000500,"output_tokens":8,"replay":'
        '{"trace_block_size":64,"input_length":150,"input_sequence_hashes":[11,22,33]}}}',
        reader="dynamo:load_dynamo",
        refuses={BLOCK_SIZE: SAYS_ITSELF},
        tells_prefixes=True,
    ),
    TraceForm(
        name="aiperf",
        title="profile_export.jsonl of AIPerf",
        signs=_signs("metadata metrics", "metadata error"),
        example='{"metadata":{"x_request_id":"a","conversation_id":"c","turn_index":0,"request_start_ns":'
        '1759813207532900363,"benchmark_phase":"profiling","was_cancelled":false},"metrics":{"input_sequence_length":'
        '{"value":550,"unit":"tokens"},"output_sequence_length":{"value":9,"unit":"tokens"},"time_to_first_token":'
        '{"value":255.9,"unit":"ms"},"request_latency":{"value":297.5,"unit":"ms"}},"error":null}',
        reader="results:load_results",
    ),
    TraceForm(
        name="bench",
        title="results of vllm bench serve --save-detailed, and of SGLang's bench_serving --output-details",
        signs=_signs("input_lens output_lens"),
        example='{"backend":"vllm","request_rate":4.0,"input_lens":[512],"output_lens":[128],"start_times":[101.5],'
        '"ttfts":[0.051],"itls":[[0.01,0.01]],"errors":[""]}',
        reader="results:load_results",
        takes=frozenset(),
        refuses={BLOCK_SIZE: NO_IDS, SKIPPING: "a line is a whole run"},
    ),
    TraceForm(
        name="guidellm",
        title="reports of GuideLLM, with details of requests",
        signs=_signs("benchmarks"),
        example='{"metadata":{"version":2},"benchmarks":[{"requests":{"successful":[{"prompt_tokens":256,'
        '"output_tokens":128,"request_start_time":50.5}]}}]}',
        reader="results:load_results",
        takes=frozenset(),
        refuses={BLOCK_SIZE: NO_IDS, SKIPPING: "a report is one object"},
    ),
    TraceForm(
        name="inference-perf",
        title="per_request_lifecycle_metrics.json of inference-perf",
        signs=_signs("start_time end_time info"),
        example='{"start_time":50.5,"end_time":51.5,"request":"{}","response":"{}","info":{"input_tokens":20,'
        '"response_metrics":{"output_tokens":2,"output_token_times":[50.8,50.9]}},"error":null}',
        reader="results:load_results",
        takes=frozenset(),
        refuses={BLOCK_SIZE: NO_IDS, SKIPPING: "a report is one value"},
    ),
    TraceForm(
        name="kv-cache-tester",
        title="sessions of coding agents of kv-cache-tester, a file each, and AgentX, one per line",
        signs=_signs(
            "id block_size requests",
            "block_size hash_id_scope requests",
            "id hash_id_scope requests",
            "id block_size hash_id_scope",
        ),
        example='{"id":"one","models":["m"],"block_size":64,"hash_id_scope":"local","requests":[{"t":0.0,"type":"n",'
        '"model":"m","in":130,"out":5,"hash_ids":[1,2],"api_time":2.0,"think_time":0.0}]}',
        reader="kv_cache_tester:load_kv_cache_tester",
        takes=frozenset(),
        refuses={BLOCK_SIZE: SAYS_ITSELF, SKIPPING: "a session without one of its turns is another session"},
        reads_directories=True,
        tells_prefixes=True,
    ),
    TraceForm(
        name="agentic-mooncake",
        title="agentic traces of NVIDIA Dynamo: requests that wait for requests",
        signs=_signs("schema version block_size", "request_id play_id not_before_ms"),
        example='{"schema":"dynamo.agentic_mooncake","version":2,"block_size":64,"hash_id_scope":"local","source":'
        '{"format":"weka","digest":"d"}}\n{"request_id":"a","play_id":"p","session_id":"s","model":"m","input_length":'
        '128,"output_length":2,"hash_ids":[101,202],"not_before_ms":0.0,"dependencies":[]}',
        reader="dynamo:load_agentic",
        takes=frozenset(),
        refuses={BLOCK_SIZE: SAYS_ITSELF, SKIPPING: "a play without one of its requests is another play"},
        tells_prefixes=True,
    ),
    TraceForm(
        name="bailian",
        title="usage traces of Qwen-Bailian",
        signs=_signs("chat_id hash_ids"),
        example='{"chat_id":159,"parent_chat_id":-1,"timestamp":61.114,"input_length":37,"output_length":12,'
        '"type":"text","turn":1,"hash_ids":[1089,1090,1091]}',
        reader="logs:load_bailian",
        takes=frozenset({SKIPPING, BLOCK_SIZE}),
        tells_prefixes=True,
    ),
    TraceForm(
        name="openai",
        title="a log of OpenAI-style responses",
        signs=_signs("created usage"),
        example='{"id":"chatcmpl-1","created":1700000000,"usage":{"prompt_tokens":30,"completion_tokens":7}}',
        reader="logs:load_usage_log",
    ),
    TraceForm(
        name="litellm",
        title="spend logs of LiteLLM",
        signs=_signs("startTime prompt_tokens completion_tokens"),
        example='{"request_id":"chatcmpl-1","call_type":"acompletion","prompt_tokens":1200,"completion_tokens":30,'
        '"startTime":"2025-01-01T10:00:00.000Z","endTime":"2025-01-01T10:00:03.000Z"}',
        reader="logs:load_spend_log",
    ),
    TraceForm(
        name="claude-code",
        title="session files of Claude Code, one or a directory of them; prefixes are inferred",
        signs=_signs("type sessionId message timestamp"),
        example='{"parentUuid":null,"isSidechain":false,"type":"assistant","sessionId":"s","requestId":"req_1","uuid":"u",'
        '"timestamp":"2026-04-01T10:00:00.000Z","message":{"model":"m","id":"msg_1","role":"assistant","usage":'
        '{"input_tokens":5,"cache_creation_input_tokens":500,"cache_read_input_tokens":10000,"output_tokens":200}}}',
        reader="claude_code:load_claude_code",
        reads_directories=True,
        tells_prefixes=True,
    ),
    TraceForm(
        name="mooncake",
        title="Mooncake's traces; --set session_turns=deltas for sessions whose later turns have only what is new",
        signs=_signs("input_length"),
        example='{"timestamp":0,"input_length":6758,"output_length":500,"hash_ids":[0,1,2,3,4,5,6,7,8,9,10,11,12,13]}',
        reader="mooncake:load_mooncake",
        takes=frozenset({SKIPPING, BLOCK_SIZE, TURNS}),
        tells_prefixes=True,
    ),
    TraceForm(
        name="azure",
        title="Azure's LLM inference traces of 2023 and 2024",
        signs=_columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        example="TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5",
        reader="tables:load_azure",
        is_table=True,
    ),
    TraceForm(
        name="burstgpt",
        title="BurstGPT",
        signs=_columns("Timestamp", "Request tokens", "Response tokens"),
        example="Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,7,1.2,ChatGPT,472,18,490,Conversation log",
        reader="tables:load_burstgpt",
        is_table=True,
    ),
)

EVALSCOPE = TraceForm(
    name="evalscope",
    title="benchmark_data.db of evalscope perf, a database of SQLite",
    signs=_columns("SQLite format 3"),
    example="",
    reader="results:load_results",
    takes=frozenset(),
    refuses={BLOCK_SIZE: NO_IDS, SKIPPING: "a database is one value"},
    is_table=True,
)
"""Not among FORMS: it has no example in text."""

CONVERTED: tuple[tuple[str, str, tuple[frozenset[str], ...]], ...] = (
    ("LLMServingSim", "llmservingsim", _signs("input_toks arrival_time_ns", "arrival_time_ns sub_requests")),
    ("ServeGen", "servegen", _signs("timestamp data")),
    ("LMCache", "lmcache", _signs("chunk_hashes seq_len")),
    ("Tair KVCache", "tair", _signs("timestamp token_ids", "timestamp_us keys")),
    ("Vidur", "vidur", _columns("num_prefill_tokens", "num_decode_tokens")),
    ("splitwise-sim", "splitwise", _columns("arrival_timestamp", "prompt_size", "token_size")),
)
"""Projects whose forms a script in examples/traces converts, with its name and the signs of the form."""


def form_of(file: TraceFile) -> TraceForm | None:
    """Return the form of a file, or of a directory's first file; None if unknown."""
    records = _names(file)
    for form in (*FORMS, EVALSCOPE):
        if form.is_table == bool(file.header) and any(sign <= names for sign in form.signs for names in records):
            return form
    return None


def nearest(file: TraceFile) -> tuple[TraceForm, frozenset[str]] | None:
    """Return the form with the largest share of its fields present, and its missing fields; None without a match."""
    found = [
        (-len(sign & names) / len(sign), form, sign - names)
        for form in FORMS
        for sign in form.signs
        for names in _names(file)
        if sign & names
    ]
    if not found:
        return None
    _, form, missing = min(found, key=lambda each: each[0])
    return form, missing


def _names(file: TraceFile) -> Sequence[frozenset[str]]:
    return [frozenset(file.header)] if file.header else file.first_fields


def load_trace(
    path: Path | str,
    *,
    trace_block_size: int | None = None,
    skip_bad_lines: bool = False,
    session_turns: Turns | None = None,
) -> Trace:
    """Read a trace of any form in `kvarts.sim.traffic.formats`, recognised by its content. Files may be gzipped.

    `sample:mooncake` is a bundled trace, see `kvarts.base.files`.

    `trace_block_size`: tokens that a hash id stands for; default 512 in Mooncake's form, 16 in Qwen-Bailian's.
    `skip_bad_lines`: skip and count malformed lines. `session_turns`: whether later turns of Mooncake's sessions have
    `whole` prompts or only `deltas`. Raise MissingFileError; InputError, with file and place, also for an unknown form;
    ConfigError for an option that the form does not accept.
    """
    if os.path.splitext(path)[1] == ".toml":  # noqa: PTH122
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
    for project, script, signs in CONVERTED:
        if any(sign <= fields for sign in signs for fields in _names(file)):
            raise InputError(
                f"is of the form of {project}, which is not read as it stands",
                path=file.path,
                hint=f"Convert it: python examples/traces/{script}.py {file.place} > trace.jsonl",
            )
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
    from kvarts.sim.traffic.implied import broken_sessions

    broken, num_sessions = broken_sessions(trace)
    if broken:
        read_as = " as --set session_turns says" if turns == "whole" else ""
        trace.warnings.append(
            f"in {len(broken):,} of {num_sessions:,} sessions no turn shares its first id with the turn before: they "
            f"are read as whole prompts{read_as}, and hit nothing of each other"
        )
