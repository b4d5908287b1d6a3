"""What a file of kv-cache-tester says, read with json and loops."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
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


def naive_read(path: Path) -> dict[Any, Any]:
    data = path.read_bytes()
    value: dict[Any, Any] = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    return value


def naive_sessions(file: dict[Any, Any]) -> dict[str, list[NaiveTurn]]:
    own = [entry for entry in file["requests"] if entry["type"] != "subagent"]
    sessions = {file["id"]: _turns(file, own, own[0]["t"])}
    for entry in file["requests"]:
        if entry["type"] == "subagent":
            begin_s = entry["t"] - entry.get("duration_ms", 0) / 1e3
            sessions[file["id"] + "/" + entry["agent_id"]] = _turns(file, entry["requests"], begin_s)
    return sessions


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
            )
        )
    return turns
