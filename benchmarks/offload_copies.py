"""TTFT and time per token of sessions with host memory, where channels share a bus and copies slow down steps.

    python benchmarks/offload_copies.py

Deterministic: virtual time. 200 sessions of six turns (1,000 new tokens, 200 generated), 4 sessions a second, qwen3-8b
on an H100 with 20 GiB of KV memory, 200 GiB of host memory.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from kvarts.offload.config import OffloadConfig
from kvarts.replaying import replay
from kvarts.sim.config import make_config
from kvarts.traffic.workload import FixedLength, Workload

RATES = "10GB/s", "25GB/s"
TRAFFIC = Workload(
    num_sessions=200,
    turns_per_session=6,
    new_tokens=FixedLength(1000),
    output_tokens=FixedLength(200),
    sessions_per_s=4.0,
    think_time_s=5.0,
)


def row(**tier: Any) -> str:
    """Return TTFT and TPOT of the sessions, and the bytes moved, as cells."""
    config = make_config({"model": "qwen3-8b", "device": "h100-80gb", "kv_memory": "20GiB"})
    if tier:
        offload = OffloadConfig(host_memory="200GiB", kv_bytes_per_token=147_456, num_layers=36, **tier)
        config = msgspec.structs.replace(config, offload=offload)
    summary = replay(TRAFFIC, config).summary
    moved = (summary["transfers"] or {"bytes": {"d2h": 0, "h2d": 0}})["bytes"]
    ttft, tpot = summary["ttft_ms"], summary["tpot_ms"]
    return (
        f"{ttft['mean'] / 1e3:.1f} s | {ttft['p99'] / 1e3:.1f} s | {tpot['mean']:.1f} ms | "
        f"{moved['d2h'] / 1e9:,.0f} GB | {moved['h2d'] / 1e9:,.0f} GB"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| h2d, d2h | options | TTFT | p99 | TPOT | stored | loaded |\n|---|---|---:|---:|---:|---:|---:|")
    print(f"| - | no tier | {row()} |")
    for rate in RATES:
        options: dict[str, dict[str, Any]] = {
            "none": {},
            f"`--bus {rate}`": {"bus": rate},
            "`--copy-slowdown 0.1`": {"copy_slowdown": 0.1},
            "`--copy-slowdown 0.4`": {"copy_slowdown": 0.4},
            "both, 0.4": {"bus": rate, "copy_slowdown": 0.4},
            "`--load-overlap layers`": {"load_overlap": "layers"},
            "layers, 0.4": {"load_overlap": "layers", "copy_slowdown": 0.4},
        }
        for name, tier in options.items():
            print(f"| {rate} | {name} | {row(h2d=rate, d2h=rate, **tier)} |")


if __name__ == "__main__":
    main()
