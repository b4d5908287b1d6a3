"""What the right count changes: a trace replayed with every layer keeping every token, and with KV groups.

    python benchmarks/grouped_replay.py conversation_trace.jsonl --models gemma-3-27b,gpt-oss-120b --concurrency 32

All replays of a model are of the same memory. *took* is processor time of this process, and *times* how often that of
the replay with whole pages.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvarts.sim.config import make_config
from kvarts.sim.replaying import replay
from kvarts.sim.report.report import Report
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace

COLUMNS = ("running", "rejected", "requests/s", "TTFT p50 s", "TPOT p50 ms", "hits", "preempted", "took s", "times")


def first_requests(path: Path, count: int | None) -> Trace:
    """Return the first `count` requests of a trace, all if it is None."""
    trace = load_trace(path)
    if count is None or trace.requests is None:
        return trace
    return Trace(list(islice(trace.requests, count)), unit_tokens=trace.unit_tokens, name=trace.name)


def row_of(report: Report) -> list[str]:
    """Return what a replay says, as far as a count of memory changes it."""
    summary = report.summary
    running, durations = report.steps["running"], report.steps["duration_ms"]
    mean_running = float(np.dot(running, durations) / durations.sum())

    def known(value: Any, of: float = 1.0) -> str:
        return "-" if value is None else f"{value * of:.2f}"

    return [
        f"{mean_running:.1f}",
        f"{summary['num_rejected']:,}",
        known(summary["request_throughput_per_s"]),
        known(summary["ttft_ms"]["p50"], 1e-3),
        known(summary["tpot_ms"]["p50"]),
        known(summary["prefix_hit_ratio"], 100) + " %",
        f"{summary['num_preemptions']:,}",
    ]


def main() -> None:
    """Print a table for each model: a row for each way to count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--models", default="gemma-3-27b,gpt-oss-120b")
    parser.add_argument("--device", default="h100-80gb")
    parser.add_argument("--ways", default="off,all,tails")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--requests", type=int)
    args = parser.parse_args()
    trace = first_requests(args.trace, args.requests)
    for model in args.models.split(","):
        whole_s = 0.0
        for way in args.ways.split(","):
            values = {"model": model, "device": args.device, "kv_groups": way, "page_size": args.page_size}
            config = make_config({**values, "concurrency": args.concurrency})
            start = time.process_time()
            report = replay(trace, config)
            took_s = time.process_time() - start
            whole_s = whole_s or took_s
            cells = [*row_of(report), f"{took_s:.1f}", f"{took_s / whole_s:.2f}"]
            print(f"{model} {way}: " + ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True)))


if __name__ == "__main__":
    main()
