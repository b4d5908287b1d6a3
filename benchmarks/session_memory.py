"""What an idle session costs beside its KV: bytes of Python for each, and how long sessions take to come and go.

    python benchmarks/session_memory.py --sessions 10000 --tokens 64

On a mock in virtual time, so nothing is waited for. Bytes are what tracemalloc counts between an empty runtime and one
with idle sessions, each with an appended history and one turn; a history is 8 bytes a token of that. Rates are those
of one caller that waits for each answer, and of all generating sessions together.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc

from kvarts.base.clock import VirtualClock
from kvarts.core.config import EngineConfig
from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.opening import mock_host
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.table import SessionTable
from kvarts.run.sessions.values import SessionsConfig

OWNER = "somebody"


def open_mock(num_sessions: int) -> Sessions:
    """Return a runtime with room for so many sessions of the default settings."""
    config = EngineConfig(
        num_pages=6 * num_sessions + 1024, page_size=16, max_num_batched_tokens=2048, max_num_seqs=256
    )
    return Sessions(SessionTable(mock_host(config, clock=VirtualClock()), SessionsConfig()))


async def say(sessions: Sessions, session: str, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    async for _ in sessions.generate(OWNER, session, params):
        pass


async def make(sessions: Sessions, num_sessions: int, num_tokens: int) -> list[str]:
    """Return idle sessions with histories of `num_tokens` tokens."""
    made = [await sessions.create(OWNER) for _ in range(num_sessions)]
    for first in range(0, num_sessions, 256):
        some = made[first : first + 256]
        await asyncio.gather(*(sessions.append(OWNER, session, range(1, num_tokens)) for session in some))
        await asyncio.gather(*(say(sessions, session, 1) for session in some))
    return made


async def measure_bytes(num_sessions: int, num_tokens: int) -> float:
    """Return the bytes of an idle session, its history included."""
    sessions = open_mock(num_sessions)
    warm = await make(sessions, 1, num_tokens)
    await sessions.close(OWNER, warm[0])
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    made = await make(sessions, num_sessions, num_tokens)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    for session in made:
        await sessions.close(OWNER, session)
    await sessions.shut_down()
    return taken / num_sessions


async def measure_rates(num_sessions: int, num_tokens: int) -> dict[str, float]:
    """Return calls and tokens a second."""
    sessions = open_mock(num_sessions)
    start = time.perf_counter()
    made = [await sessions.create(OWNER) for _ in range(num_sessions)]
    created = time.perf_counter()
    for session in made[:2000]:
        await sessions.info(OWNER, session)
    asked = time.perf_counter()
    some = made[:256]
    await asyncio.gather(*(sessions.append(OWNER, session, range(1, num_tokens)) for session in some))
    appended = time.perf_counter()
    await asyncio.gather(*(say(sessions, session, 100) for session in some))
    said = time.perf_counter()
    for session in made:
        await sessions.close(OWNER, session)
    closed = time.perf_counter()
    await sessions.shut_down()
    return {
        "creates_per_s": num_sessions / (created - start),
        "infos_per_s": min(2000, num_sessions) / (asked - created),
        "tokens_per_s": len(some) * 100 / (said - appended),
        "closes_per_s": num_sessions / (closed - said),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=64, help="of each history")
    args = parser.parse_args()
    rates = asyncio.run(measure_rates(args.sessions, args.tokens))
    taken = asyncio.run(measure_bytes(args.sessions, args.tokens))
    found = {
        "sessions": args.sessions,
        "tokens": args.tokens,
        **{name: round(rate) for name, rate in rates.items()},
        "bytes_per_session": round(taken),
        "bytes_beside_history": round(taken - 8 * args.tokens),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
