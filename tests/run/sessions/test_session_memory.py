"""What is kept of an idle session beside its KV."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest

from kvarts.run.sessions.values import SessionsConfig

from builders.sessions import OWNER, mock_sessions, run_to_rest, say


@pytest.mark.parametrize(("num_sessions", "num_tokens"), [pytest.param(500, 40, marks=pytest.mark.slow), (40, 4000)])
def test_an_idle_session_takes_four_kib_and_eight_bytes_a_token(num_sessions: int, num_tokens: int) -> None:
    sessions, host = mock_sessions(
        SessionsConfig(), num_pages=7 * num_sessions + 100, page_size=16, budget=2048, seqs=256, audit=False
    )

    async def make(count: int) -> list[str]:
        made = [await sessions.create(OWNER) for _ in range(count)]
        await asyncio.gather(*(sessions.append(OWNER, session, range(num_tokens - 2)) for session in made))
        await asyncio.gather(*(say(sessions, session, [], 2) for session in made))
        return made

    async def talk() -> None:
        for session in await make(num_sessions):  # so the growth of the runtime itself is over
            await sessions.close(OWNER, session)
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            made = await make(num_sessions)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert taken / num_sessions < 4096 + 8 * num_tokens
        for session in made:
            assert await sessions.close(OWNER, session) == num_tokens
        await sessions.shut_down()

    run_to_rest(talk(), host)
