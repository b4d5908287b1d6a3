"""Whether a tier makes sessions slower on devices with room for one to six of them: random cells with KV groups.

    python benchmarks/offload_sessions.py [--cells 300] [--seed 0] [--arrivals 4]

Deterministic: virtual time. Each cell draws sessions, a model with KV groups, what stays cached, a policy of stores,
the bandwidth towards host memory and back, and its size. TTFT is the mean over `--arrivals` seeds of the same
sessions: on such devices hits depend on every microsecond, so that a single run differs by more, in both directions.
Prints how many cells are slower than without a tier by more than 5 % and one step, and the slowest.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import msgspec

from kvarts.offload.config import OffloadConfig
from kvarts.replaying import replay
from kvarts.report.report import Report
from kvarts.sim.config import make_config
from kvarts.traffic.workload import FixedLength, Workload

PAGE_SIZE = 16
WORSE = 1.05
CHOICES: dict[str, list[Any]] = {
    "num_sessions": [8, 24],
    "turns_per_session": [2, 4],
    "new_tokens": [100, 700, 3000],
    "output_tokens": [5, 60],
    "prefix_tokens": [0, 900],
    "sessions_per_s": [1.0, 4.0, 20.0],
    "think_time_s": [0.5, 5.0],
    "model": ["gemma-3-27b", "gpt-oss-20b"],
    "kv_groups": ["all", "tails"],
    "policy": ["eager", "lazy"],
    "rate": ["100MB/s", "500MB/s", "1GB/s", "3GB/s", "10GB/s", "50GB/s"],
    "of_device": [0.1, 1.0, 10.0],
    "sessions_at_once": [1.05, 1.5, 3.0, 6.0],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arrivals", type=int, default=4)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    measured = []
    for _ in range(args.cells):
        cell = {name: dice.choice(values) for name, values in CHOICES.items()}
        alone_ms, with_ms, step_ms = measure(cell, args.arrivals)
        measured.append((with_ms / alone_ms, with_ms > WORSE * alone_ms + step_ms, cell))
    for policy in CHOICES["policy"]:
        mine = [one for one in measured if one[2]["policy"] == policy]
        quicker = sum(ratio < 1 / WORSE for ratio, _, _ in mine)
        print(f"{policy}: {len(mine)} cells, {sum(slow for _, slow, _ in mine)} slower, {quicker} quicker")
    for ratio, is_slower, cell in sorted(measured, key=lambda one: -one[0])[:10]:
        print(f"{ratio:.2f}{' *' if is_slower else ''} {' '.join(f'{name}={value}' for name, value in cell.items())}")


def measure(cell: dict[str, Any], num_arrivals: int) -> tuple[float, float, float]:
    """Return the mean TTFT without and with the tier, and the longest step without it, in ms."""
    traffic = Workload(
        num_sessions=cell["num_sessions"],
        turns_per_session=cell["turns_per_session"],
        new_tokens=FixedLength(cell["new_tokens"]),
        output_tokens=FixedLength(cell["output_tokens"]),
        prefix_tokens=cell["prefix_tokens"],
        sessions_per_s=cell["sessions_per_s"],
        think_time_s=cell["think_time_s"],
    )
    longest = cell["prefix_tokens"] + cell["turns_per_session"] * (cell["new_tokens"] + cell["output_tokens"])
    num_pages = int(-(-longest // PAGE_SIZE) * cell["sessions_at_once"]) + 2
    config = make_config(
        {
            "model": cell["model"],
            "device": "h100-80gb",
            "pages": num_pages,
            "page_size": PAGE_SIZE,
            "kv_groups": cell["kv_groups"],
        }
    )
    host_pages = max(64, int(num_pages * cell["of_device"]))
    tier = OffloadConfig(host_pages=host_pages, policy=cell["policy"], h2d=cell["rate"], d2h=cell["rate"])
    alone_ms = with_ms = step_ms = 0.0
    for seed in range(num_arrivals):
        seeded = msgspec.structs.replace(traffic, seed=seed)
        alone = replay(seeded, config)
        step_ms = max(step_ms, longest_step_ms(alone))
        alone_ms += alone.summary["ttft_ms"]["mean"] / num_arrivals
        with_tier = replay(seeded, msgspec.structs.replace(config, offload=tier))
        with_ms += with_tier.summary["ttft_ms"]["mean"] / num_arrivals
    return alone_ms, with_ms, step_ms


def longest_step_ms(report: Report) -> float:
    return max(int(max(log.columns["duration_ns"])) for log in report.step_logs) / 1e6


if __name__ == "__main__":
    main()
