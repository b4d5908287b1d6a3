"""Reader for session files of Claude Code: JSON lines, one file per session and per sub-agent, or a directory of them.

The reader uses lines of `type` `assistant`, with their `timestamp`, `requestId` and `message`, whose `usage` has
`input_tokens`, `cache_creation_input_tokens`, `cache_read_input_tokens` and `output_tokens`. A request has one line per
block of its answer. It ends at its last line, and was sent at the time of the line that its first line answers
(`parentUuid`).

Conversion to requests of a trace:

- The length of a prompt is the sum of the three kinds of input tokens. Its contents are inferred, and so are
  dependencies between requests: see sim/traffic/inferred.py.
- Lines with `isSidechain` are requests of sub-agents, identified by `agentId`, or else by the line that began them. A
  sub-agent is a separate session; so are requests of another model than most of the session.
- Lines of a request that come again, or after the next request began, do not move its end. An answer of fewer than 10
  tokens without a `stop_reason` is the placeholder of a stream: its length is bounded by what the next prompt adds.
- The output of `claude -p --output-format stream-json` has the same messages without times, with `session_id` and
  `parent_tool_use_id`: a request is sent when the one before it is done.
- A request whose answer calls a tool has the hint `tool` with its name; if it calls several, the last one.
- Requests that failed or have no output tokens are left out, as are those that another file also contains, where a
  session was resumed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from kvarts.base.errors import InputError, parts_of
from kvarts.base.files import reading
from kvarts.core.hints import MOST_TOOL_CHARS
from kvarts.sim.traffic.bounds import Count
from kvarts.sim.traffic.graph import with_output
from kvarts.sim.traffic.inferred import INFERRED, Call, bound_placeholders, inferred_requests
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_file import REPEATED, SKIP_HINT, TraceFile, by_arrival, date_ns, nothing_left

__all__ = ["load_claude_code"]

MOST_PLACEHOLDER = 9
"""Tokens of an answer, at most, that the beginning of a stream reports."""
MOST_LINES = 1 << 40
"""Times in nanoseconds that are no dates, but numbers of lines."""
NO_TIMES = "the file has no times: a request is sent when the one before it is done"


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Count = 0
    cache_creation_input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    output_tokens: Count = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.input_tokens + (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)


class _Block(msgspec.Struct, gc=False):
    """A part of an answer; `name` is that of a tool if the part is a call."""

    type: str = ""
    name: str | None = None


class _Message(msgspec.Struct, gc=False):
    id: str | None = None
    model: str | None = None
    usage: _Usage | None = None
    content: str | list[_Block] | None = None
    stop_reason: str | msgspec.UnsetType | None = msgspec.UNSET

    @property
    def tool(self) -> str | None:
        """The tool that the answer calls, the last one if it calls several; None if it calls none."""
        blocks = self.content if isinstance(self.content, list) else []
        names = [block.name for block in blocks if block.type == "tool_use" and block.name]
        return names[-1][:MOST_TOOL_CHARS] if names else None


class _Line(msgspec.Struct, gc=False, rename="camel"):
    type: str
    uuid: str | None = None
    parent_uuid: str | None = None
    session_id: str | None = None
    timestamp: str | None = None
    request_id: str | None = None
    agent_id: str | None = None
    is_sidechain: bool = False
    is_api_error_message: bool = False
    stream_session: str | None = msgspec.field(default=None, name="session_id")
    parent_tool_use_id: str | None = msgspec.field(default=None, name="parent_tool_use_id")
    message: msgspec.Raw = msgspec.Raw()


def load_claude_code(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read one session file, or all `.jsonl` files below a directory. Lines that are not requests are ignored.

    Raise MissingFileError, or InputError with line and field.
    """
    file = TraceFile.of(path)
    files = [file]
    if file.is_directory:
        with reading(file.path):
            files = [TraceFile(each) for each in sorted(file.path.rglob("*.jsonl"))]
    calls: dict[str, Call] = {}
    left_out: Counter[str] = Counter()
    num_skipped = 0
    for each in files:
        num_skipped += _read(each, calls, left_out, skip_bad_lines=skip_bad_lines)
    found = list(calls.values())
    has_times = all(call.end_ns > MOST_LINES for call in found)
    warnings = bound_placeholders(found)
    requests = with_output(by_arrival(inferred_requests(found), file), left_out) if found else []
    if not requests:
        raise nothing_left(file, left_out, num_skipped)
    return Trace(
        requests,
        unit_tokens=1,
        has_output_tokens=True,
        name=file.name,
        num_skipped_lines=num_skipped,
        left_out=left_out,
        warnings=[INFERRED, *([] if has_times else [NO_TIMES]), *warnings],
    )


def _read(file: TraceFile, calls: dict[str, Call], left_out: Counter[str], *, skip_bad_lines: bool) -> int:
    """Add the requests of a file to `calls`, by name; return the number of lines skipped."""
    times: dict[str, int] = {}
    begun: dict[str, str] = {}  # uuid of a line -> uuid of the line that began its chain
    of_file: dict[str, Call] = {}
    latest: dict[tuple[str, str, str], str] = {}
    """The request of each chain that began last: lines of another one that come later are repeated."""
    repeated: set[str] = set()
    num_skipped = 0
    decoder, of_message = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Message)
    for number, data in file.records():
        try:
            line, message = _decoded(decoder, of_message, data)
            time_ns = None if line.timestamp is None else date_ns(line.timestamp, "timestamp")
            is_repeated = line.uuid is not None and line.uuid in begun
            if line.uuid is not None and not is_repeated:
                begun[line.uuid] = begun.get(line.parent_uuid or "", line.uuid)
                if time_ns is not None:
                    times[line.uuid] = time_ns
            if message is None:
                continue
            if line.is_api_error_message or message.model == "<synthetic>" or message.usage is None:
                left_out["failed"] += 1
                continue
            name = line.request_id or message.id or line.uuid
            if line.timestamp is None and line.stream_session is not None:
                time_ns = number
            if time_ns is None or name is None:
                raise InputError("is missing", field="timestamp" if time_ns is None else "requestId")
        except InputError as error:
            if not skip_bad_lines:
                raise InputError(error.what, path=file.path, line=number, field=error.field, hint=SKIP_HINT) from error
            num_skipped += 1
            continue
        usage, stop = message.usage, message.stop_reason
        is_placeholder = stop is None and usage.output_tokens <= MOST_PLACEHOLDER
        if name in calls:
            repeated.add(name)
        elif name in of_file:
            call = of_file[name]
            if is_repeated:
                left_out[REPEATED] += 1
            elif latest[call.chain] == name:
                call.end_ns = max(call.end_ns, time_ns)
            call.tool = message.tool or call.tool
            call.is_placeholder &= is_placeholder
            if usage.output_tokens >= call.num_output_tokens:
                call.num_prompt_tokens, call.num_output_tokens = usage.num_prompt_tokens, usage.output_tokens
                call.num_read_tokens = usage.cache_read_input_tokens or 0
        elif usage.num_prompt_tokens:
            agent = (line.agent_id or begun.get(line.uuid or "", "")) if line.is_sidechain else ""
            session = line.session_id or line.stream_session or file.path.stem
            chain = (session, agent or line.parent_tool_use_id or "", message.model or "")
            latest[chain] = name
            of_file[name] = Call(
                start_ns=min(time_ns, times.get(line.parent_uuid or "", time_ns)),
                end_ns=time_ns,
                num_prompt_tokens=usage.num_prompt_tokens,
                num_output_tokens=usage.output_tokens,
                num_read_tokens=usage.cache_read_input_tokens or 0,
                chain=chain,
                tool=message.tool,
                is_placeholder=is_placeholder,
            )
        else:
            left_out["without a prompt"] += 1
    if repeated:
        left_out["that another file has as well"] += len(repeated)
    calls.update(of_file)
    return num_skipped


def _decoded(
    decoder: msgspec.json.Decoder[_Line], of_message: msgspec.json.Decoder[_Message], data: bytes
) -> tuple[_Line, _Message | None]:
    try:
        line = decoder.decode(data)
        if line.type != "assistant":
            return line, None
        if not bytes(line.message):
            raise InputError("is missing", field="message")
        try:
            return line, of_message.decode(line.message)
        except msgspec.ValidationError as error:
            what, field = parts_of(error)
            raise InputError(what, field=f"message.{field}" if field else "message") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        raise InputError(what, field=field) from error
    except RecursionError:
        raise InputError("is nested too deeply") from None
