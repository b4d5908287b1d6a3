"""Seconds of a replay per request behind each router, with few workers and with many, under the same load each.

    python benchmarks/router_cost.py TRACE [--workers 4,64] [--requests 1500] [ROUTER ...]

TRACE: Mooncake's conversation_trace.jsonl, or none for the bundled part. Each four workers get a copy of
the trace, with ids of its own and a little later than the one before, so that requests arrive all the time; requests:
how many of the trace. CPU time of `kvarts.replay`, the best of `--times`, in turns.
"""

from __future__ import annotations

import argparse
import time

import msgspec

from kvarts import ReplayConfig, Trace, load_trace, replay
from kvarts.sim.routers.policies import POLICIES
from kvarts.sim.traffic.editing import repeated

GRID_NS = 3_000_000_000
"""Times of the trace are multiples of this."""


def spread(trace: Trace, copies: int) -> Trace:
    """Return `copies` of the trace, each a part of the grid of its times later than the one before."""
    rows = repeated(trace, copies).requests
    assert rows is not None
    moved = [
        msgspec.structs.replace(row, arrival_ns=row.arrival_ns + place * copies // len(rows) * GRID_NS // copies)
        for place, row in enumerate(rows)
    ]
    moved.sort(key=lambda row: row.arrival_ns)
    ordered = [msgspec.structs.replace(row, row=place) for place, row in enumerate(moved)]
    return Trace(ordered, unit_tokens=trace.unit_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", default="sample:mooncake")
    parser.add_argument("routers", nargs="*", default=[])
    parser.add_argument("--workers", default="4,64")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    whole = load_trace(arguments.trace)
    assert whole.requests is not None
    trace = Trace(whole.requests[: arguments.requests], unit_tokens=whole.unit_tokens)
    workers = [int(number) for number in arguments.workers.split(",")]
    traces = {number: spread(trace, max(1, number // 4)) for number in workers}
    print(f"{'router':<26}" + "".join(f"{number:>8} workers" for number in workers) + f"{'ratio':>8}")
    for router in arguments.routers or POLICIES:
        best = dict.fromkeys(workers, float("inf"))
        for _ in range(arguments.times):
            for number in workers:
                config = ReplayConfig(num_pages=16_384, page_size=512, replicas=number, router=router, profile="mocker")
                start = time.process_time()
                report = replay(traces[number], config)
                best[number] = min(best[number], (time.process_time() - start) / report.summary["num_requests"] * 1e6)
        row = "".join(f"{best[number]:>13.0f} us" for number in workers)
        print(f"{router:<26}{row}{best[workers[-1]] / best[workers[0]]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
