"""Reads a trace of any known form: how each is recognised, an example, and its reader.

A form is recognised by the field names of its first records, or by its columns, never by the file name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.base.errors import ConfigError, InputError
from kvarts.base.files import sample_of
from kvarts.base.limits import check_whole
from kvarts.sim.traffic.rows import Omit, Rows, columns_in, load_rows_of, names_in, parse_columns
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_file import SUFFIXES, TraceFile

if TYPE_CHECKING:
    from pathlib import Path

    from kvarts.sim.traffic.mooncake import Turns

__all__ = ["FORMS", "TraceForm", "form_of", "load_trace", "nearest"]

NAME_COLUMNS = "Name the columns of a table of requests: --column input_tokens=NAME,output_tokens=NAME,time=NAME."
NO_IDS = "the trace has no hash ids"
SAYS_ITSELF = "the trace says it itself"
SKIPPING, BLOCK_SIZE, TURNS = "skip_bad_lines", "trace_block_size", "session_turns"
COLUMN, RUN, OUTPUT = "column", "run", "output_tokens"
TEXTS = frozenset({"tokenizer", "chat_template", OUTPUT})
ANY_ROWS = frozenset({SKIPPING, COLUMN, OUTPUT})
FAILED, CACHED, EMBEDDINGS = "failed", "answered by a proxy cache", "embeddings"
FEW_OTHERS = 16
"""Reading of a directory stops when its files of another form outnumber the rest by this number."""
MOST_NAMES, MOST_SHOWN = 12, 40
"""Most fields of an unknown form to show in an error, and most characters of each."""


class TraceForm(msgspec.Struct, frozen=True, kw_only=True):
    """One form of traces.

    `signs`: sets of field names; the form is recognised if all fields of one set are present. `whole_signs`: sets that
    must be all fields. `needs_values`: these fields must not be empty. `example`: the first record as published, or the
    header and a row. `rows`: where its rows hold what; or else `reader`: MODULE:FUNCTION below `kvarts.sim.traffic`.
    `takes`: options of `load_trace` that apply; `refuses`: reasons why others do not.
    """

    name: str
    title: str
    signs: tuple[frozenset[str], ...]
    example: str
    reader: str = ""
    rows: Rows | None = None
    takes: frozenset[str] = frozenset({SKIPPING})
    refuses: dict[str, str] = msgspec.field(default_factory=lambda: {BLOCK_SIZE: NO_IDS})
    whole_signs: tuple[frozenset[str], ...] = ()
    needs_values: bool = False
    is_table: bool = False
    reads_directories: bool = False
    tells_prefixes: bool = False

    def load(self, file: TraceFile, options: dict[str, Any]) -> Trace:
        """Read `file`. Raise InputError."""
        if self.rows is not None:
            return load_rows_of(file, self.rows, **options)
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
        rows=Rows(
            required="event_type",
            only=(("event_type", "request_end"),),
            time="request/request_received_ms:ms",
            input_tokens="request/replay/input_length",
            output_tokens="request/output_tokens",
            session_id="agent_context/session_id",
            request_id="request/request_id",
            hash_ids="request/replay/input_sequence_hashes",
            block_size="request/replay/trace_block_size",
            has_whole_blocks=True,
        ),
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
        takes=frozenset({RUN}),
        refuses={BLOCK_SIZE: NO_IDS, SKIPPING: "a line is a whole run"},
    ),
    TraceForm(
        name="guidellm",
        title="reports of GuideLLM, with details of requests",
        signs=_signs("benchmarks"),
        example='{"metadata":{"version":2},"benchmarks":[{"requests":{"successful":[{"prompt_tokens":256,'
        '"output_tokens":128,"request_start_time":50.5}]}}]}',
        reader="results:load_results",
        takes=frozenset({RUN}),
        refuses={BLOCK_SIZE: NO_IDS, SKIPPING: "a report is one object"},
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
        rows=Rows(
            time="timestamp:s",
            input_tokens="input_length",
            output_tokens="output_length",
            request_id="chat_id",
            parent="parent_chat_id",
            hash_ids="hash_ids",
            unit_tokens=16,
        ),
        takes=ANY_ROWS | {BLOCK_SIZE},
        tells_prefixes=True,
    ),
    TraceForm(
        name="inference-perf",
        title="per_request_lifecycle_metrics.json of inference-perf",
        signs=_signs("start_time end_time info"),
        example='{"start_time":1000.0,"end_time":1001.0,"info":{"request_metrics":{"text":{"input_tokens":120}},'
        '"response_metrics":{"output_tokens":8,"server_usage":{"prompt_tokens":125,"completion_tokens":8}}},'
        '"error":null}',
        rows=Rows(
            time="start_time:s",
            input_tokens="info/response_metrics/server_usage/prompt_tokens|"
            "info/response_metrics/server_usage/input_tokens|info/request_metrics/text/input_tokens|info/input_tokens",
            output_tokens="info/response_metrics/server_usage/completion_tokens|"
            "info/response_metrics/server_usage/output_tokens|info/response_metrics/output_tokens|info/output_tokens",
            cached_tokens="info/response_metrics/server_usage/prompt_tokens_details/cached_tokens",
            session_id="session_id",
            omits=(Omit("error/error_type|error", "(?s).+", FAILED),),
        ),
        takes=ANY_ROWS,
    ),
    TraceForm(
        name="baseten",
        title="Baseten's completion traces in Parquet, with block hashes where they are recorded",
        signs=_signs("timestamp_start_unix_ms input_tokens output_tokens"),
        example='{"timestamp_start_unix_ms":1767261600000,"input_tokens":150,"output_tokens":8,"provided_session_id":"s",'
        '"total_hashes":[11,22],"block_size":64}',
        rows=Rows(
            time="timestamp_start_unix_ms:ms",
            input_tokens="input_tokens",
            output_tokens="output_tokens",
            session_id="provided_session_id|poor_man_session_id",
            hash_ids="total_hashes",
            block_size="block_size",
        ),
        takes=ANY_ROWS | {BLOCK_SIZE},
        tells_prefixes=True,
    ),
    TraceForm(
        name="gemini",
        title="chats of Gemini CLI (chats/session-*), one or a directory of them; prefixes are inferred",
        signs=_signs("sessionId messages startTime", "sessionId projectHash startTime", "id timestamp type tokens"),
        example='{"sessionId":"s","projectHash":"p","startTime":"2026-06-01T09:00:00.000Z","messages":[{"id":"a",'
        '"timestamp":"2026-06-01T09:00:01.000Z","type":"user","content":"x"},{"id":"b","timestamp":'
        '"2026-06-01T09:00:06.000Z","type":"gemini","content":"y","tokens":{"input":9000,"output":100,"cached":4096,'
        '"thoughts":64,"tool":0,"total":9164}}]}',
        rows=Rows(
            each="messages",
            time="timestamp",
            input_tokens="tokens/input+tokens/tool",
            output_tokens="tokens/output+tokens/thoughts",
            cached_tokens="tokens/cached",
            session_id="../sessionId",
            only=(("type", "gemini"), ("tokens", "(?s).+")),
            key="id",
            asked=("type", "user"),
            infers=True,
        ),
        takes=frozenset({SKIPPING}),
        reads_directories=True,
        tells_prefixes=True,
    ),
    TraceForm(
        name="messages",
        title="request bodies, request logs, batches and conversations with messages or prompts as text (OpenAI, "
        "Anthropic, ShareGPT, WildChat, AIPerf's raw_payload and inputs_json), one file or a directory",
        signs=_signs(
            "messages",
            "conversations",
            "conversation",
            "prompt",
            "model input",
            "input instructions",
            "custom_id body",
            "custom_id response",
            "request response",
            "request_body",
            "session_id payloads",
        ),
        whole_signs=_signs("data"),
        needs_values=True,
        example='{"created":1700000000,"model":"m","messages":[{"role":"system","content":"Be brief."},{"role":"user",'
        '"content":"Hello"}],"response":{"choices":[{"message":{"role":"assistant","content":"Hi."}}],"usage":'
        '{"prompt_tokens":14,"completion_tokens":2}}}',
        reader="messages:load_messages",
        takes=frozenset({SKIPPING, BLOCK_SIZE}) | TEXTS,
        reads_directories=True,
        tells_prefixes=True,
    ),
    TraceForm(
        name="openai",
        title="a log of OpenAI-style responses",
        signs=_signs("created usage", "created_at usage"),
        example='{"id":"chatcmpl-1","created":1700000000,"usage":{"prompt_tokens":30,"completion_tokens":7}}',
        rows=Rows(
            time="created:s|created_at:s",
            input_tokens="usage/prompt_tokens|usage/input_tokens",
            output_tokens="usage/completion_tokens|usage/output_tokens",
            cached_tokens="usage/prompt_tokens_details/cached_tokens|usage/input_tokens_details/cached_tokens",
            omits=(Omit("error/message", "(?s).+", FAILED), Omit("object", "list|.*embedding.*", EMBEDDINGS)),
        ),
        takes=ANY_ROWS,
    ),
    TraceForm(
        name="litellm",
        title="spend logs of LiteLLM, as JSON, a page of its API, or CSV",
        signs=_signs("startTime prompt_tokens completion_tokens"),
        example='{"request_id":"chatcmpl-1","call_type":"acompletion","prompt_tokens":1200,"completion_tokens":30,'
        '"startTime":"2025-01-01T10:00:00.000Z","endTime":"2025-01-01T10:00:03.000Z"}',
        rows=Rows(
            time="startTime",
            input_tokens="prompt_tokens",
            output_tokens="completion_tokens",
            request_id="request_id",
            key="request_id",
            omits=(
                Omit("status", "failure", FAILED),
                Omit("cache_hit", "(?i)true", CACHED),
                Omit("call_type", ".*embedding.*", EMBEDDINGS),
                Omit("call_type", ".*(rerank|moderation|image|speech|transcription).*", "not of text"),
            ),
        ),
        takes=ANY_ROWS,
    ),
    TraceForm(
        name="helicone",
        title="exports of Helicone, JSON lines, a page of its API, or CSV",
        signs=_signs("request_created_at prompt_tokens completion_tokens"),
        example='{"request_id":"r","request_created_at":"2026-01-01T10:00:00.000Z","response_status":200,"request_model":'
        '"m","prompt_tokens":1200,"completion_tokens":30,"prompt_cache_read_tokens":1024,"delay_ms":900,'
        '"request_properties":{"Helicone-Session-Id":"s"}}',
        rows=Rows(
            time="request_created_at",
            input_tokens="prompt_tokens",
            output_tokens="completion_tokens",
            cached_tokens="prompt_cache_read_tokens",
            session_id="request_properties/Helicone-Session-Id|properties/Helicone-Session-Id",
            request_id="request_id",
            key="request_id",
            omits=(
                Omit("response_status", r"(?!2\d\d$)-?\d+", FAILED),
                Omit("cache_reference_id", ".*[1-9a-f].*", CACHED),
                Omit("request_path|target_url", ".*/embeddings.*", EMBEDDINGS),
            ),
        ),
        takes=ANY_ROWS,
    ),
    TraceForm(
        name="langfuse",
        title="observations of Langfuse: exports to blob storage or from its pages, and pages of its API",
        signs=_signs("startTime traceId type", "start_time trace_id type"),
        example='{"id":"o","trace_id":"t","type":"GENERATION","start_time":"2026-01-01 10:00:00.000000","end_time":'
        '"2026-01-01 10:00:02.000000","level":"DEFAULT","usage_details":{"input":176,"input_cached_tokens":1024,'
        '"output":80,"total":1280}}',
        rows=Rows(
            time="startTime|start_time",
            input_tokens="usageDetails/*input*|usage_details/*input*|usage/input|usage/promptTokens|"
            "inputUsage|promptTokens|prompt_tokens",
            output_tokens="usageDetails/*output*|usage_details/*output*|usage/output|usage/completionTokens|"
            "outputUsage|completionTokens|completion_tokens",
            cached_tokens="usageDetails/*cache*read*|usage_details/*cache*read*|usageDetails/*cached*|"
            "usage_details/*cached*",
            session_id="sessionId|session_id",
            request_id="id",
            key="id",
            only=(("type", "GENERATION|EMBEDDING"),),
            omits=(Omit("type", "EMBEDDING", EMBEDDINGS), Omit("level", "ERROR", FAILED)),
        ),
        takes=ANY_ROWS,
    ),
    TraceForm(
        name="otlp",
        title="spans of OpenTelemetry with gen_ai attributes, as OTLP's JSON",
        signs=_signs("resourceSpans"),
        example='{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"a","spanId":"b","name":"chat m",'
        '"startTimeUnixNano":"1780300000000000000","endTimeUnixNano":"1780300002000000000","attributes":[{"key":'
        '"gen_ai.operation.name","value":{"stringValue":"chat"}},{"key":"gen_ai.usage.input_tokens","value":'
        '{"intValue":"1200"}},{"key":"gen_ai.usage.output_tokens","value":{"intValue":"80"}}]}]}]}]}',
        rows=Rows(
            each="resourceSpans/scopeSpans/spans",
            attributes=("attributes",),
            only=(
                (
                    "attributes/gen_ai.operation.name|attributes/gen_ai.system|attributes/gen_ai.request.model",
                    "(?!execute_tool|create_agent|invoke_agent|invoke_workflow|plan$).+",
                ),
            ),
            time="startTimeUnixNano:ns|start_time_unix_nano:ns",
            input_tokens="attributes/gen_ai.usage.input_tokens|attributes/gen_ai.usage.prompt_tokens",
            output_tokens="attributes/gen_ai.usage.output_tokens|attributes/gen_ai.usage.completion_tokens",
            cached_tokens="attributes/gen_ai.usage.cache_read.input_tokens",
            session_id="attributes/gen_ai.conversation.id",
            request_id="spanId",
            key="spanId",
            omits=(
                Omit("attributes/error.type|status/code", "(?!0|1|STATUS_CODE_(OK|UNSET)).+", FAILED),
                Omit("attributes/gen_ai.operation.name", "embeddings", EMBEDDINGS),
            ),
        ),
        takes=ANY_ROWS,
    ),
    TraceForm(
        name="dag",
        title="AIPerf's dag_jsonl: conversations that branch; tokens are words",
        signs=_signs("session_id turns"),
        example='{"session_id":"root","turns":[{"messages":[{"role":"user","content":"Plan it."}],"max_tokens":8},'
        '{"messages":[{"role":"user","content":"Go on."}],"max_tokens":4,"delay":20.0,"forks":[],"spawns":[]}]}',
        reader="dag:load_dag",
        takes=frozenset({OUTPUT}),
        refuses={BLOCK_SIZE: NO_IDS, SKIPPING: "a conversation without one of its branches is another"},
        tells_prefixes=True,
    ),
    TraceForm(
        name="codex",
        title="session files of Codex CLI (rollout-*.jsonl), one or a directory of them; prefixes are inferred",
        signs=_signs("timestamp type payload"),
        example='{"timestamp":"2026-06-01T09:00:06.000Z","type":"event_msg","payload":{"type":"token_count","info":'
        '{"total_token_usage":{"input_tokens":9000,"output_tokens":210},"last_token_usage":{"input_tokens":9000,'
        '"cached_input_tokens":4096,"output_tokens":210}}}}',
        rows=Rows(
            time="timestamp",
            input_tokens="payload/info/last_token_usage/input_tokens",
            output_tokens="payload/info/last_token_usage/output_tokens",
            cached_tokens="payload/info/last_token_usage/cached_input_tokens",
            only=(("payload/type", "token_count"), ("payload/info/last_token_usage", "(?s).+")),
            key="payload/info/total_token_usage",
            asked=("payload/role|payload/type", "user|user_message|.*_call_output"),
            infers=True,
        ),
        takes=frozenset({SKIPPING}),
        reads_directories=True,
        tells_prefixes=True,
    ),
    TraceForm(
        name="claude-stream",
        title="output of claude -p --output-format stream-json; it has no times, and prefixes are inferred",
        signs=_signs("type message session_id parent_tool_use_id", "type subtype session_id"),
        example='{"type":"assistant","session_id":"s","parent_tool_use_id":null,"uuid":"u","message":{"model":"m","id":'
        '"msg_1","role":"assistant","stop_reason":"end_turn","usage":{"input_tokens":5,"cache_creation_input_tokens":'
        '500,"cache_read_input_tokens":10000,"output_tokens":200}}}',
        reader="claude_code:load_claude_code",
        tells_prefixes=True,
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
        takes=frozenset({SKIPPING, BLOCK_SIZE, TURNS, OUTPUT}),
        tells_prefixes=True,
    ),
    TraceForm(
        name="azure",
        title="Azure's LLM inference traces of 2023 and 2024",
        signs=_columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        example="TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5",
        rows=Rows(time="TIMESTAMP", input_tokens="ContextTokens", output_tokens="GeneratedTokens"),
        takes=ANY_ROWS,
        is_table=True,
    ),
    TraceForm(
        name="burstgpt",
        title="BurstGPT",
        signs=_columns("Timestamp", "Request tokens", "Response tokens"),
        example="Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,7,1.2,ChatGPT,472,18,490,Conversation log",
        rows=Rows(
            time="Timestamp:s",
            input_tokens="Request tokens",
            output_tokens="Response tokens",
            session_id="Session ID",
        ),
        takes=ANY_ROWS,
        is_table=True,
    ),
    TraceForm(
        name="columns",
        title="any other table of requests; --column input_tokens=NAME,time=NAME:ms,... where names are not known",
        signs=(),
        rows=Rows(
            omits=(
                Omit("status|status_code|http_status|response_status", "(?i)[45]\\d\\d|fail(ed|ure)?|error", FAILED),
                Omit("call_type|endpoint|object|path|route|type", "(?i).*embedding.*", EMBEDDINGS),
            ),
        ),
        example="request_ts,prompt_tokens,completion_tokens,cached_tokens\n2026-01-01 10:00:00.5,1200,30,1024",
        takes=ANY_ROWS | {BLOCK_SIZE},
        is_table=True,
    ),
)

COLUMNS = FORMS[-1]
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
        found = file.first_filled if form.needs_values else records
        is_sign = any(sign <= names for sign in form.signs for names in found)
        if is_sign or any(names in form.whole_signs for names in found):
            return form
    if any(sign <= names for *_, signs in CONVERTED for sign in signs for names in records):
        return None
    columns = columns_in(list(names_in(file, Rows()))) if records else {}
    return COLUMNS if "input_tokens" in columns and columns.keys() & {"time", "output_tokens"} else None


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
    column: str | Mapping[str, str] | None = None,
    run: int | None = None,
    output_tokens: int | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    on_read: Callable[[int], object] | None = None,
) -> Trace:
    """Read a trace of any form in `kvarts.sim.traffic.formats`, recognised by its content. Files may be gzipped.

    `sample:mooncake` is a bundled trace, see `kvarts.base.files`.

    `trace_block_size`: tokens that a hash id stands for; default 512 in Mooncake's form, 16 in Qwen-Bailian's.
    `skip_bad_lines`: skip and count malformed lines. `session_turns`: whether later turns of Mooncake's sessions have
    `whole` prompts or only `deltas`. `column`: what a table calls the fields of a request, as a mapping or as
    `input_tokens=prompt_tokens,time=ts:ms`. `run`: number of a run, from 1, in a file of several. `output_tokens`:
    length of the answers that a file does not record. `tokenizer` and `chat_template` apply to messages, see
    `kvarts.sim.traffic.messages`. `on_read` receives the number of bytes of each part that is read. Raise
    MissingFileError; InputError, with file and place, also for an unknown form; ConfigError for an option that the form
    does not accept.

    >>> from kvarts import load_trace
    >>> trace = load_trace("sample:azure-chat")
    >>> len(list(trace)), trace.name
    (1000, 'azure-conv-1000.csv')
    """
    if os.path.splitext(path)[1] == ".toml":  # noqa: PTH122
        raise ConfigError("is a configuration, not a trace", path=path, hint="Use --config FILE.")
    sample = sample_of(path)
    if sample is not None:
        trace_block_size = trace_block_size or sample.trace_block_size
    columns = None if column is None else parse_columns(column)
    for name, number in (("run", run), ("output_tokens", output_tokens)):
        if number is not None:
            check_whole(number, name)
    file = TraceFile(path)
    form = _form(file, columns)
    file.on_read = on_read
    options: dict[str, Any] = {}
    given: dict[str, Any] = {
        BLOCK_SIZE: trace_block_size,
        SKIPPING: skip_bad_lines or None,
        TURNS: session_turns,
        COLUMN: columns,
        RUN: run,
        OUTPUT: output_tokens,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
    }
    for name, value in given.items():
        if value is None:
            continue
        if name not in form.takes:
            why = form.refuses.get(name, f"this is {form.title}")
            raise ConfigError(f"is given, and {why}", path=file.path, field=name, hint="Leave it out.")
        options[name] = value
    trace = form.load(file, options)
    _warn_of_broken_sessions(trace, session_turns)
    return trace


def _form(file: TraceFile, columns: Mapping[str, str] | None = None) -> TraceForm:
    """Return the form of a file. Raise InputError, listing the known forms and the nearest one.

    With `columns`, a file of a form that has no columns is a table of requests.
    """
    if file.is_directory:
        return _form_of_directory(file)
    form = form_of(file)
    if columns is not None and (form is None or COLUMN not in form.takes) and _names(file):
        return COLUMNS
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
        hint=f"{near}Known are {', '.join(form.name for form in FORMS)}; `kvarts trace forms` has an example of each. "
        f"{NAME_COLUMNS}",
    )


def _form_of_directory(directory: TraceFile) -> TraceForm:
    """Return the form that the first and most other files have. Raise InputError if there is none.

    Only the beginnings of files are read, so that a directory of other files is refused quickly.
    """
    files = directory.walk()
    first = next(files, None)
    if first is None:
        raise InputError(
            f"has no file that ends in {', '.join(SUFFIXES)}",
            path=directory.path,
            hint="Give the directory that holds the traces.",
        )
    form = _form(first)
    if not form.reads_directories:
        raise InputError(
            f"is a directory, and a trace of this form ({form.name}) is a file",
            path=directory.path,
            hint=f"Give the file, such as {first.place}.",
        )
    num_alike, others = 1, list[TraceFile]()
    for file in files:
        if form_of(file) == form:
            num_alike += 1
        else:
            others.append(file)
        if len(others) > num_alike + FEW_OTHERS:
            break
    if len(others) > num_alike:
        raise InputError(
            f"is a directory of other files than traces: {first.place} is of the form {form.name}, and of the next "
            f"{num_alike + len(others) - 1} files {len(others)} are not, such as {others[0].place}",
            path=directory.path,
            hint="Give the directory that holds the traces, or one of them.",
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
