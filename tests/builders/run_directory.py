"""A run directory, written by hand from a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvarts.sim.report.report import Report
from kvarts.sim.report.run_directory import run_json


def timeline_rows(report: Report) -> list[dict[str, Any]]:
    """What the public form of a timeline has to say of each step of a single replica."""
    steps = report.steps
    total = report.config.num_pages
    columns = (
        steps[name].tolist() for name in ("start_ms", "used_pages", "running", "preempted", "cached_pages", "waiting")
    )
    return [
        {
            "step": step,
            "t_ms": t_ms,
            "used_blocks": used,
            "free_blocks": total - used,
            "used_pct": used / total,
            "active_seqs": running,
            "preempted_seqs": preempted,
            "cached_blocks": cached,
            "waiting": waiting,
        }
        for step, (t_ms, used, running, preempted, cached, waiting) in enumerate(zip(*columns, strict=True))
    ]


def write_run_directory(path: Path, report: Report, *, replicas: int = 1) -> Path:
    """Everything but a journal; the timeline once for each of `replicas`."""
    path.mkdir()
    (path / "report.json").write_bytes(report.to_json())
    (path / "run.json").write_bytes(run_json("0.1.0", ["kvarts", "replay", "a trace", "--pages", "700"]))
    (path / "requests.jsonl").write_bytes(report.requests_jsonl())
    (path / "distributions.json").write_bytes(report.distributions_json())
    for replica in range(replicas):
        name = "timeline.jsonl" if replicas == 1 else f"timeline-r{replica}.jsonl"
        write_timeline(path / name, report, timeline_rows(report))
    return path


def write_timeline(path: Path, report: Report, rows: list[dict[str, Any]]) -> None:
    """As JSON lines."""
    head = {"block_size_tokens": report.config.page_size, "total_blocks": report.config.num_pages}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)))
