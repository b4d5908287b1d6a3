"""Reader for session files of Claude Code: JSON lines, one file per session and per sub-agent, or a directory of them.

The reader uses lines of `type` `assistant`, with their `timestamp`, `requestId` and `message`, whose `usage` has
`input_tokens`, `cache_creation_input_tokens`, `cache_read_input_tokens` and `output_tokens`. A request has one line per
block of its answer. It ends at its last line, and was sent at the time of the line that its first line answers
(`parentUuid`).

Conversion to requests of a trace:

- The length of a prompt is the sum of the three kinds of input tokens. Its contents are not recorded but inferred. Each
  request sends the whole conversation, so a prompt at least as long as the previous prompt and its answer begins with
  both, and one at least as long as the previous prompt begins with that. A shorter one, after a compaction, begins with
  as many tokens of it as were read from the cache. The first prompt of a session begins with as many tokens shared by
  all sessions with its model.
- Lines with `isSidechain` are requests of sub-agents, identified by `agentId`, or else by the line that began them. A
  sub-agent is a separate session; so are requests of another model than most of the session. Dependencies between
  requests are inferred from the times, see `sim/traffic/graph.py`.
- A request whose answer calls a tool has the hint `tool` with its name; if it calls several, the last one.
- Requests that failed or have no output tokens are left out, as are those that another file also contains, where a
  session was resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvarts.base.errors import InputError, parts_of
from kvarts.base.files import reading
from kvarts.core.hints import MOST_TOOL_CHARS, Hints
from kvarts.sim.traffic.bounds import Count
from kvarts.sim.traffic.graph import RecordedTimes, linked, with_output
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import SKIP_HINT, TraceFile, by_arrival, date_ns, nothing_left
from kvarts.sim.traffic.trace_request import After

__all__ = ["load_claude_code"]

COMMON = 1 << 60
"""First id of tokens that sessions share, 2**40 per model; ids of single sessions are below."""
CHAIN_BITS = 36
INFERRED = (
    "the files do not identify prefixes that prompts share: these are inferred from their lengths and from cache reads"
)


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
    message: msgspec.Raw = msgspec.Raw()


class _Call(msgspec.Struct):
    """One request; a file has several lines for it."""

    start_ns: int
    end_ns: int
    usage: _Usage
    chain: tuple[str, str, str]
    """The session, the sub-agent or "", and the model."""
    tool: str | None = None
    """The tool that the client runs after the answer."""


def load_claude_code(path: Path | str | TraceFile, *, skip_bad_lines: bool = False) -> Trace:
    """Read one session file, or all `.jsonl` files below a directory. Lines that are not requests are ignored.

    Raise MissingFileError, or InputError with line and field.
    """
    file = TraceFile.of(path)
    files = [file]
    if file.is_directory:
        with reading(file.path):
            files = [TraceFile(each) for each in sorted(file.path.rglob("*.jsonl"))]
    calls: dict[str, _Call] = {}
    left_out: Counter[str] = Counter()
    num_skipped = 0
    for each in files:
        num_skipped += _read(each, calls, left_out, skip_bad_lines=skip_bad_lines)
    requests = with_output(by_arrival(_requests(list(calls.values())), file), left_out) if calls else []
    if not requests:
        raise nothing_left(file, left_out, num_skipped)
    return Trace(
        requests,
        unit_tokens=1,
        has_output_tokens=True,
        name=file.name,
        num_skipped_lines=num_skipped,
        left_out=left_out,
        warnings=[INFERRED],
    )


def _read(file: TraceFile, calls: dict[str, _Call], left_out: Counter[str], *, skip_bad_lines: bool) -> int:
    """Add the requests of a file to `calls`, by name; return the number of lines skipped."""
    times: dict[str, int] = {}
    begun: dict[str, str] = {}  # uuid of a line -> uuid of the line that began its chain
    of_file: dict[str, _Call] = {}
    repeated: set[str] = set()
    num_skipped = 0
    decoder, of_message = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Message)
    for number, data in file.records():
        try:
            line, message = _decoded(decoder, of_message, data)
            time_ns = None if line.timestamp is None else date_ns(line.timestamp, "timestamp")
            if line.uuid is not None:
                begun[line.uuid] = begun.get(line.parent_uuid or "", line.uuid)
                if time_ns is not None:
                    times[line.uuid] = time_ns
            if message is None:
                continue
            if line.is_api_error_message or message.model == "<synthetic>" or message.usage is None:
                left_out["failed"] += 1
                continue
            name = line.request_id or message.id or line.uuid
            if time_ns is None or name is None:
                raise InputError("is missing", field="timestamp" if time_ns is None else "requestId")
        except InputError as error:
            if not skip_bad_lines:
                raise InputError(error.what, path=file.path, line=number, field=error.field, hint=SKIP_HINT) from error
            num_skipped += 1
            continue
        if name in calls:
            repeated.add(name)
        elif name in of_file:
            of_file[name].end_ns = max(of_file[name].end_ns, time_ns)
            of_file[name].tool = message.tool or of_file[name].tool
            if message.usage.output_tokens >= of_file[name].usage.output_tokens:
                of_file[name].usage = message.usage
        elif message.usage.num_prompt_tokens:
            agent = (line.agent_id or begun.get(line.uuid or "", "")) if line.is_sidechain else ""
            of_file[name] = _Call(
                start_ns=min(time_ns, times.get(line.parent_uuid or "", time_ns)),
                end_ns=time_ns,
                usage=message.usage,
                chain=(line.session_id or file.path.stem, agent, message.model or ""),
                tool=message.tool,
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


def _requests(calls: list[_Call]) -> list[TraceRequest]:
    """Return the requests of all sessions, with their dependencies and the shared beginnings of their prompts."""
    calls.sort(key=lambda call: call.start_ns)
    chains: dict[tuple[str, str, str], list[int]] = {}
    for row, call in enumerate(calls):
        chains.setdefault(call.chain, []).append(row)
    contents: dict[int, tuple[tuple[range, ...], range]] = {}
    models: dict[tuple[str, bool], int] = {}
    for number, ((_, agent, model), rows) in enumerate(chains.items()):
        common = COMMON + (models.setdefault((model, bool(agent)), len(models)) << 40)
        contents.update(zip(rows, _contents([calls[row] for row in rows], number, common), strict=True))
    names, waits = _linked(calls, chains)
    requests = []
    for row, call in enumerate(calls):
        prompt, answer = contents[row]
        after = waits.get(row, ())
        requests.append(
            TraceRequest(
                row,
                call.start_ns,
                prompt,
                call.usage.num_prompt_tokens,
                len(answer),
                output_units=(answer,),
                session_id=names[call.chain],
                delay_ns=0 if after else None,
                after=after,
                hints=None if call.tool is None else Hints(tool=call.tool),
            )
        )
    return requests


def _linked(
    calls: list[_Call], chains: dict[tuple[str, str, str], list[int]]
) -> tuple[dict[tuple[str, str, str], str], dict[int, tuple[After, ...]]]:
    """Return the name of each chain, and the dependencies of requests; a session's longest main chain is its parent."""
    sessions: dict[str, list[tuple[str, str, str]]] = {}
    for chain in chains:
        sessions.setdefault(chain[0], []).append(chain)
    names, waits = {}, {}
    for session, of_session in sessions.items():
        recorded = {
            chain: [RecordedTimes(row, calls[row].start_ns, calls[row].end_ns) for row in chains[chain]]
            for chain in of_session
        }
        main = max(of_session, key=lambda chain: (not chain[1], len(chains[chain])))
        for chain in of_session:
            names[chain] = session if chain is main else "/".join(part for part in chain if part)
        waits.update(linked(recorded.pop(main), recorded.values()))
    return names, waits


def _contents(calls: list[_Call], number: int, common: int) -> Iterator[tuple[tuple[range, ...], range]]:
    """Yield the tokens of each prompt and of its answer, for consecutive requests of one chain.

    New tokens of a chain are numbered consecutively, so a growing conversation is a single range.
    """
    next_token = number << CHAIN_BITS
    before: tuple[range, ...] = ()
    num_before, num_with_answer = 0, 0
    for place, call in enumerate(calls):
        num_prompt = call.usage.num_prompt_tokens
        num_read = min(call.usage.cache_read_input_tokens or 0, num_prompt)
        shared: tuple[range, ...]
        if not place:
            shared = (range(common, common + num_read),) if num_read else ()
        elif num_prompt >= num_with_answer:
            shared = before
        else:
            shared = _first(before, num_before if num_prompt >= num_before else num_read)
        num_shared = sum(map(len, shared))
        num_new = num_prompt - num_shared
        prompt = _joined(shared, range(next_token, next_token + num_new))
        next_token += num_new
        answer = range(next_token, next_token + call.usage.output_tokens)
        next_token = answer.stop
        before, num_before, num_with_answer = _joined(prompt, answer), num_prompt, num_prompt + len(answer)
        yield prompt, answer


def _first(runs: tuple[range, ...], count: int) -> tuple[range, ...]:
    """Return the first `count` tokens of `runs`, or all if there are fewer."""
    first = []
    for run in runs:
        if count <= 0:
            break
        first.append(run[:count])
        count -= len(run)
    return tuple(first)


def _joined(runs: tuple[range, ...], more: range) -> tuple[range, ...]:
    if not more:
        return runs
    if runs and runs[-1].stop == more.start:
        return (*runs[:-1], range(runs[-1].start, more.stop))
    return (*runs, more)
