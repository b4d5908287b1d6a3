"""Processor time of replays of whole pages by two versions of kvarts, in turns.

    python benchmarks/whole_pages.py TRACE --before CHECKOUT [--now CHECKOUT] [--rounds N]

TRACE: Mooncake's conversation_trace.jsonl. `--before`: another version of kvarts, or the folder of a compiled build
(`scripts/compiled_build.py --keep DIR`); `--now`: this version, unless given. A *command* is a whole process that
replays the trace and writes its summary; a *replay* is the call alone, the least of three in a process that has done
one, without the garbage collector, which a command does without as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ALONE = """
import gc, sys, time
from kvarts import ReplayConfig, load_trace, replay
trace = load_trace(sys.argv[1])
config = ReplayConfig(num_pages=int(sys.argv[2]), page_size=int(sys.argv[3]), profile="mocker")
gc.disable()
taken = []
for _ in range(4):
    begun = time.process_time()
    replay(trace, config)
    taken.append(time.process_time() - begun)
print(min(taken[1:]))
"""
SIZES = ((4000, 512), (128_000, 16))


def command_s(source: Path, trace: Path, num_pages: int, page_size: int) -> float:
    """Return the processor time of a whole command."""
    options = ["--profile", "mocker", "--pages", str(num_pages), "--page-size", str(page_size), "--json"]
    begun = os.times()
    subprocess.run(
        [sys.executable, "-m", "kvarts", "replay", str(trace), *options],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    ended = os.times()
    return ended.children_user + ended.children_system - begun.children_user - begun.children_system


def replay_s(source: Path, trace: Path, num_pages: int, page_size: int) -> float:
    """Return the processor time of a replay alone."""
    command = [sys.executable, "-c", ALONE, str(trace), str(num_pages), str(page_size)]
    env = {**os.environ, "PYTHONPATH": str(source)}
    return float(subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    """Print the least and the median of each version, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--now", type=Path, default=ROOT, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    sources = {"before": args.before / "src", "now": args.now / "src"}
    for num_pages, page_size in SIZES:
        for kind, measure in (("command", command_s), ("replay", replay_s)):
            found: dict[str, list[float]] = {name: [] for name in sources}
            for source in sources.values():
                measure(source, args.trace, num_pages, page_size)  # which compiles its modules
            for _ in range(args.rounds):
                for name, source in sources.items():
                    found[name].append(measure(source, args.trace, num_pages, page_size))
            for name, taken in found.items():
                print(
                    f"{page_size:4} tokens per page, {kind:8}{name:7}"
                    f"least {min(taken):.3f} s, {min(taken) / min(found['before']):.3f} times, "
                    f"median {statistics.median(taken):.3f} s, "
                    f"{statistics.median(taken) / statistics.median(found['before']):.3f} times",
                    flush=True,
                )


if __name__ == "__main__":
    main()
