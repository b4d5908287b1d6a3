"""TTFT of a prompt whose history host memory holds: loading, computing, and both at once.

    python benchmarks/offload_overlap.py [--tokens 32768] [--new-tokens 8192]

Deterministic: virtual time, an idle H100 (qwen3-8b) that has computed another prompt since. First table: the whole
prompt comes again; its last pages are loaded while its first are computed. Second table: new tokens follow it, and are
computed layer by layer while the last layers of the history are loaded (`--set offload.load_overlap=layers`).
"""

from __future__ import annotations

import argparse
from typing import Literal

import msgspec

from kvarts.offload.config import OffloadConfig
from kvarts.replaying import replay
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.traffic.trace import Trace, TraceRequest
from kvarts.units import parse_rate

NS_PER_S = 1_000_000_000
TOKEN_BYTES, NUM_LAYERS = 147_456, 36
RATES = "1GB/s", "2GB/s", "3GB/s", "4GB/s", "5GB/s", "6GB/s", "8GB/s", "16GB/s", "32GB/s", "50GB/s"


def ttft_ms(config: ReplayConfig, *prompts: tuple[range, ...]) -> list[float]:
    """Return the TTFT of prompts, each of ranges of tokens, that arrive a minute apart."""
    rows = [
        TraceRequest(index, 60 * NS_PER_S * index, tokens, sum(map(len, tokens)), 1)
        for index, tokens in enumerate(prompts)
    ]
    columns = replay(Trace(rows), config).request_columns
    return [float(ns) / 1e6 for ns in columns["first_token_ns"] - columns["arrival_ns"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--new-tokens", type=int, default=8192)
    args = parser.parse_args()
    num_tokens, num_new = args.tokens, args.new_tokens
    history = (range(num_tokens),)
    turn = (*history, range(num_tokens, num_tokens + num_new))

    def other(prompt: tuple[range, ...]) -> tuple[range, ...]:
        """Return another prompt of the same length, which fills the device."""
        return (range(10 * num_tokens, 10 * num_tokens + sum(map(len, prompt))),)

    def device(prompt: tuple[range, ...], num_prompts: int = 1) -> ReplayConfig:
        num_pages = num_prompts * (sum(map(len, prompt)) // 16 + 8)
        return make_config({"model": "qwen3-8b", "device": "h100-80gb", "pages": num_pages})

    def with_tier(prompt: tuple[range, ...], rate: str, overlap: Literal["none", "layers"]) -> float:
        tier = OffloadConfig(
            host_memory="64GiB", h2d=rate, kv_bytes_per_token=TOKEN_BYTES, load_overlap=overlap, num_layers=NUM_LAYERS
        )
        config = msgspec.structs.replace(device(prompt), offload=tier)
        return ttft_ms(config, history, other(prompt), prompt)[2]

    def load_ms(rate: str) -> float:
        return float(num_tokens * TOKEN_BYTES / parse_rate(rate) * 1e3)

    (compute_ms,) = ttft_ms(device(history), history)
    print("| h2d | compute alone | load alone | both | sooner than either |\n|---|---:|---:|---:|---:|")
    for rate in RATES:
        both_ms = with_tier(history, rate, "none")
        ratio = min(compute_ms, load_ms(rate)) / both_ms
        print(f"| {rate} | {compute_ms:,.0f} ms | {load_ms(rate):,.0f} ms | {both_ms:,.0f} ms | {ratio:.2f} |")

    (compute_ms,) = ttft_ms(device(turn), turn)
    rest_ms = ttft_ms(device(turn, 3), history, turn)[1]
    print(f"\nNew tokens alone: {rest_ms:,.0f} ms.\n")
    print("| h2d | compute all | load, then compute | both | by layer | sooner than either |")
    print("|---|---:|---:|---:|---:|---:|")
    for rate in RATES:
        loading_ms = load_ms(rate) + rest_ms
        both_ms, layers_ms = with_tier(turn, rate, "none"), with_tier(turn, rate, "layers")
        ratio = min(compute_ms, loading_ms) / layers_ms
        times = f"{compute_ms:,.0f} ms | {loading_ms:,.0f} ms | {both_ms:,.0f} ms | {layers_ms:,.0f} ms"
        print(f"| {rate} | {times} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
