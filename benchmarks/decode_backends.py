"""A step of decodes on a CPU, by attention backend: random weights in the shape of Qwen3-0.6B, bfloat16.

    python benchmarks/decode_backends.py

Needs kvarts[torch]. Milliseconds a step, medians of rounds, in each of which each backend has its turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from decode_speed import write_model
from decode_workers import Work, decoding

BACKENDS = ("sdpa", "numba")


def step_ms(model: Any, backend: str, work: Work) -> float:
    engine, _ = decoding(model, work, attention=backend, layers="model")
    taken = []
    for _ in range(work.steps):
        start = perf_counter()
        engine.step()
        taken.append(perf_counter() - start)
    return statistics.median(taken) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model-dir", type=Path, help="Where the model is kept from run to run. [a temporary one]")
    args = parser.parse_args()
    from kvarts.run.torch.loading import load_model

    with tempfile.TemporaryDirectory() as temporary:
        directory = args.model_dir or Path(temporary)
        if not (directory / "config.json").exists():
            write_model(directory)
        model = load_model(directory)
        print("| prompt | sequences | sdpa ms | numba ms | times |")
        print("|---:|---:|---:|---:|---:|")
        for length, count in ((128, 1), (128, 8), (128, 32), (512, 1), (512, 8)):
            work = Work(count, length, args.steps)
            rounds = [[step_ms(model, backend, work) for backend in BACKENDS] for _ in range(args.rounds)]
            sdpa, numba = (statistics.median(column) for column in zip(*rounds, strict=True))
            times = statistics.median(one / other for one, other in rounds)
            print(f"| {length} | {count} | {sdpa:.0f} | {numba:.0f} | {times:.2f} |", flush=True)


if __name__ == "__main__":
    main()
