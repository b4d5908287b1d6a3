"""Processor time of short commands, from the start of Python to the exit; medians of rounds in turns.

    python benchmarks/start.py [--rounds N]

The last rows are what no command can avoid: Python, and the packages that parse command lines and JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from processes import run

REQUEST = '{"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "one.jsonl"
        trace.write_text(REQUEST)
        kvarts, python = [sys.executable, "-m", "kvarts"], [sys.executable, "-c"]
        commands = {
            "kvarts replay, one request": [*kvarts, "replay", str(trace)],
            "kvarts replay --json, one request": [*kvarts, "replay", str(trace), "--json"],
            "kvarts --version": [*kvarts, "--version"],
            "Python": [*python, "pass"],
            "Python, click and msgspec": [*python, "import click, msgspec"],
            "Python and NumPy": [*python, "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; import numpy"],
        }
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(args.rounds + 1):
            for name, command in commands.items():
                cost = run(command)
                if number:  # the first writes bytecode
                    taken[name].append(cost.cpu_seconds * 1e3)
    for name, times in taken.items():
        print(f"{name:36}{statistics.median(times):6.1f} ms, least {min(times):.1f}")


if __name__ == "__main__":
    main()
