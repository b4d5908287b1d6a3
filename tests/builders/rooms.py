"""Rooms that a project may lack: tests outside of them do without."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import iter_modules

import kvarts
from kvarts.report.report import Report

ROOMS = frozenset(
    [module.name for module in iter_modules(kvarts.__path__)]
    + ["kv_events" for path in kvarts.__path__ if (Path(path) / "serve" / "kv_events").is_dir()]
)
HAS_AUDIT = "audit" in ROOMS
HAS_OFFLOAD = "offload" in ROOMS
HAS_RECORD = "record" in ROOMS
HAS_ROUTERS = "routers" in ROOMS
ROUTERS = ("round-robin", "least-loaded", "prefix") if HAS_ROUTERS else ("round-robin",)
"""Routers that any test may take; the last one looks at most."""

NAMES = {
    "audit": (
        "AuditError",
        "Auditor",
        "Finding",
        "Ledger",
    ),
    "calibrate": ("Calibration", "calibrate"),
    "config": ("EngineConfig",),
    "content": ("Content",),
    "errors": ("ConfigError", "InputError", "KvartsError", "MissingFileError", "OutputError"),
    "executor": ("LinearCost", "PolynomialCost", "RooflineCost"),
    "explain": ("HitLedger", "Journal", "hit_ledger", "load_journal", "story_of_block", "story_of_request"),
    "kv": ("CountPool", "IdPool", "LruOrder", "PageCache", "PageError", "PrefixTree"),
    "llm": ("LLM",),
    "offload": ("OffloadConfig", "TierConfig"),
    "plan": ("Plan", "Sweep", "plan", "sweep"),
    "record": ("JournalWriter", "LiveTimeline", "Timeline", "timelines_of"),
    "report": ("Report",),
    "routers": ("Needs", "Routing"),
    "sampling": (
        "SamplingParams",
        "StructuredOutputs",
    ),
    "sharing": ("ModelShare", "SharedReport", "SharingConfig"),
    "sim": ("ReplayConfig", "Slo", "replay"),
    "traffic": ("Trace", "TraceInfo", "TraceRequest", "Workload", "load_mooncake", "load_trace", "trace_info"),
    "verify": ("Verdict", "verify", "verify_file"),
}
"""Names of the front door, by the room that they come from."""

SPELLINGS = {
    "audit": ("--audit",),
    "connect": ("kvarts watch", "kvarts.connect"),
    "explain": ("kvarts story",),
    "kv_events": ("--kv-events", "kvarts.serve.kv_events"),
    "llm": ("kvarts generate", "kvarts profile", "kvarts model tiny", "kvarts model check", "kvarts.executor.torch"),
    "offload": ("--host-memory", "--host-pages", "[offload]", "[[tier]]", "--tier "),
    "openai_api": ("kvarts mock", "kvarts serve --model", "kvarts.openai_api", "kvarts_server"),
    "fleet": (
        "kvarts.fleet",
        "--prefill ",
        "--decode ",
        "[prefill]",
        "[decode]",
        "[transfer]",
        "--store",
        "--gpus",
    ),
    "plan": ("kvarts.plan", "kvarts plan", "kvarts sweep"),
    "record": ("--events", "--run-dir", "--timeline", "--kv-timeline"),
    "routers": ("--router", "[routing]", "router=", "router =", "kvarts.routers"),
    "session": (
        "kvarts.session",
        "kvarts.client",
        "kvarts serve sessions",
        "kvarts chat",
        "kvarts soak",
        "--session-",
        "[sessions]",
    ),
    "sharing": ("--model chat=", "[models."),
}
"""What else an example says that needs a room, by the room: commands, options and tables of files."""


def has_every_room() -> bool:
    """Whether no room is missing."""
    return {*NAMES, *SPELLINGS} <= ROOMS


def missing_room(text: str) -> str | None:
    """The first room that an example needs and the project lacks."""
    for room in sorted({*NAMES, *SPELLINGS} - ROOMS):
        has_name = any(re.search(rf"\b{name}\b", text) for name in NAMES.get(room, ()))
        if has_name or any(spelling in text for spelling in SPELLINGS.get(room, ())):
            return room
    return None


def timelines_json(report: Report) -> list[bytes]:
    """The timelines of `report`; none where nothing records them."""
    if not HAS_RECORD:
        return []
    name = "timelines_of"  # a type checker finds it only where the room is
    return [timeline.to_json() for timeline in getattr(kvarts, name)(report)]
