"""Names of the files of a run directory."""

from __future__ import annotations

__all__ = ["DISTRIBUTIONS", "EVENTS", "REPORT", "REQUESTS", "RUN", "TIMELINE"]

REPORT = "report.json"
REQUESTS = "requests.jsonl"
RUN = "run.json"
DISTRIBUTIONS = "distributions.json"
TIMELINE = "timeline.json.gz"
EVENTS = "events.jsonl.gz"
