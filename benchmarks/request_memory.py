"""The memory of a replay per request: streams of two lengths to the same replicas, each in a process of its own.

    python benchmarks/request_memory.py [--requests 200000] [--replicas 16]

The stream is made while it is replayed: prompts of three blocks of 512 tokens, the first of a thousand prefixes, and
some twenty generated tokens. The longer one has twice as many requests; their difference is free of what does not grow.
"""

from __future__ import annotations

import argparse
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from random import Random

from kvarts import ReplayConfig, Trace, TraceRequest, replay

BLOCK = 512
PER_REPLICA = 8
"""Requests per second of a replica."""


def stream(num_requests: int, replicas: int) -> Iterator[TraceRequest]:
    chance = Random(1)
    arrival_ns = 0
    for index in range(num_requests):
        arrival_ns += int(chance.expovariate(PER_REPLICA * replicas) * 1e9)
        yield TraceRequest(
            row=index,
            arrival_ns=arrival_ns,
            units=struct.pack("3Q", index % 1000, 10_000 + index // 7, 10**9 + index),
            num_prompt_tokens=2 * BLOCK + 376 + chance.randrange(136),
            num_output_tokens=1 + chance.randrange(40),
        )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_requests: int, replicas: int) -> None:
    """Replay in this process, and print the peak memory of the replay, and with its report."""
    config = ReplayConfig(num_pages=2000, page_size=BLOCK, replicas=replicas, profile="mocker")
    report = replay(Trace(stream(num_requests, replicas), unit_tokens=BLOCK), config)
    replayed = peak_bytes()
    steps = report.summary["num_steps"]
    print(replayed, peak_bytes(), steps)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        measure(args.requests, args.replicas)
        return
    found = []
    for num_requests in (args.requests, 2 * args.requests):
        command = [sys.executable, __file__, "--alone", "--requests", str(num_requests)]
        done = subprocess.run([*command, "--replicas", str(args.replicas)], check=True, capture_output=True, text=True)
        replayed, reported, steps = map(int, done.stdout.split())
        found.append((replayed, reported))
        sizes = f"{replayed >> 20} MiB, {reported >> 20} with the report"
        print(f"{num_requests:,} requests of {steps / num_requests:.1f} steps: {sizes}")
    grown = [(after - before) / args.requests for before, after in zip(*found, strict=True)]
    print(f"per request: {grown[0]:.0f} bytes, {grown[1]:.0f} with the report")


if __name__ == "__main__":
    main()
