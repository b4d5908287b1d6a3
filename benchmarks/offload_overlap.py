"""TTFT of a prompt that host memory holds: its last pages are loaded while its first are computed.

    python benchmarks/offload_overlap.py [--tokens 32768]

Deterministic: virtual time. The prompt comes again on an idle H100 (qwen3-8b) that has computed another one since. Its
time to compute is that of its first time; its time to load is that of its bytes.
"""

from __future__ import annotations

import argparse

import msgspec

from kvarts.offload.config import OffloadConfig
from kvarts.sim.config import make_config
from kvarts.sim.replay import replay
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.units import parse_rate

NS_PER_S = 1_000_000_000
RATES = "1GB/s", "2GB/s", "3GB/s", "4GB/s", "5GB/s", "6GB/s", "8GB/s", "16GB/s", "50GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    args = parser.parse_args()
    num_tokens = args.tokens
    prompts = [range(num_tokens), range(num_tokens, 2 * num_tokens), range(num_tokens)]
    config = make_config({"model": "qwen3-8b", "device": "h100-80gb", "pages": num_tokens // 16 + 8})
    print("| h2d | compute alone | load alone | both | sooner than either |\n|---|---:|---:|---:|---:|")
    for rate in RATES:
        trace = Trace(
            [
                TraceRequest(index, 60 * NS_PER_S * index, (tokens,), num_tokens, 1)
                for index, tokens in enumerate(prompts)
            ]
        )
        offload = OffloadConfig(host_memory="64GiB", h2d=rate, kv_bytes_per_token=147_456)
        columns = replay(trace, msgspec.structs.replace(config, offload=offload)).request_columns
        ttft_ms = (columns["first_token_ns"] - columns["arrival_ns"]) / 1e6
        load_ms = num_tokens * offload.kv_bytes_per_token / parse_rate(rate) * 1e3
        ratio = min(ttft_ms[0], load_ms) / ttft_ms[2]
        print(f"| {rate} | {ttft_ms[0]:,.0f} ms | {load_ms:,.0f} ms | {ttft_ms[2]:,.0f} ms | {ratio:.2f} |")


if __name__ == "__main__":
    main()
