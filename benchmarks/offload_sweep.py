"""Whether a tier ever makes a run slower than without it: TTFT beside no tier, over bandwidths, sizes and failures.

    python benchmarks/offload_sweep.py shared/data/mooncake/conversation_trace.jsonl

Deterministic: virtual time. Each cell is the mean and the p99 of TTFT as a multiple of those without a tier, with the
same bandwidth on every channel. The last line names the worst of each; a law of the design says that none is above
1.05. `--quick` leaves most cells out.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from kvarts.core.tiers.config import OffloadConfig
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.formats import load_trace

RATES = ("10MB/s", "100MB/s", "1GB/s", "10GB/s", "100GB/s")
KINDS: dict[str, dict[str, Any]] = {
    "eager": {"policy": "eager"},
    "lazy": {"policy": "lazy"},
    "files": {"policy": "eager", "is_files": True},
}


def offload_of(kind: str, rate: str, host_pages: int, fail_every: int) -> OffloadConfig:
    changes = dict(KINDS[kind])
    if changes.pop("is_files", False):
        changes["disk_pages"] = 4 * host_pages
    return OffloadConfig(
        host_pages=host_pages, h2d=rate, d2h=rate, disk_read=rate, disk_write=rate, fail_every=fail_every, **changes
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--pages", type=int, default=4000)
    parser.add_argument("--page-size", type=int, default=512)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    trace = load_trace(args.trace)
    config = ReplayConfig(num_pages=args.pages, page_size=args.page_size)
    alone = replay(trace, config).summary["ttft_ms"]
    print(f"no tier: TTFT mean {alone['mean'] / 1e3:.2f} s, p99 {alone['p99'] / 1e3:.2f} s\n", flush=True)
    rates = RATES[::2] if args.quick else RATES
    sizes = (1, args.pages) if args.quick else (1, args.pages // 10, args.pages, 10 * args.pages)
    worst = {"mean": (0.0, ""), "p99": (0.0, "")}
    print(f"| tier | fails | host pages | {' | '.join(rates)} |\n|---|---|---:|{'---:|' * len(rates)}")
    for kind, fail_every, host_pages in itertools.product(KINDS, (0, 2), sizes):
        cells = []
        for rate in rates:
            offload = offload_of(kind, rate, host_pages, fail_every)
            ttft = replay(trace, ReplayConfig(num_pages=args.pages, page_size=args.page_size, offload=offload)).summary[
                "ttft_ms"
            ]
            ratios = {name: ttft[name] / alone[name] for name in worst}
            for name, ratio in ratios.items():
                worst[name] = max(worst[name], (ratio, f"{kind}, {rate}, {host_pages:,} pages, fails {fail_every}"))
            cells.append(f"{ratios['mean']:.2f} / {ratios['p99']:.2f}")
        fails = f"1 in {fail_every}" if fail_every else "none"
        print(f"| {kind} | {fails} | {host_pages:,} | {' | '.join(cells)} |", flush=True)
    print(
        f"\nworst mean {worst['mean'][0]:.3f} ({worst['mean'][1]}), worst p99 {worst['p99'][0]:.3f} ({worst['p99'][1]})"
    )


if __name__ == "__main__":
    main()
