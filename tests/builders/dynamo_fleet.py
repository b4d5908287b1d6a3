"""Rows of one request each, of a fleet of kvarts and of NVIDIA Dynamo's, and how many are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig, PoolConfig
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.fleet.scaling import Scripted

TOLERANCE_MS = 1e-3
COLUMNS = (
    "arrival_ms",
    "prefill_admitted_ms",
    "held_ms",
    "reserved_ms",
    "activated_ms",
    "decode_admitted_ms",
    "released_ms",
    "first_token_ms",
    "last_token_ms",
    "input_tokens",
    "output_tokens",
    "prefill_replica",
    "decode_replica",
    "cached_tokens",
    "preemptions",
)
THEIRS = (
    "arrival_time_ms",
    "prefill_admit_ms",
    "source_held_ms",
    "destination_reserved_ms",
    "destination_activated_ms",
    "decode_admit_ms",
    "source_released_ms",
    "first_token_ms",
    "last_token_ms",
    "input_length",
    "output_length",
    "prefill_worker_idx",
    "decode_worker_idx",
)


def config_of(case: Mapping[str, Any], **changes: Any) -> FleetConfig:
    """The fleet of a case of tests/sim/fleet/data/cases.json."""
    given = {"num_pages": 16384, "page_size": 512, "profile": "mocker", "concurrency": case.get("concurrency")}
    prefill = ReplayConfig(**{**given, "replicas": case["prefills"], **case.get("prefill", {}), **changes})
    decode = ReplayConfig(**{**given, "replicas": case["decodes"], **case.get("decode", {}), **changes})
    rate = case.get("gigabytes_per_s")
    return FleetConfig(
        pools=(PoolConfig(role="prefill", each=prefill), PoolConfig(role="decode", each=decode)),
        bytes_per_s=None if rate is None else rate * 1e9,
        token_bytes=case.get("token_bytes", 0),
        transfer=case.get("transfer", "full-prompt"),
        scaler=partial(Scripted, script_of(case)) if "script" in case else None,
        startup_s=case.get("startup_s", 0.0),
    )


def script_of(case: Mapping[str, Any]) -> list[tuple[int, dict[str, int]]]:
    """The numbers of workers over time."""
    return [(round(at_s * 1e9), {"prefill": prefills, "decode": decodes}) for at_s, prefills, decodes in case["script"]]


def rows_of(report: FleetReport) -> list[tuple[float, ...]]:
    prefills, decodes = (pool["replicas"] for pool in report.summary["fleet"]["pools"])
    columns = {name: report.requests[name].tolist() for name in COLUMNS if name != "decode_replica"}
    columns["prefill_replica"] = [prefills.index(worker) for worker in columns["prefill_replica"]]
    columns["decode_replica"] = [decodes.index(worker) for worker in report.requests["replica"].tolist()]
    return sorted(zip(*(columns[name] for name in COLUMNS), strict=True))


def theirs_of(path: Path) -> list[tuple[float, ...]]:
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        reused = max(row["reused_input_tokens"] or 0, row["decode_reused_input_tokens"] or 0)
        rows.append((*(row[name] for name in THEIRS), reused, row["readmission_count"]))
    return sorted(rows)


def num_equal(ours: Sequence[tuple[float, ...]], theirs: Sequence[tuple[float, ...]]) -> int:
    """How many requests agree in everything, sorted by arrival."""
    return sum(
        all(abs(mine - peers) <= TOLERANCE_MS for mine, peers in zip(one, other, strict=True))
        for one, other in zip(ours, theirs, strict=False)
    )
