"""Processor time of whole plans in this checkout and in another, in turns.

    python benchmarks/plan_turns.py conversation_trace.jsonl --beside OTHER/src [--runs 3] [--only NAME]

Plans of one process, with an SLO: 3,448 requests of Mooncake's conversation trace on a pair of H200, and the bundled
sample on one H100, with bounds that host memory helps to keep and that it does not. Rows have the least processor time
of either checkout, their ratio, and when this one printed the curve and the fewest GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_REQUESTS = 3448
PAIR = ("--device", "h200-141gb", "--tensor-parallel", "2", "--page-size", "512")
HERE = Path(__file__).parents[1] / "src"
SO_FAR = re.compile(rb"so far: (?:(.*, the working set)|\d+ GPUs?(?! with| would))")
"""Answers: of the curve, and of the fewest GPUs."""


def cases(trace: Path) -> dict[str, tuple[str, ...]]:
    """Return the arguments of `kvarts plan`, by the name of the case."""
    pair = (str(trace), *PAIR, "--slo-share", "0.95")
    sample = ("--slo-ttft-ms",)
    return {
        "pair, llama-3.1-8b": (*pair, "--model", "llama-3.1-8b", "--slo-ttft-ms", "5000"),
        "pair, qwen3-30b-a3b": (*pair, "--model", "qwen3-30b-a3b", "--slo-ttft-ms", "3000"),
        "sample, 3 s": (*sample, "3000", "--slo-share", "0.9"),
        "sample, 3 s, 99 %": (*sample, "3000"),
        "sample, 1 s, with host memory": (*sample, "1000", "--slo-share", "0.9"),
    }


def taken(source: Path, arguments: tuple[str, ...]) -> tuple[float, dict[str, float]]:
    """Return the processor time of a plan, and the time until its first answers, in seconds."""
    command = [sys.executable, "-m", "kvarts", "plan", *arguments, "--set", "workers=1"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    begun, first = time.perf_counter(), dict[str, float]()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if (found := SO_FAR.search(line)) is not None:
            first.setdefault("curve" if found[1] else "answer", time.perf_counter() - begun)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, first


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--beside", type=Path, required=True, help="the src folder of another checkout")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.jsonl"
        part.write_text("".join(arguments.trace.read_text().splitlines(keepends=True)[:NUM_REQUESTS]))
        for name, options in cases(part).items():
            if arguments.only not in name:
                continue
            other, here = [], []
            for _ in range(arguments.runs):
                other.append(taken(arguments.beside, options)[0])
                here.append(taken(HERE, options))
            least = min(seconds for seconds, _ in here)
            times = {
                of: min((first[of] for _, first in here if of in first), default=0.0) for of in ("curve", "answer")
            }
            first = ", ".join(f"{of} {seconds:.1f} s" for of, seconds in times.items() if seconds)
            print(f"{name:<32}{min(other):8.1f} s{least:8.1f} s{least / min(other):7.2f}  first {first}", flush=True)


if __name__ == "__main__":
    main()
