"""What host memory below the device buys on a recorded trace; deterministic, the same on every machine.

    python benchmarks/offload_tiers.py shared/data/mooncake/conversation_trace.jsonl

What it costs the replay is the figure `tiers` of speed.py.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    args = parser.parse_args()
    configs: dict[str, ReplayConfig] = {"none": config_of(None, 0)}
    for policy in ("eager", "lazy"):
        for host_pages in HOST_PAGES:
            configs[f"{policy} {host_pages:,}"] = config_of(policy, host_pages)
    configs["lazy 64,000, target 512"] = config_of("lazy", 64000, 512)
    print_outcome(args.trace, configs)


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


if __name__ == "__main__":
    main()
