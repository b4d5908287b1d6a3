"""Decoding with a real model on a CPU, beside transformers' generate: random weights, the shape of Qwen3-0.6B, bf16.

    python benchmarks/decode_speed.py

Needs kvarts[torch]. Each round measures both in turn: tokens a second while all sequences decode, with their prompts
computed before. Medians of rounds. The last column is the share of a step that is neither the model nor the sampling.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from time import perf_counter, perf_counter_ns
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from kvarts.config import EngineConfig
from kvarts.executor.torch.attention import ATTENTION
from kvarts.executor.torch.packing import pack_linears
from kvarts.executor.torch.sampling import SamplingParams
from kvarts.live.engine import Engine

QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960,
}


def prompts_of(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, 150_000, (count, length), generator=torch.Generator().manual_seed(0))


def kvarts_rate(model: Any, count: int, length: int, num_steps: int) -> tuple[float, float]:
    """Tokens a second, and the share of a step outside the executor."""
    pages = count * (-(-(length + num_steps + 8) // 16))
    config = EngineConfig(num_pages=pages, page_size=16, max_num_batched_tokens=4096, max_num_seqs=count)
    inside = 0

    class Timed:
        def __init__(self, executor: Any) -> None:
            self.executor = executor

        def execute(self, plan: Any) -> Any:
            nonlocal inside
            start = perf_counter_ns()
            result = self.executor.execute(plan)
            inside += perf_counter_ns() - start
            return result

    engine = Engine(model, None, config, wrap=Timed)
    for prompt in prompts_of(count, length).tolist():
        engine.submit(prompt, SamplingParams(max_tokens=num_steps + 4, ignore_eos=True))
    while any(not generation.tokens for generation in engine._generations.values()):
        engine.step()
    engine.step()
    inside = 0
    start = perf_counter_ns()
    for _ in range(num_steps):
        engine.step()
    taken = perf_counter_ns() - start
    return count * num_steps / taken * 1e9, 1 - inside / taken


def generate_rate(model: Any, count: int, length: int, num_steps: int) -> float:
    ids = prompts_of(count, length)

    def seconds(num_tokens: int) -> float:
        start = perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return perf_counter() - start

    return count * num_steps / (seconds(num_steps + 2) - seconds(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**QWEN3_06B), dtype=torch.bfloat16).eval()
    packed = copy.deepcopy(model)
    pack_linears(packed)
    packed.set_attn_implementation(ATTENTION)
    print("| sequences | kvarts tokens/s | generate tokens/s | times | outside the executor |")
    print("|---:|---:|---:|---:|---:|")
    for count in args.sequences:
        mine, theirs, ratios, outside = [], [], [], []
        for _ in range(args.rounds):
            rate, share = kvarts_rate(packed, count, args.prompt, args.steps)
            other = generate_rate(model, count, args.prompt, args.steps)
            mine.append(rate)
            theirs.append(other)
            ratios.append(rate / other)
            outside.append(share)
        cells = [statistics.median(values) for values in (mine, theirs, ratios, outside)]
        print(f"| {count} | {cells[0]:.1f} | {cells[1]:.1f} | {cells[2]:.2f} | {cells[3] * 100:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
