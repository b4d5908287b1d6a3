"""Traffic: traces, workloads and arrival processes. Independent of the engine."""

from __future__ import annotations

from kvarts.traffic.formats import load_trace
from kvarts.traffic.mooncake import load_mooncake
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.traffic.workload import Workload

__all__ = ["Trace", "TraceRequest", "Workload", "load_mooncake", "load_trace"]
