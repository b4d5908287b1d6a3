"""What host memory below the device buys on a recorded trace, and what it costs the replay.

    python benchmarks/offload_tiers.py shared/data/mooncake/conversation_trace.jsonl

The first table is the outcome: deterministic, the same on every machine. The second is the processor time of whole
commands, `kvarts replay` with these tiers, beside the same without a tier, in turns, as the median of the ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay

NUM_PAGES, PAGE_SIZE = 4000, 512
HOST_PAGES = (4000, 16000, 64000)


def config_of(policy: str | None, host_pages: int, target_free: int | None = None) -> ReplayConfig:
    offload = None
    if policy is not None:
        offload = OffloadConfig(host_pages=host_pages, policy=policy, target_free=target_free)  # type: ignore[arg-type]
    return ReplayConfig(num_pages=NUM_PAGES, page_size=PAGE_SIZE, offload=offload)


def cpu_s(trace: Path, options: tuple[str, ...]) -> float:
    """Return the processor time of one `kvarts replay`."""
    pages = "--pages", str(NUM_PAGES), "--page-size", str(PAGE_SIZE)
    start = os.times()
    command = (sys.executable, "-m", "kvarts", "replay", str(trace), *pages, *options)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = os.times()
    return end.children_user - start.children_user + end.children_system - start.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tables-only", action="store_true", help="no times")
    parser.add_argument("--times-only", action="store_true", help="times and nothing else")
    args = parser.parse_args()
    configs: dict[str, ReplayConfig] = {"none": config_of(None, 0)}
    for policy in ("eager", "lazy"):
        for host_pages in HOST_PAGES:
            configs[f"{policy} {host_pages:,}"] = config_of(policy, host_pages)
    configs["lazy 64,000, target 512"] = config_of("lazy", 64000, 512)
    if not args.times_only:
        print_outcome(args.trace, configs)
    if not args.tables_only:
        print_times(args.trace, args.rounds)


def print_outcome(trace: Path, configs: dict[str, ReplayConfig]) -> None:
    print("| host pages | device M tokens | host M tokens | computed M tokens | again M tokens "
          "| TTFT mean s | TTFT p99 s | stored TB | loaded TB |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, config in configs.items():
        summary = replay(trace, config).summary
        hits = summary["num_cached_tokens_by_tier"]
        moved = (summary["transfers"] or {"bytes": {"d2h": 0, "h2d": 0}})["bytes"]
        new = summary["num_input_tokens"] - summary["num_cached_tokens"]
        cells = [
            f"{hits['device'] / 1e6:.1f}",
            f"{hits.get('host', 0) / 1e6:.1f}",
            f"{new / 1e6:.1f}",
            f"{summary['num_recomputed_tokens'] / 1e6:.2f}",
            f"{summary['ttft_ms']['mean'] / 1e3:.2f}",
            f"{summary['ttft_ms']['p99'] / 1e3:.2f}",
            f"{moved['d2h'] / 1e12:.2f}",
            f"{moved['h2d'] / 1e12:.2f}",
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_times(trace: Path, num_rounds: int) -> None:
    commands: dict[str, tuple[str, ...]] = {"none": ()}
    for policy in ("eager", "lazy"):
        for host_pages in HOST_PAGES:
            commands[f"{policy} {host_pages:,}"] = "--offload", policy, "--host-pages", str(host_pages)
    commands["files 64,000 below eager 4,000"] = "--host-pages", "4000", "--set", "offload.disk_pages=64000"
    ratios: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(num_rounds):
        times = {name: cpu_s(trace, options) for name, options in commands.items()}
        for name, seconds in times.items():
            ratios[name].append(seconds / times["none"])
    print("\n| host pages | time beside no tier |\n|---|---:|")
    for name, values in ratios.items():
        print(f"| {name} | {statistics.median(values):.2f} |")


if __name__ == "__main__":
    main()
