"""Preempted requests with host memory below: computed again, or loaded.

    python benchmarks/offload_preempted.py [--seeds 8]

Deterministic: virtual time. Prompts share nothing, and no one knows the tokens of the outputs. Each cell is a mean over
`--seeds` arrivals, as a multiple of the same without a tier; tokens computed again are per preemption.
"""

from __future__ import annotations

import argparse
from random import Random
from typing import Any, Literal

import msgspec

from kvarts.offload.config import OffloadConfig
from kvarts.replaying import replay
from kvarts.sim.config import make_config
from kvarts.traffic.trace import Trace, TraceRequest

NS_PER_S = 1_000_000_000
RATES = "1GB/s", "5GB/s", "25GB/s", "50GB/s"
LOADS: dict[str, tuple[dict[str, Any], tuple[int, int, int, float]]] = {
    "qwen3-8b, h100-80gb, 8 GiB, 500 + 2,000 tokens": (
        {"model": "qwen3-8b", "device": "h100-80gb", "kv_memory": "8GiB"},
        (150, 500, 2000, 5.0),
    ),
    "qwen3-8b, h100-80gb, 0.5 GiB, 100 + 1,500 tokens": (
        {"model": "qwen3-8b", "device": "h100-80gb", "kv_memory": "512MiB"},
        (30, 100, 1500, 4.0),
    ),
    "qwen3-8b, l4, 4 GiB, 500 + 1,000 tokens": (
        {"model": "qwen3-8b", "device": "l4", "kv_memory": "4GiB"},
        (60, 500, 1000, 2.0),
    ),
    "llama-3.1-70b, 4 h100-80gb, 8 GiB each, 3,000 + 1,000 tokens": (
        {"model": "llama-3.1-70b", "device": "h100-80gb", "tensor_parallel": 4, "kv_memory": "8GiB"},
        (60, 3000, 1000, 2.0),
    ),
    "gpt-oss-20b, h100-80gb, 4 GiB, 500 + 2,000 tokens": (
        {"model": "gpt-oss-20b", "device": "h100-80gb", "kv_memory": "4GiB"},
        (150, 500, 2000, 5.0),
    ),
    "gemma-3-27b, h100-80gb, 8 GiB, 3,000 + 1,000 tokens": (
        {"model": "gemma-3-27b", "device": "h100-80gb", "kv_memory": "8GiB"},
        (60, 3000, 1000, 2.0),
    ),
}


def made(seed: int, num_requests: int, prompt_tokens: int, output_tokens: int, per_s: float) -> Trace:
    """Return requests with prompts of half to 1.5 times `prompt_tokens`, outputs of a fifth to 1.8 times theirs."""
    random = Random(seed)
    rows, arrival_s, start = [], 0.0, 0
    for index in range(num_requests):
        arrival_s += random.expovariate(per_s)
        num_prompt = round(prompt_tokens * random.uniform(0.5, 1.5))
        num_output = round(output_tokens * random.uniform(0.2, 1.8))
        tokens = range(start, start + num_prompt)
        rows.append(TraceRequest(index, round(arrival_s * NS_PER_S), (tokens,), num_prompt, num_output))
        start += num_prompt
    return Trace(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    print("| load | tier | d2h, h2d | TTFT | end to end | again |\n|---|---|---:|---:|---:|---:|")
    modes: tuple[Literal["recompute", "swap"], ...] = ("recompute", "swap")
    for name, (values, shape) in LOADS.items():
        config = make_config({**values, "page_size": 16})
        placement = config.placement
        assert placement is not None
        token_bytes = placement.kv_bytes_per_token
        traces = [made(seed, *shape) for seed in range(args.seeds)]

        def means(offload: OffloadConfig | None, config: Any = config, traces: Any = traces) -> list[float]:
            each = config if offload is None else msgspec.structs.replace(config, offload=offload)
            summaries = [replay(trace, each).summary for trace in traces]
            sums = [sum(summary[key]["mean"] for summary in summaries) for key in ("ttft_ms", "e2e_ms")]
            again = sum(summary["num_recomputed_tokens"] for summary in summaries)
            return [*sums, again / max(1, sum(summary["num_preemptions"] for summary in summaries))]

        alone = means(None)
        print(f"| {name} | none | | 1 | 1 | {alone[2]:,.0f} |", flush=True)
        for mode in modes:
            for rate in RATES:
                offload = OffloadConfig(
                    host_memory="200GB",
                    h2d=rate,
                    d2h=rate,
                    kv_bytes_per_token=token_bytes,
                    preemption_mode=mode,
                )
                ttft, e2e, again = means(offload)
                print(
                    f"| | {mode} | {rate} | {ttft / alone[0]:.3f} | {e2e / alone[1]:.3f} | {again:,.0f} |", flush=True
                )


if __name__ == "__main__":
    main()
