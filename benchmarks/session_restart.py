"""What a checkpoint saves: the first token after a restart, with the KV of the session in a file and without it.

    python benchmarks/session_restart.py [--history 2000] [--layers 28] [--rounds 5]

A model of the shape of Qwen3-0.6B with random weights in float32 or bfloat16 (`--dtype`), sink 4 and window 64;
`--layers` makes it smaller. A session computes its history once and is closed with its server. Then servers are
started on copies of its directory, in turns with the checkpoint and with that file removed, and generate one token.
What is compared is the time from the opened server to that token, restoring included, and the tokens computed for it.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.keeper import Keeper
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import SessionTable
from kvarts.run.sessions.values import SessionsConfig, SessionSettings, Token
from kvarts.run.torch.attention import ATTENTION
from kvarts.run.torch.llm import LLM
from session_depth import OWNER, SINK, WINDOW, make_model


def opened(model: object, directory: Path) -> Sessions:
    """Return sessions on a new engine, with those of `directory` restored."""
    config = EngineConfig(num_pages=256, page_size=16, max_num_batched_tokens=1024, max_num_seqs=4)
    table = SessionTable(LLM(model, None, config).host(), SessionsConfig(chunk_tokens=1024))
    keeper = Keeper(table, directory, lambda line: print(f"  {line}"))
    table.host.loop.call(lambda _: keeper.restore())
    return Sessions(table, keeper)


async def fill(model: object, directory: Path, length: int) -> None:
    sessions = opened(model, directory)
    session = await sessions.create(OWNER, SessionSettings(sink=SINK, window=WINDOW))
    await sessions.append(OWNER, session, [7 + index % 1000 for index in range(length)])
    await one_token(sessions, session)
    await sessions.shut_down()


async def one_token(sessions: Sessions, session: str) -> float:
    """Return when the first token came."""
    at_s = 0.0
    async for update in sessions.generate(OWNER, session, SamplingParams(max_tokens=1, ignore_eos=True)):
        if isinstance(update, Token):
            at_s = time.perf_counter()
    return at_s


async def restart(model: object, directory: Path, *, restored: str) -> tuple[float, int]:
    """Return the seconds from the start of the server to the first token, and how many tokens were computed."""
    start_s = time.perf_counter()
    sessions = opened(model, directory)
    (info,) = await sessions.list(OWNER)
    assert info.restored == restored, f"restored from {info.restored}"
    at_s = await one_token(sessions, info.session_id)
    num_computed = (await sessions.info(OWNER, info.session_id)).num_computed_tokens - info.num_computed_tokens
    await sessions.shut_down()
    return at_s - start_s, num_computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, default=2000, help="Tokens. [2000]")
    parser.add_argument("--layers", type=int, default=28, help="Layers; 28 is Qwen3-0.6B. [28]")
    parser.add_argument("--rounds", type=int, default=5, help="Rounds. [5]")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="[float32]")
    arguments = parser.parse_args()
    model = make_model(arguments.layers, ATTENTION).to(getattr(torch, arguments.dtype))
    times: dict[str, list[float]] = {"kv": [], "tokens": []}
    computed: dict[str, set[int]] = {"kv": set(), "tokens": set()}
    with tempfile.TemporaryDirectory() as name:
        made = Path(name) / "made"
        asyncio.run(fill(model, made, arguments.history))
        for number in range(arguments.rounds + 1):
            for restored, found in times.items():
                copy = Path(name) / f"{number}-{restored}"
                shutil.copytree(made, copy)
                if restored == "tokens":
                    shutil.rmtree(copy / "kv")
                seconds, num_computed = asyncio.run(restart(model, copy, restored=restored))
                if number:  # the first warms up
                    found.append(seconds)
                    computed[restored].add(num_computed)
    medians = {restored: statistics.median(found) for restored, found in times.items()}
    for restored, what in (("kv", "from the checkpoint"), ("tokens", "computed again")):
        tokens = "/".join(f"{count:,}" for count in sorted(computed[restored]))
        print(f"{what:>20}: {medians[restored] * 1e3:9.1f} ms to the first token, {tokens} tokens computed")
    print(f"the checkpoint is {medians['tokens'] / medians['kv']:.1f} times as fast")


if __name__ == "__main__":
    main()
