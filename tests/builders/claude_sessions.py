"""A folder of Claude Code sessions, as the guide for agents has one: bundled sessions, in the form of these files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import TraceRequest

__all__ = ["write_claude_sessions"]

BEGIN = datetime(2026, 4, 1, 9, tzinfo=UTC)
NUM_SESSIONS = 4
NUM_COMMON = 16_000
"""Tokens with which sessions begin alike: the system prompt and its tools."""


def write_claude_sessions(folder: Path) -> None:
    """Write one file for each of the first four sessions of `sample:agents`, without their sub-agents."""
    sessions: dict[str, list[TraceRequest]] = {}
    for request in load_trace("sample:agents"):
        if request.session_id is not None and "/" not in request.session_id:
            sessions.setdefault(request.session_id, []).append(request)
    folder.mkdir(parents=True)
    for number, (name, turns) in enumerate(list(sessions.items())[:NUM_SESSIONS]):
        lines = _lines(name, turns, BEGIN + timedelta(minutes=5 * number))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _lines(name: str, turns: list[TraceRequest], begin: datetime) -> Iterator[dict[str, Any]]:
    parent: str | None = None
    num_before = 0
    for number, turn in enumerate(turns):
        sent = begin + timedelta(microseconds=turn.arrival_ns // 1000)
        ends = sent + timedelta(seconds=1 + turn.num_output_tokens * 0.012)
        if number + 1 < len(turns):
            ends = min(ends, begin + timedelta(microseconds=turns[number + 1].arrival_ns // 1000))
        num_read = num_before if num_before <= turn.num_prompt_tokens else 0
        num_read = min(num_read or NUM_COMMON, turn.num_prompt_tokens - 1)
        num_before = turn.num_prompt_tokens
        usage = {
            "input_tokens": 1,
            "cache_creation_input_tokens": turn.num_prompt_tokens - num_read - 1,
            "cache_read_input_tokens": num_read,
            "output_tokens": turn.num_output_tokens,
        }
        asked, answered = f"{name}-u{number}", f"{name}-a{number}"
        yield _line("user", name, asked, parent, sent, {"role": "user", "content": "..."})
        message = {"id": f"msg-{answered}", "model": "claude-opus-4-6", "role": "assistant", "usage": usage}
        yield {**_line("assistant", name, answered, asked, ends, message), "requestId": f"req-{answered}"}
        parent = answered


def _line(kind: str, name: str, uuid: str, parent: str | None, at: datetime, message: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": name,
        "isSidechain": False,
        "timestamp": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "message": message,
    }
