"""`kvarts trace`, more readers, and traces made from traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from kvarts.base.errors import ConfigError, InputError
from kvarts.core.content import pack_units
from kvarts.core.hints import Hints
from kvarts.sim.traffic.editing import anonymized, merged, mooncake_lines, repeated, scaled, sliced, spread
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.info import distinct_pages
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.trace import Trace, TraceRequest, spell

DATA = Path(str(files("kvarts") / "data"))
SAMPLE = DATA / "mooncake-conversation-1000.jsonl"
AGENTS = DATA / "coding-agents"


def same(mine: Trace, other: Trace) -> None:
    """Assert that both are the same traffic, apart from numbers of rows."""
    assert (mine.unit_tokens, mine.knows_prefixes) == (other.unit_tokens, other.knows_prefixes)
    for a, b in zip(mine, other, strict=True):
        assert (a.arrival_ns, a.num_prompt_tokens, a.num_output_tokens) == (
            b.arrival_ns,
            b.num_prompt_tokens,
            b.num_output_tokens,
        )
        assert not other.knows_prefixes or spell(a.units) == spell(b.units)
        assert (a.session_id, a.delay_ns, a.priority) == (b.session_id, b.delay_ns, b.priority)


@pytest.mark.parametrize("source", [SAMPLE, AGENTS, DATA / "azure-code-1000.csv"])
def test_what_is_converted_is_read_again(source: Path, tmp_path: Path) -> None:
    trace = load_trace(source)
    path = tmp_path / "converted.jsonl"
    path.write_bytes(b"".join(mooncake_lines(trace)))
    same(load_mooncake(path, trace_block_size=trace.unit_tokens), trace)


def test_tenants_are_kept_and_share_nothing(tmp_path: Path) -> None:
    """The same prompts, of one tenant, of two, and of none: read, written and read again."""
    rows = [(0, None), (1, "a"), (2, "a"), (3, 7), (4, None)]
    path = tmp_path / "tenants.jsonl"
    row = {"input_length": 600, "output_length": 3, "hash_ids": [7, 8]}
    path.write_text("".join(json.dumps({"timestamp": ms, "tenant": tenant, **row}) + "\n" for ms, tenant in rows))
    trace = load_mooncake(path)
    assert [request.tenant for request in trace] == [None, "a", "a", "7", None]
    assert distinct_pages(trace, 512) == 3
    again = tmp_path / "again.jsonl"
    again.write_bytes(b"".join(mooncake_lines(trace)))
    assert [request.tenant for request in load_mooncake(again)] == [None, "a", "a", "7", None]
    names = [request.tenant for request in anonymized(trace)]
    assert names == [None, "tenant-0", "tenant-0", "tenant-1", None]
    path.write_text(path.read_text() + json.dumps({"timestamp": 9, "tenant": ["x"], **row}))
    with pytest.raises(InputError) as caught:
        load_mooncake(path)
    assert (caught.value.line, caught.value.field) == (6, "tenant")


@given(st.integers(0, 400), st.integers(1, 400))
def test_a_slice_is_a_part_from_time_zero(first: int, count: int) -> None:
    trace = load_mooncake(SAMPLE)
    part = list(sliced(trace, first=first, count=count))
    whole = list(trace)[first : first + count]
    assert [request.units for request in part] == [request.units for request in whole]
    assert [request.arrival_ns for request in part] == [r.arrival_ns - whole[0].arrival_ns for r in whole]


def test_a_session_that_is_cut_begins_with_what_is_left() -> None:
    trace = load_trace(AGENTS)
    part = list(sliced(trace, first=100))
    begun: set[str | None] = set()
    for request in part:
        assert (request.session_id in begun) or request.delay_ns is None
        begun.add(request.session_id)


def test_a_slice_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request there"):
        sliced(load_mooncake(SAMPLE), begin_ns=10**18)


def test_traces_that_are_merged_share_nothing_unless_they_say_so() -> None:
    trace = load_mooncake(SAMPLE)
    alone = distinct_pages(trace, 512)
    assert alone is not None
    outputs = sum((r.num_prompt_tokens + r.num_output_tokens - 1) // 512 - r.num_prompt_tokens // 512 for r in trace)
    assert distinct_pages(merged([trace, trace]), 512) == 2 * alone
    assert distinct_pages(merged([trace, trace], same_ids=True), 512) == alone + outputs
    agents = load_trace(AGENTS)
    alone = distinct_pages(agents, 64)
    assert alone is not None
    assert distinct_pages(repeated(agents, 3), 64) == 3 * alone
    with pytest.raises(ConfigError, match="tokens"):
        merged([trace, agents])


def test_rates_copies_and_beginnings() -> None:
    agents = load_trace(AGENTS)
    half = scaled(agents, 2)
    assert [r.arrival_ns for r in half] == [round(r.arrival_ns / 2) for r in agents]
    assert [r.delay_ns for r in half] == [r.delay_ns and round(r.delay_ns / 2) for r in agents]
    hour = list(spread(agents, 3600 * 10**9))
    begins: dict[str, int] = {}
    for request in hour:
        assert request.session_id is not None
        begins.setdefault(request.session_id.partition("/")[0], request.arrival_ns)
    assert list(begins.values()) == [place * 300 * 10**9 for place in range(12)]
    with pytest.raises(ConfigError):
        scaled(agents, 0)


def test_an_anonymous_trace_shares_what_the_trace_did(tmp_path: Path) -> None:
    trace = load_trace(AGENTS)
    hidden = anonymized(trace)
    assert distinct_pages(hidden, 64) == distinct_pages(trace, 64)
    text = b"".join(mooncake_lines(hidden)).decode()
    assert not any(request.session_id and f'"{request.session_id}"' in text for request in trace)
    ids: list[int] = [name for line in text.splitlines() for name in json.loads(line)["hash_ids"]]
    seen = list(dict.fromkeys(ids))
    assert seen == list(range(len(seen)))


def test_an_anonymous_trace_has_no_name_that_the_trace_had() -> None:
    """Each text of a request is a name, so that a field that is added is hidden or fails here."""
    texts: dict[str, Any] = {
        field.name: f"{field.name} of Alice"
        for field in fields(TraceRequest)
        if field.type in (str | None, "str | None")
    }
    assert texts.keys() == {"session_id", "request_id", "tenant", "model"}
    names = [field.name for field in fields(Hints) if "str" in str(field.type)]
    assert names == ["tool"]
    request = TraceRequest(0, 0, pack_units([123456789]), 1, 1, hints=Hints(priority=3, tool="Alice's tool"), **texts)
    hidden = anonymized(Trace([request], has_output_tokens=True))
    text = b"".join(mooncake_lines(hidden)).decode()
    assert "Alice" not in text and "Alice" not in repr(list(hidden))
    (one,) = hidden
    assert one.hints == Hints(priority=3, tool="tool-0")
    assert '"tool-0"' in text


FIRST = {"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 20, "output_length": 3, "turn": 1}
SECOND = {"chat_id": 6, "parent_chat_id": 5, "timestamp": 71.5, "input_length": 40, "output_length": 4, "turn": 2}
BAILIAN = [json.dumps({**FIRST, "hash_ids": [1, 2]}), json.dumps({**SECOND, "hash_ids": [1, 3, 4]})]
BURST = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,0,1087,Conversation log",
    "118.5,GPT-4,417,276,693,API log",
]
USAGE = [
    '{"id": "x", "created": 1700000000, "model": "m", "usage": {"prompt_tokens": 30, "completion_tokens": 7}}',
    '{"id": "y", "created": 1700000002, "model": "m", "usage": {"prompt_tokens": 50, "completion_tokens": 0}}',
]


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_chats_of_bailian_are_sessions_of_blocks_of_16(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path / "bailian.jsonl", BAILIAN))
    first, second = trace
    assert trace.unit_tokens == 16
    assert (first.arrival_ns, second.arrival_ns) == (0, 10 * 10**9)
    assert first.session_id == second.session_id == "5"
    assert (second.num_prompt_tokens, second.num_output_tokens) == (40, 4)


def test_forms_without_prefixes_say_so(
    tmp_path: Path, run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    burst = load_trace(written(tmp_path / "burst.csv", BURST))
    usage = load_trace(written(tmp_path / "usage.jsonl", USAGE))
    assert [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens) for r in burst] == [
        (0, 472, 18),
        (113_500_000_000, 417, 276),
    ]
    assert [(r.arrival_ns, r.num_prompt_tokens, r.num_output_tokens) for r in usage] == [(0, 30, 7)]
    assert usage.left_out == burst.left_out == {"without output tokens": 1}
    for trace in (burst, usage, load_trace(DATA / "azure-code-1000.csv")):
        assert not trace.knows_prefixes
    assert run_command("trace", "info", tmp_path / "burst.csv", "--json") == 0
    assert json.loads(capsys.readouterr().out)["knows_prefixes"] is False
    assert run_command("trace", "convert", tmp_path / "burst.csv") == 0
    assert "hits are unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "lines", "line", "field"),
    [
        ("a.jsonl", [BAILIAN[0], BAILIAN[1].replace("40", "400")], 2, "hash_ids"),
        ("a.jsonl", [BAILIAN[0], BAILIAN[1].replace('"timestamp": 71.5', '"timestamp": "x"')], 2, "timestamp"),
        ("a.jsonl", [USAGE[0], USAGE[1].replace("50", "-1")], 2, "usage.prompt_tokens"),
        ("a.jsonl", [USAGE[0], "{"], 2, None),
        ("a.csv", [*BURST, "1,ChatGPT,x,3,3,API log"], 5, "Request tokens"),
        ("a.csv", [*BURST, "-1,ChatGPT,3,3,3,API log"], 5, "Timestamp"),
        ("a.csv", [*BURST, "1,ChatGPT"], 5, None),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, name: str, lines: list[str], line: int, field: str | None) -> None:
    path = written(tmp_path / name, lines)
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert load_trace(path, skip_bad_lines=True).num_skipped_lines == 1


def test_commands_write_what_they_say(
    tmp_path: Path, run_command: Callable[..., int], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_command("trace", "slice", SAMPLE, "--set", "count=10") == 0
    printed = capsysbinary.readouterr().out
    out = tmp_path / "out.jsonl"
    assert run_command("trace", "slice", SAMPLE, "--set", "count=10", "-o", out) == 0
    assert out.read_bytes() == printed
    assert len(printed.splitlines()) == 10
    assert run_command("trace", "merge", out, out) == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == 20
    assert run_command("trace", "scale", out, "--rate", 2, "--copies", 3, "--set", "spread=1h") == 0
    assert len(capsysbinary.readouterr().out.splitlines()) == 30
    assert run_command("trace", "anonymize", out) == 0
    assert run_command("trace", "info", out) == 0
    assert b"num_requests" in capsysbinary.readouterr().out
    assert run_command("trace", "slice", SAMPLE, "--from", "soon") == 2
    assert run_command("trace", "info", tmp_path / "nowhere.jsonl") == 3
