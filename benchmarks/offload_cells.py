"""Whether a tier makes a run slower that is short of memory, with whole pages and with KV groups.

    python benchmarks/offload_cells.py [--trace sample:mooncake] [--kv-memory 16GiB] [--speedup 0.2]

Deterministic: virtual time. A cell is the mean and the p99 of TTFT as multiples of those without a tier, on an H100
that has `--kv-memory` for KV, with the same bandwidth towards host memory and back. Sizes of host memory are 64 pages,
a tenth of the device, the device, and ten times that.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any, Literal

import msgspec

from kvarts.offload.config import OffloadConfig
from kvarts.replaying import replay
from kvarts.sim.config import make_config
from kvarts.traffic.formats import load_trace
from kvarts.units import parse_bytes

RATES = "100MB/s", "1GB/s", "10GB/s", "50GB/s"
SIZES = {"64 pages": 0.0, "1/10": 0.1, "1": 1.0, "10": 10.0}
MODELS: dict[str, dict[str, Any]] = {
    "whole pages": {"model": "qwen3-8b"},
    "KV groups": {"model": "gemma-3-27b", "kv_groups": "tails"},
}
WHICH = "mean", "p99"
PAGE_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="sample:mooncake")
    parser.add_argument("--kv-memory", default="16GiB")
    parser.add_argument("--speedup", type=float, default=0.2)
    args = parser.parse_args()
    trace = load_trace(args.trace)
    num_bytes = parse_bytes(args.kv_memory)
    worst: dict[str, list[float]] = {}
    print(f"| | tier | host memory | {' | '.join(RATES)} |\n|---|---|---:|{'---:|' * len(RATES)}")
    policies: tuple[Literal["eager", "lazy"], ...] = ("eager", "lazy")
    for name, values in MODELS.items():
        config = make_config(
            {
                **values,
                "device": "h100-80gb",
                "page_size": PAGE_TOKENS,
                "kv_memory": args.kv_memory,
                "speedup": args.speedup,
            }
        )
        alone = replay(trace, config).summary["ttft_ms"]
        for policy, (size, share) in itertools.product(policies, SIZES.items()):
            host: dict[str, Any] = {"host_memory": round(num_bytes * share)} if share else {"host_pages": 64}
            cells = []
            for rate in RATES:
                offload = OffloadConfig(**host, policy=policy, h2d=rate, d2h=rate)
                ttft = replay(trace, msgspec.structs.replace(config, offload=offload)).summary["ttft_ms"]
                ratios = [ttft[which] / alone[which] for which in WHICH]
                worst[name] = [max(pair) for pair in zip(worst.get(name, [0.0, 0.0]), ratios, strict=True)]
                cells.append(" / ".join(f"{ratio:.2f}" for ratio in ratios))
            print(f"| {name} | {policy} | {size} | {' | '.join(cells)} |", flush=True)
        print(f"{name}: {alone['mean'] / 1e3:.1f} s and {alone['p99'] / 1e3:.1f} s without a tier", flush=True)
    for name, (mean, p99) in worst.items():
        print(f"worst with {name}: mean {mean:.3f}, p99 {p99:.3f}")


if __name__ == "__main__":
    main()
