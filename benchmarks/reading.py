"""Processor time and memory of reading a long trace, and of summarising its replay; processes in turns.

    python benchmarks/reading.py TRACE [--requests N] [--before CHECKOUT] [--rounds N]

TRACE: Mooncake's conversation_trace.jsonl, repeated with fresh ids until it has N requests. `--before`: another version
of kvarts. Each row is a process of its own, and its memory is the peak of the process. A replay is of one engine with
the profile `mocker`; its rows are the replay without its report, the report's summary, and the rows of requests.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fleet_cost import write_repeated

ROOT = Path(__file__).resolve().parents[1]

STEP = """
import resource, sys, time
from kvarts import load_trace
def timed(name, call):
    begun = time.process_time()
    result = call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}\\t{time.process_time() - begun}\\t{peak}")
    return result
"""
READ = """
from kvarts.sim.traffic.info import distinct_pages
trace = timed("read", lambda: load_trace(sys.argv[1]))
timed("working set", lambda: distinct_pages(trace, 512))
"""
REPLAY = """
from kvarts import ReplayConfig, replay
trace = load_trace(sys.argv[1])
config = ReplayConfig(num_pages=16_384, page_size=512, profile="mocker")
report = timed("replay", lambda: replay(trace, config))
timed("summary", report.to_json)
timed("rows of requests", report.requests_jsonl)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replay", action="store_true", help="Replay it as well.")
    args = parser.parse_args()
    sources = {"before": args.before / "src"} if args.before else {}
    sources["now"] = ROOT / "src"
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trace = write_repeated(args.trace, Path(folder) / "long.jsonl", args.requests)
        for _ in range(args.rounds):
            for script in (READ, REPLAY) if args.replay else (READ,):
                for name, source in sources.items():
                    command = [sys.executable, "-c", STEP + script, str(trace)]
                    done = subprocess.run(
                        command, env={"PYTHONPATH": str(source)}, stdout=subprocess.PIPE, text=True, check=True
                    )
                    for line in done.stdout.splitlines():
                        step, taken, mebibytes = line.split("\t")
                        found.setdefault((step, name), []).append((float(taken), float(mebibytes)))
    for (step, name), costs in found.items():
        seconds = [cost[0] for cost in costs]
        peak = max(cost[1] for cost in costs)
        print(f"{step:20}{name:8}{statistics.median(seconds):8.2f} s, least {min(seconds):.2f}, peak {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
