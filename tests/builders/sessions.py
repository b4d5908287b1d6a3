"""Sessions on mocks and on real models, and what one of them says turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.clock import Clock, VirtualClock
from kvarts.config import EngineConfig
from kvarts.llm.host import ModelHost
from kvarts.sampling import SamplingParams
from kvarts.session.config import SessionsConfig
from kvarts.session.opening import mock_host
from kvarts.session.sessions import Sessions
from kvarts.session.table import SessionTable
from kvarts.session.values import Done, SessionSettings, Token

from builders.rooms import HAS_AUDIT

__all__ = ["OWNER", "greedy", "mock_sessions", "say", "sessions_on"]

OWNER = "somebody"


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def mock_sessions(
    config: SessionsConfig | None = None,
    *,
    num_pages: int = 300,
    page_size: int = 4,
    budget: int = 64,
    seqs: int = 8,
    clock: Clock | None = None,
    max_positions: int | None = None,
) -> tuple[Sessions, ModelHost]:
    engine = EngineConfig(num_pages=num_pages, page_size=page_size, max_num_batched_tokens=budget, max_num_seqs=seqs)
    host = mock_host(
        engine, clock=VirtualClock() if clock is None else clock, audit=HAS_AUDIT, max_positions=max_positions
    )
    return sessions_on(host, config), host


def sessions_on(host: ModelHost, config: SessionsConfig | None = None) -> Sessions:
    if config is None:
        config = SessionsConfig(defaults=SessionSettings(sink=3, window=10), chunk_tokens=16)
    return Sessions(SessionTable(host, config))


async def say(sessions: Sessions, session_id: str, tokens: Sequence[int], num_tokens: int) -> list[int]:
    """Append, if there is something, and return what is generated then."""
    if tokens:
        await sessions.append(OWNER, session_id, tokens)
    said = []
    async for update in sessions.generate(OWNER, session_id, greedy(num_tokens)):
        if isinstance(update, Token):
            said.append(update.token_id)
        elif isinstance(update, Done):
            assert update.num_tokens == len(said)
    return said
