"""Two models on one device, shared and split, on two pairs of real traces; and what the replay of both costs.

    python benchmarks/sharing.py shared/data

The folder holds azure2023/conv.csv, azure2023/code.csv, mooncake/conversation_trace.jsonl and synthetic_trace.jsonl.
The first table is the outcome: deterministic, the same on every machine. The second is the processor time of whole
replays (replaying and reporting) beside that of both models replayed alone, each on the whole device, and each on the
part that the split gives it; in turns, as the median of the ratios.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from pathlib import Path
from time import process_time
from typing import Any

from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.sharing.config import ModelShare, SharingConfig
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace

PAIRS = {
    "Azure chat and code": ("azure2023/conv.csv", "azure2023/code.csv", "12GiB", 1.0),
    "Mooncake chat and synthetic": (
        "mooncake/conversation_trace.jsonl", "mooncake/synthetic_trace.jsonl", "40GiB", 0.25,
    ),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "split": {"static_split": True},
    "shared": {},
    "shared, second first": {"second": {"priority": 1}},
}


def config_of(kv_memory: str, speedup: float, variant: dict[str, Any]) -> SharingConfig:
    models = {
        "first": ModelShare(model="llama-3.1-8b", **variant.get("first", {})),
        "second": ModelShare(model="qwen3-8b", **variant.get("second", {})),
    }
    settings = {name: value for name, value in variant.items() if name not in models}
    each = ReplayConfig(speedup=speedup)
    return SharingConfig(models=models, device="h100-80gb", kv_memory=kv_memory, each=each, **settings)


def one_round(traces: dict[str, Trace], config: SharingConfig) -> tuple[float, float]:
    start = process_time()
    replay(traces, config).to_json()
    both = process_time() - start
    return both / alone(traces, config, 1.0), both / alone(traces, config, 0.5)


def alone(traces: dict[str, Trace], config: SharingConfig, part: float) -> float:
    start = process_time()
    for name, trace in traces.items():
        values = {
            "num_pages": int(config.kv_bytes * part) // config.page_bytes[name],
            "max_num_batched_tokens": int(config.each.max_num_batched_tokens * part),
            "cost": config.configs[name].cost,
            "speedup": config.configs[name].speedup,
        }
        replay(trace, ReplayConfig(**values)).to_json()
    return process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tables-only", action="store_true", help="no times")
    args = parser.parse_args()
    loaded = {
        pair: ({"first": load_trace(args.data / first), "second": load_trace(args.data / second)}, kv_memory, speedup)
        for pair, (first, second, kv_memory, speedup) in PAIRS.items()
    }
    print("| | first: TTFT mean, p99 s | ITL mean ms | second: TTFT mean, p99 s | ITL mean ms "
          "| preempted inside, across | end s | Jain |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for pair, (traces, kv_memory, speedup) in loaded.items():
        for variant, changes in VARIANTS.items():
            summary = replay(traces, config_of(kv_memory, speedup, changes)).summary
            first, second = summary["models"].values()
            cells = []
            for model in (first, second):
                ttft = model["ttft_ms"]
                cells += [f"{ttft['mean'] / 1e3:.2f}, {ttft['p99'] / 1e3:.1f}", f"{model['itl_ms']['mean']:.1f}"]
            inside = first["num_preemptions_inside"] + second["num_preemptions_inside"]
            across = first["num_preemptions_for_others"] + second["num_preemptions_for_others"]
            device = summary["device"]
            cells += [f"{inside:,}, {across:,}", f"{device['duration_ms'] / 1e3:,.0f}", f"{device['jain_index']:.3f}"]
            print(f"| {pair}, {kv_memory}, {variant} | " + " | ".join(cells) + " |")
    if args.tables_only:
        return
    gc.disable()  # as the command line does
    print("\n| | beside both alone on the whole device | beside both alone on their part |\n|---|---:|---:|")
    for pair, (traces, kv_memory, speedup) in loaded.items():
        config = config_of(kv_memory, speedup, {})
        ratios = [one_round(traces, config) for _ in range(args.rounds)]
        whole, part = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"| {pair} | {whole:.2f} | {part:.2f} |")


if __name__ == "__main__":
    main()
