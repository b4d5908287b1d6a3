"""What a file of kv-cache-tester says, read with json and loops."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class NaiveTurn:
    input_tokens: int
    output_tokens: int
    blocks: list[tuple[str, int]]
    """Which file, or "" for all of them, and which id in it."""
    begin_s: float
    wait_s: float | None
    """After the turn before it; None for the first turn."""
    end_s: float = 0.0
    waits_s: dict[tuple[str, int, bool], float] = field(default_factory=dict)
    """What it waits for where that is more than the turn before: (session, turn, whether from its arrival), and how
    long."""


def naive_read(path: Path) -> dict[Any, Any]:
    data = path.read_bytes()
    value: dict[Any, Any] = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    return value


def naive_sessions(file: dict[Any, Any]) -> dict[str, list[NaiveTurn]]:
    own = [entry for entry in file["requests"] if entry["type"] != "subagent"]
    sessions = {file["id"]: _turns(file, own, own[0]["t"])}
    for entry in file["requests"]:
        if entry["type"] == "subagent":
            begin_s = entry["t"] - (entry.get("duration_ms") or 0) / 1e3
            if has_session_times(file):
                begin_s = entry["requests"][0]["t"]
            sessions[file["id"] + "/" + entry["agent_id"]] = _turns(file, entry["requests"], begin_s)
    _join(file["id"], sessions)
    return sessions


def has_session_times(file: dict[Any, Any]) -> bool:
    """Whether no sub-agent, if its times are those of the session, would begin before the request before it."""
    pairs = []
    for place, entry in enumerate(file["requests"]):
        if entry["type"] == "subagent":
            before = [each["t"] for each in file["requests"][:place] if each["type"] != "subagent"]
            pairs.append((before[-1] if before else 0.0, entry["requests"][0]["t"]))
    return all(begin_s >= before_s for before_s, begin_s in pairs) and any(begin_s for _, begin_s in pairs)


def _join(main_id: str, sessions: dict[str, list[NaiveTurn]]) -> None:
    main = sessions[main_id]
    for number, turn in enumerate(main):
        lasts = {}
        for name, turns in sessions.items():
            last = max(turns, key=lambda each: each.end_s)
            begins_after = number and turns[0].begin_s >= 0
            joins = [place for place, each in enumerate(main) if each.begin_s >= last.end_s - 1e-9]
            parents = [place for place, each in enumerate(main) if each.begin_s <= turns[0].begin_s + 1e-9]
            joins = [place for place in joins if not parents or place > parents[-1]]
            if name != main_id and begins_after and joins and joins[0] == number:
                lasts[name, turns.index(last)] = last.end_s
        if lasts:
            ends = {**lasts, (main_id, number - 1): main[number - 1].end_s}
            delay_s = max(0.0, turn.begin_s - max(ends.values()))
            turn.waits_s = {(name, place, False): delay_s for name, place in ends}
    for name, turns in sessions.items():
        parents = [place for place, each in enumerate(main) if each.begin_s <= turns[0].begin_s + 1e-9]
        if name != main_id and parents:
            parent = main[parents[-1]]
            from_arrival = parent.end_s > turns[0].begin_s + 1e-9
            since_s = parent.begin_s if from_arrival else parent.end_s
            turns[0].waits_s = {(main_id, parents[-1], from_arrival): turns[0].begin_s - since_s}


def _turns(file: dict[Any, Any], entries: list[Any], begin_s: float) -> list[NaiveTurn]:
    scope = file["id"] if file["hash_id_scope"] == "local" else ""
    turns = []
    for place, entry in enumerate(entries):
        wait_s = None
        if place:
            before = entries[place - 1]
            wait_s = entry["t"] - before["t"]
            if before.get("api_time") is not None:
                wait_s = entry["think_time"] if "think_time" in entry else max(0.0, wait_s - before["api_time"])
        turns.append(
            NaiveTurn(
                input_tokens=entry["in"],
                output_tokens=entry["out"],
                blocks=[(scope, hash_id) for hash_id in entry["hash_ids"]],
                begin_s=begin_s + entry["t"] - entries[0]["t"],
                wait_s=wait_s,
                end_s=begin_s + entry["t"] - entries[0]["t"] + (entry.get("api_time") or 0.0),
            )
        )
    return turns
