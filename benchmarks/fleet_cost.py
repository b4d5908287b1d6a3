"""The cost of a replay on many workers: processor time per request at 4 and at 64, and a million requests at 64.

    python benchmarks/fleet_cost.py TRACE [--requests 100000] [--million] [--compiled DIR/src] [--runs 3]

TRACE: Mooncake's conversation_trace.jsonl, repeated, each time later and with hash ids of its own. 64 workers get it
sixteen times as fast as 4, so that each worker has the same load. Whole processes in turns; processor time, medians.
`--compiled`: a build that `scripts/compiled_build.py --keep DIR --no-tests --no-bytes` has left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from processes import Cost, median_of, run

MIXED, APART = "mixed", "prefill and decode apart"


def write_repeated(trace: Path, out: Path, num_requests: int, whole_ms: int | None = None) -> Path:
    """Write so many requests. `whole_ms`: how long they take together; by default, as long as the trace each time."""
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    span_ms = rows[-1]["timestamp"] + 1000
    num_ids = max(max(row["hash_ids"]) for row in rows) + 1
    stretched = 1.0 if whole_ms is None else whole_ms / (num_requests / len(rows) * span_ms)
    with out.open("w") as file:
        for number in range(num_requests):
            turn, place = divmod(number, len(rows))
            row = dict(rows[place])
            row["timestamp"] = int((row["timestamp"] + turn * span_ms) * stretched)
            row["hash_ids"] = [block + turn * num_ids for block in row["hash_ids"]]
            file.write(json.dumps(row) + "\n")
    return out


def replay(trace: Path, kind: str, num_workers: int) -> list[str]:
    apart = ["--prefill", f"replicas={num_workers // 2}", "--decode", f"replicas={num_workers // 2}"]
    workers = ["--replicas", num_workers] if kind == MIXED else apart
    options = ["--profile", "mocker", "--pages", 16_384, "--page-size", 512, "--speedup", num_workers / 4]
    return [sys.executable, "-m", "kvarts", "replay", str(trace), *map(str, (*workers, *options)), "--json"]


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--million", action="store_true", help="replay a million requests on 64 workers as well")
    parser.add_argument("--compiled", type=Path, help="the sources of a compiled build")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.compiled is not None:
        os.environ["PYTHONPATH"] = str(args.compiled.resolve())
    with tempfile.TemporaryDirectory() as name:
        trace = write_repeated(args.trace, Path(name) / "repeated.jsonl", args.requests)
        costs: dict[tuple[str, int], list[Cost]] = {}
        for _ in range(args.runs):
            for kind in (MIXED, APART):
                for num_workers in (4, 64):
                    costs.setdefault((kind, num_workers), []).append(run(replay(trace, kind, num_workers)))
        for kind in (MIXED, APART):
            few, many = (median_of(costs[kind, num_workers]) for num_workers in (4, 64))
            per_request = [cost.cpu_seconds / args.requests * 1e6 for cost in (few, many)]
            print(
                f"{kind}: {per_request[0]:.0f} us per request at 4 workers, {per_request[1]:.0f} at 64: "
                f"{per_request[1] / per_request[0]:.2f} (target 1.5); {few.mebibytes:.0f} and {many.mebibytes:.0f} MiB"
            )
        if args.million:
            trace = write_repeated(args.trace, Path(name) / "million.jsonl", 1_000_000)
            for kind in (MIXED, APART):
                cost = run(replay(trace, kind, 64))
                print(f"{kind}: a million requests, {cost.cpu_seconds:.0f} s (60), {cost.mebibytes:.0f} MiB (1,000)")


if __name__ == "__main__":
    main()
