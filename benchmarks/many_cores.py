"""Work in one process and in several, in turns: time, processor time and memory, with the same output.

    python benchmarks/many_cores.py TRACE [--workers 1 2] [--requests 100000] [--runs 3] [--only plan]
    python benchmarks/many_cores.py TRACE --only sweep --workers 2 --requests 1000000 --runs 1 --compiled DIR/src

TRACE: Mooncake's conversation_trace.jsonl, repeated for replays of 64 replicas, each time later and with hash ids of
its own: `replay` is one, and `sweep` has ten, so that it replays ten times as many requests. The requests of `day` take
24 hours, and its ten points have from 14 to 32 replicas. Plans and fits are of bundled and of small inputs. Medians of
the runs. On a machine with other work, only processor time counts. The memory of all processes together is read
four times a second; shared pages are counted once for each process. `--compiled`: a build that
`scripts/compiled_build.py --keep DIR --no-tests --no-bytes` has left.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
from importlib.resources import files
from pathlib import Path

from fleet_cost import MIXED, replay, write_repeated
from processes import Cost, run, tree_mebibytes

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
DAY = """
trace = "{trace}"
profile = "mocker"
page_size = 512
pages = 16384

[grid]
replicas = [14, 16, 18, 20, 22, 24, 26, 28, 30, 32]
"""
DAY_MS = 24 * 3_600_000
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
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of processes, in turns")
    parser.add_argument("--requests", type=int, default=100_000, help="of one replay")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", help="one of the cases")
    parser.add_argument("--compiled", type=Path, help="the sources of a compiled build")
    args = parser.parse_args()
    if args.compiled is not None:
        os.environ["PYTHONPATH"] = str(args.compiled.resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, words in cases(args.trace, folder, args.requests, args.only).items():
            costs: dict[int, list[Cost]] = {workers: [] for workers in args.workers}
            mebibytes = 0.0
            for number in range(args.runs):
                for workers, found in costs.items():
                    own = ["-o", str(folder / f"{case}-{number}-{workers}")] if "sweep" in words else []
                    with Watch() as watch:
                        found.append(run([*words, *own, "--workers", str(workers)]))
                    mebibytes = max(mebibytes, watch.mebibytes)
            report(case, costs, mebibytes)


def cases(trace: Path, folder: Path, num_requests: int, only: str | None) -> dict[str, list[str]]:
    """Return command lines without their numbers of workers; write their inputs to `folder`."""
    points = folder / "points.csv"
    points.write_text(POINTS)
    found = {
        "plan": command("plan", SAMPLE, *MEASURED, *SLO, "--json"),
        "fleets": command("plan", "fleet", SAMPLE, *MEASURED, *SLO, "--gpus", 4, "--json"),
        "calibrate": command("calibrate", "--points", points, "--hold-out", "source", "--json"),
    }
    for case, grid, span_ms in (("sweep", SWEEP, None), ("day", DAY, DAY_MS)):
        if only == case or (only in (None, "replay") and case == "sweep"):
            repeated = write_repeated(trace, folder / f"{case}.jsonl", num_requests, span_ms)
            print(f"{repeated.name}: {num_requests:,} requests, {repeated.stat().st_size / 1e6:,.0f} MB", flush=True)
            (folder / f"{case}.toml").write_text(grid.format(trace=repeated))
            if case == "sweep":
                found["replay"] = replay(repeated, MIXED, 64)
            found[case] = command("sweep", folder / f"{case}.toml", "--json")
    return {case: words for case, words in found.items() if only in (None, case)}


class Watch:
    """While it is entered, looks at the memory of all processes that this one has started, and of those they start."""

    def __init__(self) -> None:
        self.mebibytes = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(0.25):
            self.mebibytes = max(self.mebibytes, tree_mebibytes(os.getpid()))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def report(case: str, costs: dict[int, list[Cost]], mebibytes: float) -> None:
    """Print the medians, and the medians of the ratios of the runs to those of the first number of workers."""
    first = next(iter(costs.values()))
    for workers, found in costs.items():
        line = (
            f"{case}, --workers {workers}: {statistics.median(cost.seconds for cost in found):.1f} s, "
            f"processor time {statistics.median(cost.cpu_seconds for cost in found):.1f} s, "
            f"largest process {max(cost.mebibytes for cost in found):.0f} MiB"
        )
        if found is not first:
            pairs = list(zip(first, found, strict=True))
            line += (
                f"; {statistics.median(a.seconds / b.seconds for a, b in pairs):.2f} times as fast, processor time "
                f"{statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs):.2f} times"
            )
        print(line)
    print(f"{case}: all processes together at most {mebibytes:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
