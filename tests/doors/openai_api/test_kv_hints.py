"""Hints in bodies: each published form keeps what it names, bad ones are refused, and they are part of a record."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvarts.base.tenants import Owner
from kvarts.core.hints import Hints, RetainedRange
from kvarts.doors.openai.running import RunningServer
from kvarts.sim.orders import HintedOrder, SoonestReturnOrder
from kvarts.sim.traffic.logs import load_recorded

from builders.http_client import call

Start = Callable[..., RunningServer]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PROMPT_TOKENS = 64


def retain(*directives: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An envelope of vLLM's with one action."""
    action = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0"}
    action |= {"payload": {"scope": None, "directives": list(directives)}} | changes
    other = {**action, "action_type": "kv.prefetch", "payload": {"session": "s"}}
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [other, action]}}


FORMS: dict[str, tuple[dict[str, Any], Hints]] = {
    "kvarts_hints": (
        {"kvarts_hints": {"priority": 2, "ttl_ms": 5, "pause_ms": 7, "tool": "bash"}},
        Hints(priority=2, ttl_ms=5, pause_ms=7, tool="bash"),
    ),
    "kv_hints": (retain({"priority": 80, "duration": 30}), Hints(priority=80, ttl_ms=30_000)),
    "kv_hints, whole": (retain({"start": 0, "end": None, "priority": 80}), Hints(priority=80)),
    "kv_hints, ranges": (
        retain(
            {"start": 0, "end": 2, "priority": 90, "duration": 3},
            {"start": 2, "priority": 5, "covers_output": True},
        ),
        Hints(retain=(RetainedRange(end=2, priority=90, ttl_ms=3000), RetainedRange(start=2, priority=5))),
    ),
    "kv_hints, output": (retain({"priority": 9, "covers_output": True}), Hints(priority=9)),
    "ranges": (
        {"kvarts_hints": {"pause_ms": 7, "retain": [{"end": 1, "ttl_ms": 5}]}, "cache_control": {"type": "ephemeral"}},
        Hints(pause_ms=7, ttl_ms=300_000, retain=(RetainedRange(end=1, ttl_ms=5),)),
    ),
    "agent_hints": ({"nvext": {"agent_hints": {"priority": 5, "osl": 9}, "annotations": []}}, Hints(priority=5)),
    "nvext.cache_control": ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "90s"}}}, Hints(ttl_ms=90_000)),
    "cache_control": ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, Hints(ttl_ms=3_600_000)),
    "cache_control, default": ({"cache_control": {"type": "ephemeral"}}, Hints(ttl_ms=300_000)),
    "two": (
        {"cache_control": {"type": "ephemeral"}, "nvext": {"agent_hints": {"priority": -1}}},
        Hints(priority=-1, ttl_ms=300_000),
    ),
}
NOTHING: list[dict[str, Any]] = [
    {},
    {"kvarts_hints": None, "kv_hints": None, "nvext": None, "cache_control": None},
    {"nvext": {}},
    {"nvext": {"agent_hints": {"speculative_prefill": True}}},
    {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": []}},
    {"kv_hints": {"protocol_version": "0.1", "message_id": "m"}},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"kvarts_hints": {"priority": 2**31}}, "kvarts_hints.priority"),
    ({"kvarts_hints": {"ttl_ms": -1}}, "kvarts_hints.ttl_ms"),
    ({"kvarts_hints": {"pause_ms": 1e13}}, "kvarts_hints.pause_ms"),
    ({"kvarts_hints": {"tool": "x" * 257}}, "kvarts_hints.tool"),
    ({"kvarts_hints": {"ttl": 1}}, "kvarts_hints"),
    ({"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
    ({"nvext": {"cache_control": {"type": "forever"}}}, "nvext.cache_control.type"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"cache_control": {"type": "ephemeral", "ttl": "0s"}}, "cache_control.ttl"),
    ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, "cache_control.ttl"),
    ({"kv_hints": {"message_id": "m", "actions": []}}, "kv_hints"),
    ({"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [1]}}, "kv_hints.actions[0]"),
    (retain({"priority": 101}), "kv_hints.actions[1].payload"),
    (retain({"priority": 1, "duration": -1}), "kv_hints.actions[1].payload"),
    (retain({"priority": 1, "start": 4, "end": 4}), "kv_hints.actions[1].payload.directives[0].end"),
    (retain({"priority": 1}, {"priority": 1, "start": -1}), "kv_hints.actions[1].payload"),
    (retain(*[{"priority": 1}] * 17), "kv_hints.actions[1].payload"),
    ({"kvarts_hints": {"retain": [{"start": 4, "end": 2}]}}, "kvarts_hints.retain[0]"),
    (retain(payload={}), "kv_hints.actions[1].payload"),
    (retain({"priority": 1}, action_version="2.0"), "kv_hints.actions[1].action_version"),
    ({**FORMS["kv_hints"][0], **FORMS["agent_hints"][0]}, "nvext.agent_hints"),
    ({**FORMS["cache_control"][0], **FORMS["nvext.cache_control"][0]}, "cache_control"),
]


def body(first: int, **more: Any) -> dict[str, Any]:
    return {"prompt": list(range(first, first + PROMPT_TOKENS)), "max_tokens": 1, **more}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_each_form_is_read_and_recorded(start: Start, tmp_path: Path, path: str) -> None:
    asked = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    running = start(is_recording=True)
    cases = [*FORMS.values(), *((given, None) for given in NOTHING)]
    for given, _ in cases:
        reply = call(running.url, path, {**asked, "max_tokens": 1, **given})
        assert reply.status == 200, reply.payload
    running.settle()
    recorder = running.opened.recorder
    assert recorder is not None
    recorder.write(tmp_path / "run.jsonl")
    assert [row.hints for row in load_recorded(tmp_path / "run.jsonl")] == [hints for _, hints in cases]


EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
TEXT = {"type": "text", "text": "hello"}
INPUT = {"type": "input_text", "text": "hello"}
TOOL = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [TEXT | {"cache_control": HOUR}]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IN_PARTS: list[tuple[str, dict[str, Any], float | None]] = [
    (CHAT, {"messages": [{"role": "user", "content": [TEXT, TEXT | {"cache_control": EPHEMERAL}]}]}, 300_000),
    (CHAT, {"messages": [{"role": "user", "content": [TEXT | {"cache_control": each} for each in (HOUR, EPHEMERAL)]}]},
     3_600_000),
    (CHAT, {"messages": [{"role": "user", "content": [TEXT]}], "tools": [FUNCTION | {"cache_control": HOUR}]},
     3_600_000),
    (CHAT, {"messages": [{"role": "user", "content": [TEXT | {"cache_control": HOUR}]}],
            "cache_control": EPHEMERAL}, 300_000),
    (CHAT, {"messages": [{"role": "user", "content": [TEXT | {"cache_control": EPHEMERAL}]}],
            "tools": [FUNCTION | {"cache_control": HOUR}]}, 3_600_000),
    (MESSAGES, {"messages": [{"role": "user", "content": "hello"}]}, None),
    (MESSAGES, {"messages": [{"role": "user", "content": "hello"}], "cache_control": HOUR}, 3_600_000),
    (MESSAGES, {"messages": [{"role": "user", "content": "hello"}], "system": [TEXT | {"cache_control": HOUR}]},
     3_600_000),
    (MESSAGES, {"messages": [{"role": "user", "content": "hello"}],
                "tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": EPHEMERAL}]}, 300_000),
    (MESSAGES, {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [TOOL]},
                             {"role": "user", "content": [RESULT]}]}, 3_600_000),
    (RESPONSES, {"input": "hello", "kvarts_hints": {"ttl_ms": 70}}, 70),
    (RESPONSES, {"input": [{"role": "user", "content": [INPUT, INPUT | {"cache_control": HOUR}]}]}, 3_600_000),
    (RESPONSES, {"input": [{"role": "user", "content": "hello", "cache_control": EPHEMERAL}]}, 300_000),
    (RESPONSES, {"input": [{"role": "user", "content": [INPUT | {"cache_control": HOUR}]}],
                 "cache_control": EPHEMERAL, "instructions": "be brief"}, 300_000),
    (RESPONSES, {"input": "hello", "tools": [{"type": "function", "name": "f", "cache_control": HOUR}]}, 3_600_000),
    (RESPONSES, {"input": [{"role": "user", "content": "hello"},
                           {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                           {"type": "function_call_output", "call_id": "1",
                            "output": [INPUT | {"cache_control": EPHEMERAL}]}]}, 300_000),
    (RESPONSES, {"input": [{"role": "user", "content": [INPUT]}]}, None),
]  # fmt: skip


def test_hints_of_other_doors_and_of_parts(start: Start, tmp_path: Path) -> None:
    """The longest time to live of any part is that of the request, unless that has one of its own."""
    running = start(is_recording=True)
    for path, asked, _ in IN_PARTS:
        most = "max_output_tokens" if path == RESPONSES else "max_tokens"
        reply = call(running.url, path, {**asked, most: 1})
        assert reply.status == 200, reply.payload
    running.settle()
    assert running.opened.recorder is not None
    running.opened.recorder.write(tmp_path / "run.jsonl")
    found = [row.hints and row.hints.ttl_ms for row in load_recorded(tmp_path / "run.jsonl")]
    assert found == [ttl_ms for *_, ttl_ms in IN_PARTS]


def test_a_continued_response_keeps_the_hints_of_its_conversation(start: Start, tmp_path: Path) -> None:
    """As a chat that sends the same parts again; and no template prints a hint, so that the prompt stays the same."""
    running = start(is_recording=True)
    part = INPUT | {"cache_control": HOUR}
    first = call(running.url, RESPONSES, {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1})
    for previous in (first.json["id"], None):
        asked = {"input": [{"role": "user", "content": "more"}], "previous_response_id": previous}
        reply = call(running.url, RESPONSES, {**asked, "max_output_tokens": 1})
        assert reply.status == 200, reply.payload
    plain = call(running.url, RESPONSES, {"input": [{"role": "user", "content": [INPUT]}], "max_output_tokens": 1})
    assert plain.json["usage"]["input_tokens"] == first.json["usage"]["input_tokens"]
    running.settle()
    assert running.opened.recorder is not None
    running.opened.recorder.write(tmp_path / "run.jsonl")
    found = [row.hints and row.hints.ttl_ms for row in load_recorded(tmp_path / "run.jsonl")]
    assert found == [3_600_000, 3_600_000, None, None]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("control", "field"), [({"type": "forever"}, ".type"), (HOUR | {"ttl": "2h"}, ".ttl"), (7, "")]
)
def test_a_bad_hint_of_a_part_is_named(server: RunningServer, path: str, control: Any, field: str) -> None:
    of_path = "input" if path == RESPONSES else "messages"
    asked = {of_path: [{"role": "user", "content": [TEXT, TEXT | {"cache_control": control}]}], "max_tokens": 1}
    reply = call(server.url, path, asked)
    assert reply.status == 400
    error, param = reply.json["error"], f"{of_path}[0].content[1].cache_control{field}"
    assert param == error.get("param") or error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(("given", "param"), BAD)
def test_what_is_no_hint_is_refused_by_its_field(server: RunningServer, given: dict[str, Any], param: str) -> None:
    reply = call(server.url, COMPLETIONS, body(1, **given))
    assert reply.status == 400
    assert reply.json["error"]["param"] == param, reply.payload


def test_owners_that_may_not_set_priorities_may_not_hint_them(start: Start) -> None:
    owners = {"high": Owner(name="high", may_prioritize=True), "low": Owner(name="low", may_prioritize=False)}
    running = start(api_key=owners)
    for key, given, status in (
        ("low", "kv_hints", 403),
        ("low", "agent_hints", 403),
        ("low", "kvarts_hints", 403),
        ("low", "kv_hints, ranges", 403),
        ("low", "ranges", 200),
        ("low", "cache_control", 200),
        ("high", "kv_hints", 200),
    ):
        headers = {"authorization": f"Bearer {key}"}
        assert call(running.url, COMPLETIONS, body(1, **FORMS[given][0]), headers=headers).status == status


@pytest.mark.parametrize(
    ("order", "given", "num_hit"),
    [
        (HintedOrder, {}, 0),
        (HintedOrder, {"cache_control": {"type": "ephemeral"}}, 48),
        (HintedOrder, retain({"priority": 1, "duration": 60}), 48),
        (HintedOrder, retain({"priority": 1, "end": 32}), 32),
        (HintedOrder, retain({"priority": 1, "start": 32}), 48),
        (HintedOrder, retain({"priority": 1, "end": 16}, {"priority": 0, "start": 16}), 16),
        (HintedOrder, {"kvarts_hints": {"retain": [{"end": 20, "ttl_ms": 60_000}]}}, 32),
        (HintedOrder, {"kvarts_hints": {"pause_ms": 60_000}}, 48),
        (SoonestReturnOrder, {"kvarts_hints": {"pause_ms": 60_000}}, 48),
        (SoonestReturnOrder, {"cache_control": {"type": "ephemeral"}}, 0),
    ],
)
def test_what_is_hinted_stays(start: Start, order: Any, given: dict[str, Any], num_hit: int) -> None:
    """Three prompts in a pool for two: without a hint, the first is gone when it comes back."""
    running = start(pages=2 * PROMPT_TOKENS // 16, page_size=16, eviction=order)
    for first, more in ((1, given), (1001, {}), (2001, {}), (1, {})):
        reply = call(running.url, COMPLETIONS, body(first, **more))
        assert reply.status == 200, reply.payload
    usage = reply.json["usage"]
    assert (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) == num_hit


NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="a real model needs kvarts[torch]")


@pytest.mark.parametrize("command", [("mock",), pytest.param(("serve", "model", "--model", "none"), marks=NEEDS_TORCH)])
@pytest.mark.parametrize(("name", "said"), [("session-aware", b"needs a trace"), ("nothing", b"is not a policy")])
def test_a_policy_of_a_server_is_checked_before_it_starts(
    run_command: Callable[..., int],
    capsysbinary: pytest.CaptureFixture[bytes],
    command: tuple[str, ...],
    name: str,
    said: bytes,
) -> None:
    assert run_command(*command, "--set", f"eviction={name}") == 2
    told = capsysbinary.readouterr().err
    assert b"--set eviction: " in told and said in told
