"""Sessions that keep pages by attention: what they keep and say is what whole passes over their history give."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.run.sessions.values import SessionNotReadyError, SessionsConfig, SessionSettings
from kvarts.run.torch.llm import LLM

from builders.real_sessions import Models, ids
from builders.sessions import OWNER, mock_sessions, say, sessions_on
from oracles.naive_heavy import naive_heavy


def open_on(model: Any, page_size: int, chunk: int, **settings: Any) -> tuple[LLM, Any]:
    config = EngineConfig(num_pages=2000 // page_size, page_size=page_size, max_num_batched_tokens=64, max_num_seqs=4)
    llm = LLM(model, None, config, audit=True, **settings)
    return llm, sessions_on(llm.host(), SessionsConfig(chunk_tokens=chunk))


def turns_on(
    sessions: Any, reference: Any, random: Random, shape: dict[str, Any], page_size: int, keep: Any
) -> Callable[[str, list[int], int, int], Awaitable[None]]:
    """Turns of sessions that keep pages by attention: new tokens, an answer, and a look at what is held."""

    async def turn(session: str, history: list[int], count: int, num_said: int) -> None:
        history += ids(random, count)
        said = await say(sessions, session, history[-count:], num_said)
        history += said
        reference.set_attn_implementation("eager")
        pages, likeliest = naive_heavy(reference, history, **shape, page_size=page_size, keep=keep)
        assert said == likeliest[len(history) - num_said - 1 : -1]
        assert sessions._table.get(OWNER, session).pages.tables[0].page_numbers().tolist() == pages

    return turn


@pytest.mark.parametrize("keep", ["h2o", "snapkv"])
@pytest.mark.parametrize(("page_size", "chunk", "attention"), [(4, 16, "sdpa"), (16, 100, "numba"), (5, 7, "numba")])
def test_a_session_keeps_and_says_what_whole_passes_give(
    models: Models, keep: Any, page_size: int, chunk: int, attention: str
) -> None:
    """Whatever the appends, next to a session that does other things; a fork and its origin go separate ways."""
    model, reference = models("qwen3")
    llm, sessions = open_on(model, page_size, chunk, attention=attention)
    shape: dict[str, Any] = {"sink": 3, "window": 20, "heavy": 24}
    turn = turns_on(sessions, reference, Random(page_size), shape, page_size, keep)

    async def talk() -> None:
        settings = SessionSettings(keep=keep, **shape)
        session = await sessions.create(OWNER, settings)
        other = await sessions.create(OWNER, SessionSettings(sink=2, window=9))
        history: list[int] = []
        for count, num_said in ((30, 5), (29, 1), (120, 70), (1, 3)):
            await asyncio.gather(
                turn(session, history, count, num_said), say(sessions, other, ids(Random(count), 20), 10)
            )
        fork = await sessions.fork(OWNER, session)
        forked = list(history)
        await turn(fork, forked, 90, 3)
        await turn(session, history, 75, 9)
        info = await sessions.info(OWNER, session)
        assert info.inv1_violations == info.inv2_violations == 0
        assert info.num_dropped == info.history_length - info.num_retained > 100
        assert info.kv_allocated_bytes <= info.kv_bound_bytes
        assert info.kv_peak_bytes <= info.kv_bound_bytes + chunk * llm.host().token_bytes + 2 * page_size * 1024
        for one in (session, fork, other):
            await sessions.close(OWNER, one)
        await sessions.shut_down()

    asyncio.run(talk())
    llm.check()
    assert llm.kv_live_bytes() == 0


@pytest.mark.laws
@pytest.mark.slow
@pytest.mark.parametrize(("family", "keep"), [("qwen3_5_text", "snapkv"), ("jamba", "h2o")])
def test_a_session_of_a_model_with_states_keeps_and_says_what_whole_passes_give(family: str, keep: Any) -> None:
    """Attention sees the pages that are held, the states go on. After a rollback, all is computed again."""
    from builders.stateful_models import stateful_pairs

    model, reference = stateful_pairs()(family)
    llm, sessions = open_on(model, 4, 16, kv_groups="all")
    shape: dict[str, Any] = {"sink": 3, "window": 20, "heavy": 24}
    turn = turns_on(sessions, reference, Random(3), shape, 4, keep)

    async def talk() -> None:
        session = await sessions.create(OWNER, SessionSettings(keep=keep, **shape))
        history: list[int] = []
        for count, num_said in ((30, 5), (120, 3), (1, 3)):
            await turn(session, history, count, num_said)
        fork = await sessions.fork(OWNER, session)
        await turn(fork, list(history), 70, 3)
        await sessions.rollback(OWNER, session, 100)
        del history[100:]
        await turn(session, history, 60, 3)
        info = await sessions.info(OWNER, session)
        assert info.inv1_violations == info.inv2_violations == 0
        assert info.kv_allocated_bytes <= info.kv_bound_bytes
        for one in (session, fork):
            await sessions.close(OWNER, one)
        await sessions.shut_down()

    asyncio.run(talk())
    llm.check()
    assert llm.kv_live_bytes() == 0


def test_a_rollback_goes_back_to_the_last_decision_and_no_further(models: Models) -> None:
    model, _ = models("qwen3")
    _, sessions = open_on(model, 4, 16)

    async def talk() -> list[list[int]]:
        told = []
        for goes_back in (False, True):
            session = await sessions.create(OWNER, SessionSettings(sink=3, window=20, keep="h2o", heavy=8))
            history = ids(Random(1), 200)
            await sessions.append(OWNER, session, history)
            if goes_back:
                await sessions.append(OWNER, session, ids(Random(2), 30))
                with pytest.raises(SessionNotReadyError, match="8 chosen by h2o"):
                    await sessions.rollback(OWNER, session, 190)
                await sessions.rollback(OWNER, session, 200)
            told.append(await say(sessions, session, [7], 12))
        await sessions.shut_down()
        return told

    plain, rolled_back = asyncio.run(talk())
    assert plain == rolled_back


def test_what_cannot_choose_is_refused(models: Models) -> None:
    for settings, field in (
        ({"keep": "h2o"}, "heavy"),
        ({"heavy": 8}, "heavy"),
        ({"keep": "best", "heavy": 8}, "keep"),
        ({"keep": "h2o", "heavy": 8, "window": None}, "keep"),
        ({"keep": "snapkv", "heavy": 8, "positions": "cache"}, "keep"),
    ):
        with pytest.raises(ConfigError) as refused:
            SessionSettings(**settings)
        assert refused.value.field == field
    asked = SessionSettings(keep="h2o", heavy=8)
    mock, _ = mock_sessions()
    _, windowed = open_on(models("mistral")[0], 4, 16)

    async def ask(sessions: Any) -> None:
        with pytest.raises(ConfigError, match="needs a real model in which all layers attend to all tokens"):
            await sessions.create(OWNER, asked)
        await sessions.shut_down()

    asyncio.run(ask(mock))
    asyncio.run(ask(windowed))
