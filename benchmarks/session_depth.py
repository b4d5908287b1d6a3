"""What a token costs deep in a bounded session, beside what it costs near its beginning.

    python benchmarks/session_depth.py [--depths 1000,100000] [--full-depths 1000,20000] [--rounds 7] [--layers 28]

A model of the shape of Qwen3-0.6B with random weights in bfloat16 (`--dtype`), sink 4 and window 64; `--layers` makes
it smaller. Histories are computed from the first token to the last. Then the sessions generate in turns, a few tokens
each, and the medians of all rounds are compared. `--full-depths`: beside them, plain requests with all of their KV.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import SessionTable
from kvarts.run.sessions.values import SessionsConfig, SessionSettings, Token
from kvarts.run.torch.attention import ATTENTION
from kvarts.run.torch.llm import LLM

OWNER = "benchmark"
SINK, WINDOW = 4, 64
NUM_TOKENS = 16


def make_model(num_layers: int, attention: str) -> Any:
    shape = Qwen3Config(
        vocab_size=151_936 if num_layers > 4 else 4_096,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    shape._attn_implementation = attention
    torch.manual_seed(0)
    return Qwen3ForCausalLM(shape).to(torch.bfloat16).eval()


async def deep_session(sessions: Sessions, depth: int, window: int | None = WINDOW) -> str:
    """Return a session with a history of `depth` tokens, computed from the first to the last."""
    session = await sessions.create(
        OWNER, SessionSettings(sink=SINK, window=window, retention="pin" if window is None else "cache")
    )
    for start in range(0, depth, 8192):
        await sessions.append(OWNER, session, [7] * min(8192, depth - start))
    return session


async def seconds_a_token(sessions: Sessions, session: str) -> float:
    """Generate, and return the mean time between tokens."""
    updates = sessions.generate(OWNER, session, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    times = [time.perf_counter() async for update in updates if isinstance(update, Token)]
    return (times[-1] - times[0]) / (len(times) - 1)


async def measure(depths: list[int], full: list[int], rounds: int, num_layers: int, dtype: str) -> dict[str, Any]:
    model = make_model(num_layers, ATTENTION).to(getattr(torch, dtype))
    num_pages = 256 + sum(-(-depth // 16) + 32 for depth in full)
    config = EngineConfig(num_pages=num_pages, page_size=16, max_num_batched_tokens=1024, max_num_seqs=4)
    llm = LLM(model, None, config)
    sessions = Sessions(SessionTable(llm.host(), SessionsConfig(chunk_tokens=1024)))
    made: dict[tuple[int, int | None], str] = {(depth, WINDOW): await deep_session(sessions, depth) for depth in depths}
    made |= {(depth, None): await deep_session(sessions, depth, None) for depth in full}
    times: dict[tuple[int, int | None], list[float]] = {which: [] for which in made}
    for number in range(rounds + 1):
        for which, found in times.items():
            seconds = await seconds_a_token(sessions, made[which])
            if number:  # the first warms up
                found.append(seconds)
    bytes_live = {depth: (await sessions.info(OWNER, made[depth, WINDOW])).kv_live_bytes for depth in depths}
    await sessions.shut_down()
    medians = {which: statistics.median(found) for which, found in times.items()}
    return {
        "layers": num_layers,
        "dtype": dtype,
        "ms_a_token": {str(depth): medians[depth, WINDOW] * 1e3 for depth in depths},
        "ms_a_token_with_all_kv": {str(depth): medians[depth, None] * 1e3 for depth in full},
        "kv_live_bytes": {str(depth): bytes_live[depth] for depth in depths},
        "ratio": medians[depths[-1], WINDOW] / medians[depths[0], WINDOW],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="1000,100000", help="Lengths of histories. [1000,100000]")
    parser.add_argument("--full-depths", default="", help="Lengths of prompts that keep all of their KV. [none]")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="[bfloat16]")
    parser.add_argument("--rounds", type=int, default=7, help="Rounds. [7]")
    parser.add_argument("--layers", type=int, default=28, help="Layers; 28 is Qwen3-0.6B. [28]")
    parser.add_argument("--json", type=Path, help="Write the figures here as well.")
    arguments = parser.parse_args()
    depths = [int(depth) for depth in arguments.depths.split(",")]
    full = [int(depth) for depth in arguments.full_depths.split(",") if depth]
    figures = asyncio.run(measure(depths, full, arguments.rounds, arguments.layers, arguments.dtype))
    for depth in depths:
        print(
            f"{depth:>9,} tokens of history: {figures['ms_a_token'][str(depth)]:8.2f} ms a token, "
            f"{figures['kv_live_bytes'][str(depth)]:,} bytes of KV"
        )
    for depth in full:
        print(f"{depth:>9,} tokens, all kept:   {figures['ms_a_token_with_all_kv'][str(depth)]:8.2f} ms a token")
    print(f"ratio of the deepest to the first: {figures['ratio']:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
