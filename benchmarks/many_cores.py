"""Work in one process and in several, in turns: time, processor time and memory, with the same output.

    python benchmarks/many_cores.py TRACE [--workers 2] [--requests 100000] [--runs 3] [--only plan]

TRACE: Mooncake's conversation_trace.jsonl, repeated for replays of 64 replicas, each time later and with hash ids of
its own: `replay` is one, and `sweep` has ten, so that it replays ten times as many requests. Plans and fits are of
bundled and of small inputs. Medians of the runs. On a machine with other work, only the ratio of processor time counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from fleet_cost import MIXED, replay, write_repeated
from processes import Cost, run

SAMPLE = files("kvarts") / "data" / "mooncake-conversation-1000.jsonl"
MEASURED = ("--model", "llama-3.1-8b", "--device", "h100-80gb")
SLO = ("--slo-ttft-ms", "3000", "--slo-tpot-ms", "60")
SWEEP = """
trace = "{trace}"
replicas = 64
profile = "mocker"
page_size = 512
pages = 16384

[grid]
speedup = [8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
"""
POINTS = """source,model,gpu,isl,osl,load,level,requests,ttft_ms,tpot_ms
a,llama-3.1-8b,h100,3000,400,closed,4,400,300,9.5
a,llama-3.1-8b,h100,3000,400,closed,16,400,600,10.5
a,llama-3.1-8b,h100,3000,400,open,3,400,600,10.5
b,llama-3.1-8b,h200,3000,400,closed,8,400,900,9.5
b,qwen3-0.6b,l40s,3000,400,closed,4,400,300,4.5
b,mistral-nemo,h100,3000,400,open,4,400,600,12.5
"""


def command(*words: object) -> list[str]:
    """Return a command line of kvarts."""
    return [sys.executable, "-m", "kvarts", *map(str, words)]


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="one of the cases")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        points = folder / "points.csv"
        points.write_text(POINTS)
        cases = {
            "plan": command("plan", SAMPLE, *MEASURED, *SLO, "--json"),
            "fleets": command("plan", SAMPLE, *MEASURED, *SLO, "--gpus", 4, "--json"),
            "calibrate": command("calibrate", "--points", points, "--hold-out", "source", "--json"),
        }
        if args.only in (None, "replay", "sweep"):
            trace = write_repeated(args.trace, folder / "repeated.jsonl", args.requests)
            cases["replay"] = replay(trace, MIXED, 64)
            grid = folder / "sweep.toml"
            grid.write_text(SWEEP.format(trace=trace))
            cases["sweep"] = command("sweep", grid, "--json")
        for case, words in cases.items():
            if args.only in (None, case):
                costs: dict[int, list[Cost]] = {1: [], args.workers: []}
                for number in range(args.runs):
                    for workers, found in costs.items():
                        own = ["-o", str(folder / f"{number}-{workers}")] if case == "sweep" else []
                        found.append(run([*words, *own, "--workers", str(workers)]))
                report(case, costs[1], costs[args.workers])


def report(case: str, one: list[Cost], several: list[Cost]) -> None:
    """Print the medians, and the medians of the ratios of the runs."""
    times = [statistics.median(cost.seconds for cost in each) for each in (one, several)]
    used = [statistics.median(cost.cpu_seconds for cost in each) for each in (one, several)]
    pairs = list(zip(one, several, strict=True))
    print(
        f"{case}: {times[0]:.1f} and {times[1]:.1f} s, "
        f"{statistics.median(a.seconds / b.seconds for a, b in pairs):.2f} times as fast; "
        f"processor time {used[0]:.1f} and {used[1]:.1f} s, "
        f"{statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs):.2f} times as much; "
        f"largest process {max(cost.mebibytes for cost in one):.0f} and "
        f"{max(cost.mebibytes for cost in several):.0f} MiB"
    )


if __name__ == "__main__":
    main()
