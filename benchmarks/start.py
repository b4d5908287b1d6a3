"""Processor time of short commands, from the start of Python to the exit; medians of rounds in turns.

    python benchmarks/start.py [--rounds N] [--before CHECKOUT]
    python benchmarks/start.py --models MODEL [MODEL ...] [--before CHECKOUT]

With `--models`, of one token of each model, directories or GGUF files, and of the import of PyTorch; `--before`: of
another version of kvarts as well. Rows of Python are what no command can avoid, and those of packages what commands
need: msgspec, click and NumPy.
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
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="Another version of kvarts.")
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
            "Python, isolated": [sys.executable, "-I", "-c", "pass"],
            "Python, isolated, no frozen modules": [sys.executable, "-X", "frozen_modules=off", "-I", "-c", "pass"],
            "Python and msgspec": [*python, "import gc; gc.disable(); import msgspec"],
            "Python, click and msgspec": [*python, "import click, msgspec"],
            "Python and NumPy": [*python, "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; import numpy"],
        }
        if args.before:
            before = ["/usr/bin/env", f"PYTHONPATH={args.before.resolve() / 'src'}"]
            commands["before, kvarts replay, one request"] = [*before, *kvarts, "replay", str(trace)]
        if args.models:
            commands = {"Python and PyTorch": [*python, "import torch"]}
        for model in args.models:
            token = ["generate", "--model", model, "--prompt", "The capital of France is", "--max-tokens", "1"]
            commands[f"kvarts generate, {Path(model).name}"] = [*kvarts, *token]
            if args.before:
                of_before = ["/usr/bin/env", f"PYTHONPATH={args.before.resolve() / 'src'}", *kvarts, *token]
                commands[f"before, {Path(model).name}"] = of_before
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(args.rounds + 1):
            for name, command in commands.items():
                cost = run(command)
                if number:  # the first writes bytecode
                    taken[name].append(cost.cpu_seconds * 1e3)
    for name, times in taken.items():
        print(f"{name:52}{statistics.median(times):6.1f} ms, least {min(times):.1f}")


if __name__ == "__main__":
    main()
