"""A step of a real model on a CPU: compiled layers beside the model's own code, and beside an earlier version.

    python benchmarks/decode_layers.py
    python benchmarks/decode_layers.py --before SRC

Random weights in the shape of Qwen3-0.6B, bfloat16, two threads. Each is a process that stays; in each round all have a
turn, so that they meet the same machine. With `--cpu-time`, one thread of each, and its processor time instead of the
time that passed: for a machine with other work. `--before`: the folder `src` of another version of kvarts. Tokens a
second while all sequences decode, their prompts computed before, by the median step; for `--prefill`, prompt tokens a
second until the first token. Medians of rounds; ratios are medians of the ratios within a round. `same`: how many
sequences say the same first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from decode_speed import Worker, write_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 4096], help="Tokens of a prompt.")
    parser.add_argument("--before", type=Path, help="The folder `src` of another version.")
    parser.add_argument("--without", nargs="*", default=[], help="Of before, model and compiled.")
    parser.add_argument("--cpu-time", action="store_true", help="One thread, and its processor time.")
    parser.add_argument("--depth", type=int, default=28, help="Layers of the model.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model-dir", type=Path, help="Where the model is kept from run to run. [a temporary one]")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"), help="What the engines have to say.")
    args = parser.parse_args()
    environments = {name: {"KVARTS_LAYERS": name} for name in ("model", "compiled")}
    if args.before:
        environments = {"before": {"PYTHONPATH": str(args.before.resolve())}, **environments}
    if args.cpu_time:
        alone = {
            "KVARTS_CPU_TIME": "1",
            **dict.fromkeys(("KVARTS_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
        }
        environments = {name: {**environment, **alone} for name, environment in environments.items()}
    names = [name for name in environments if name not in args.without]
    with tempfile.TemporaryDirectory() as temporary, args.log.open("w") as log:
        directory = args.model_dir or Path(temporary)
        if not (directory / "config.json").exists():
            write_model(directory, args.dtype, num_hidden_layers=args.depth)
        workers = [Worker("kvarts", sys.executable, directory, log, environments[name]) for name in names]
        for worker in workers:
            assert worker.answer() == "ready\n"
            worker.measure(1, 32, 2)
        header = [
            "what",
            *(f"{name} tokens/s" for name in names),
            *(f"compiled / {name}" for name in names[:-1]),
            "same",
        ]
        print("| " + " | ".join(header) + " |")
        print("|---|" + "---:|" * (len(header) - 1))
        cases = [(count, args.prompt, args.steps) for count in args.sequences]
        for count, length, steps in [*cases, *((1, length, 0) for length in args.prefill)]:
            rounds = [[worker.measure(count, length, steps) for worker in workers] for _ in range(args.rounds)]
            what = f"decode {count} x {length}" if steps else f"prefill {length}"
            print(row(what, count, rounds), flush=True)


def row(what: str, count: int, rounds: list[list[dict[str, Any]]]) -> str:
    rates = [[one.get("median", one["rate"]) for one in measured] for measured in rounds]
    cells = [what, *(f"{statistics.median(column):.1f}" for column in zip(*rates, strict=True))]
    ratios = zip(*([one[-1] / rate for rate in one[:-1]] for one in rates), strict=True)
    cells += [f"{statistics.median(column):.2f}" for column in ratios]
    last = rounds[0][-1]["first"]
    same = [sum(a == b for a, b in zip(last, one["first"], strict=True)) for one in rounds[0][:-1]]
    return "| " + " | ".join([*cells, ", ".join(f"{number}/{count}" for number in same)]) + " |"


if __name__ == "__main__":
    main()
