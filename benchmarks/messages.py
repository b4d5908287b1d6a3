"""Time and memory of reading a log of request bodies: `kvarts trace info`, and `kvarts why`, in processes of their own.

    python benchmarks/messages.py [--requests N] [--bytes N] [--turns N]

Bodies of `--bytes` each, in sessions of `--turns`: with 1, no two bodies have a word in common but their roles.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def bodies(num_requests: int, num_bytes: int, num_turns: int) -> Iterator[dict[str, object]]:
    """Yield the rows of a log, one turn of each session after the other."""
    source = random.Random(1)
    words = ["".join(source.choices(LETTERS, k=source.randint(1, 9))) for _ in range(20_000)]

    def text(size: int) -> str:
        return " ".join(source.choices(words, k=size // 5))[:size]

    size = num_bytes // num_turns // 2
    for first in range(0, num_requests, num_turns):
        messages: list[dict[str, str]] = []
        for turn in range(min(num_turns, num_requests - first)):
            messages.append({"role": "user", "content": text(2 * size if num_turns == 1 else size)})
            answer = {"role": "assistant", "content": text(200 if num_turns == 1 else size)}
            yield {"created": 1_700_000_000 + first + turn, "model": "m", "messages": messages,
                   "response": {"choices": [{"message": answer}]}}  # fmt: skip
            messages = [*messages, answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        with path.open("w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in bodies(args.requests, args.bytes, args.turns))
        print(f"{args.requests:,} bodies, {path.stat().st_size / 1e6:,.0f} MB")
        for words in (["trace", "info"], ["why"]):
            begun = time.perf_counter()
            child = subprocess.Popen(
                [sys.executable, "-m", "kvarts", *words, str(path)],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(SRC)},
            )  # fmt: skip
            _, status, used = os.wait4(child.pid, 0)
            assert not status, f"kvarts {' '.join(words)} failed"
            wall_s, cpu_s = time.perf_counter() - begun, used.ru_utime + used.ru_stime
            print(f"{' '.join(words):12}{wall_s:8.1f} s, {cpu_s:6.1f} s of processors, {used.ru_maxrss / 1024:6.0f} MB")


if __name__ == "__main__":
    main()
