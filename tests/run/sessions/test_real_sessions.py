"""L12 with real models: what a bounded session says is what a forward pass over its whole history says."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="real models need kvarts[torch]")
pytest.importorskip("transformers", reason="real models need kvarts[torch]")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvarts
from kvarts.base.errors import ConfigError
from kvarts.core.config import EngineConfig
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import SessionInfo, SessionsConfig, SessionSettings, Token
from kvarts.run.torch.llm import LLM

from builders.guessing import untimed
from builders.real_models import audit_beside
from builders.real_sessions import VOCABULARY, Models, assert_says_as_whole_passes, ids
from builders.sessions import OWNER, greedy, say, sessions_on
from oracles.late_rotation import late_greedy
from oracles.masked_forward import masked_greedy


def open_on(
    model: Any, *, page_size: int, chunk: int = 16, budget: int = 64, attention: str = "auto", **settings: Any
) -> tuple[LLM, Sessions]:
    config = EngineConfig(
        num_pages=2400 // page_size, page_size=page_size, max_num_batched_tokens=budget, max_num_seqs=8
    )
    # In whole pages, whose bounds are told below; for KV groups see test_real_group_sessions.
    audit = audit_beside(settings.get("speculative_config"))
    llm = LLM(model, None, config, audit=audit, attention=attention, **{"kv_groups": "off", **settings})
    return llm, sessions_on(llm.host(), SessionsConfig(chunk_tokens=chunk))


@pytest.mark.laws
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma3"])
@settings(max_examples=4)
@given(
    seed=st.integers(0, 1000),
    page_size=st.sampled_from([1, 4, 16]),
    sink=st.integers(0, 6),
    window=st.integers(1, 12),
    chunk=st.sampled_from([1, 7, 16, 64]),
    attention=st.sampled_from(["sdpa", "numba"]),
)
def test_a_session_says_what_a_pass_over_its_whole_history_says(
    models: Models, family: str, seed: int, page_size: int, sink: int, window: int, chunk: int, attention: str
) -> None:
    """Appends, turns, forks, rollbacks and cancels in any order; nothing that pages hold is ever wrong."""
    model, reference = models(family)
    llm, sessions = open_on(model, page_size=page_size, chunk=chunk, attention=attention)

    def check(info: SessionInfo) -> None:
        assert info.num_retained == min(info.history_length, sink + window)
        assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        bound = -(-sink // page_size) + -(-window // page_size) + 1
        assert info.kv_allocated_bytes <= bound * page_size * llm.host().token_bytes == info.kv_bound_bytes

    assert_says_as_whole_passes(
        llm, sessions, reference, check, seed=seed, sink=sink, window=window, num_turns=4, most_new=29,
        most_to_roll_back=18,
    )  # fmt: skip


def test_a_history_of_fifty_windows(models: Models) -> None:
    model, reference = models("qwen3")
    llm, sessions = open_on(model, page_size=4)

    async def talk() -> None:
        session = await sessions.create(OWNER, SessionSettings(sink=4, window=12))
        history = ids(Random(5), 600)
        await sessions.append(OWNER, session, history)
        assert await say(sessions, session, [], 8) == masked_greedy(reference, history, 8, sink=4, window=12)
        await sessions.shut_down()

    asyncio.run(talk())
    llm.check()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_positions_in_the_cache_are_those_of_what_is_retained(models: Models, family: str) -> None:
    """Keys that were stored before rotation, against attention that rotates every pair by itself."""
    model, reference = models(family)
    llm, sessions = open_on(model, page_size=4)

    async def talk() -> None:
        chosen = SessionSettings(sink=3, window=9, positions="cache")
        session = await sessions.create(OWNER, chosen)
        random, history = Random(3), []
        for count in (5, 11, 12):
            new = ids(random, count)
            said = await say(sessions, session, new, 3)
            history += new
            assert said == late_greedy(reference, history, 3, sink=3, window=9)
            history += said
        # While nothing was dropped, both ways are the same.
        other = await sessions.create(OWNER, chosen)
        assert await say(sessions, other, history[:8], 4) == masked_greedy(
            reference, history[:8], 4, sink=99, window=99
        )
        await sessions.shut_down()

    asyncio.run(talk())
    llm.check()


def test_sessions_side_by_side_say_what_each_says_alone(models: Models) -> None:
    """64 of them, in any order, beside prompts of others."""
    model, reference = models("llama")
    llm, sessions = open_on(model, page_size=4)
    random = Random(9)
    histories: dict[str, list[int]] = {}

    async def turn(session: str, seed: int) -> None:
        own = Random(seed)
        for _ in range(2):
            await asyncio.sleep(own.random() / 50)
            new = ids(own, own.randrange(1, 16))
            said = await say(sessions, session, new, 3)
            histories[session] += new
            if seed % 4 == 0:  # every one of them would take long
                assert said == masked_greedy(reference, histories[session], 3, sink=2, window=8)
            histories[session] += said

    async def talk() -> None:
        made = [await sessions.create(OWNER, SessionSettings(sink=2, window=8)) for _ in range(64)]
        histories.update((session, []) for session in made)
        random.shuffle(made)
        stream = llm.stream(ids(random, 30), greedy(20))
        texts = asyncio.ensure_future(_drain(stream))
        await asyncio.gather(*(turn(session, seed) for seed, session in enumerate(made)))
        await texts
        await sessions.shut_down()

    asyncio.run(talk())
    llm.check()


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


def test_pages_that_are_mixed_up_are_noticed(models: Models) -> None:
    """The checks bite: two pages change places, and both the count of violations and the tokens tell."""
    model, reference = models("llama")
    llm, sessions = open_on(model, page_size=4)

    async def talk() -> None:
        session = await sessions.create(OWNER, SessionSettings(sink=4, window=12))
        history = ids(Random(1), 40)
        await sessions.append(OWNER, session, history)

        def mix(_: object) -> None:
            pages = sessions._table.get(OWNER, session).pages
            assert pages is not None
            ids = pages.tables[0]._page_ids
            ids[1], ids[2] = ids[2], ids[1]

        llm.host().loop.call(mix)
        said = await say(sessions, session, [], 6)
        assert said != masked_greedy(reference, history, 6, sink=4, window=12)
        assert (await sessions.info(OWNER, session)).inv1_violations > 0
        await sessions.close(OWNER, session)
        assert sessions._table.tombstones.inv1_violations > 0
        await sessions.shut_down()

    asyncio.run(talk())


def test_bytes_of_the_shape_of_qwen3_06b() -> None:
    """28 layers of 8 KV heads of 128 in bfloat16: 114,688 bytes a token, and 68 tokens when full."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from kvarts.run.torch.attention import ATTENTION

    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
    )
    shape._attn_implementation = ATTENTION
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(shape).to(torch.bfloat16).eval()
    config = EngineConfig(num_pages=64, page_size=16, max_num_batched_tokens=256, max_num_seqs=4)
    llm = LLM(model, None, config)
    sessions = sessions_on(llm.host(), SessionsConfig(chunk_tokens=128))

    async def talk() -> None:
        session = await sessions.create(OWNER)
        for length in (10, 68, 69, 200):
            info = await sessions.info(OWNER, session)
            await sessions.append(OWNER, session, ids(Random(1), length - info.history_length))
            info = await sessions.info(OWNER, session)
            assert info.kv_live_bytes == min(length, 68) * 114_688
        stream = sessions.generate(OWNER, session, greedy(20))
        async for update in stream:
            if isinstance(update, Token):
                info = await sessions.info(OWNER, session)
                assert info.kv_live_bytes == 7_798_784
                break
        await stream.aclose()
        info = await sessions.info(OWNER, session)
        assert info.kv_live_bytes == 7_798_784
        assert info.kv_bound_bytes == 6 * 16 * 114_688
        assert info.kv_allocated_bytes <= info.kv_bound_bytes
        await sessions.shut_down()

    asyncio.run(talk())
    assert llm.kv_bytes() == 64 * 16 * 114_688


def test_a_model_without_a_rotation_keeps_global_positions() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from kvarts.run.torch.attention import ATTENTION

    shape = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    shape._attn_implementation = ATTENTION
    _, sessions = open_on(GPT2LMHeadModel(shape).eval(), page_size=4)

    async def talk() -> None:
        with pytest.raises(ConfigError, match="positions"):
            await sessions.create(OWNER, SessionSettings(positions="cache"))
        await sessions.shut_down()

    asyncio.run(talk())


def test_an_unbounded_session_comes_back_from_host_memory(models: Models) -> None:
    """Others have evicted its pages; its next turn loads them, computes what is new, and says the same."""
    model, reference = models("qwen3")
    host_memory = getattr(kvarts, "OffloadConfig")(host_pages=200)  # noqa: B009  # the room may be missing
    config = EngineConfig(num_pages=40, page_size=4, max_num_batched_tokens=64, max_num_seqs=4)
    history = [token % 250 for token in range(1, 97)]
    expected = masked_greedy(reference, history, 8, sink=0, window=1000)

    async def talk(retention: Any) -> int:
        llm = LLM(model, None, config, offload=host_memory, audit=True)
        sessions = sessions_on(llm.host())
        session = await sessions.create(OWNER, SessionSettings(window=None, retention=retention))
        assert await say(sessions, session, history, 4) == expected[:4]
        for start in (300, 600, 900):  # more than the device has room for
            other = await sessions.create(OWNER, SessionSettings(window=None))
            await say(sessions, other, [(start + index) * 7 % 250 for index in range(120)], 2)
            await sessions.close(OWNER, other)
        before = (await sessions.info(OWNER, session)).num_computed_tokens
        assert await say(sessions, session, [], 4) == expected[4:]
        computed = (await sessions.info(OWNER, session)).num_computed_tokens - before
        await sessions.shut_down()
        return computed

    # 100 tokens, of which the last page in part was not stored: 24 full pages are loaded.
    assert asyncio.run(talk("host")) <= 4 + 4


def test_guesses_change_nothing_in_sessions(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unbounded one is served with them; a bounded one without, since what it drops cannot be taken back."""
    untimed(monkeypatch)
    model, _ = models("gemma3")
    said: list[list[int]] = []
    last = {"prompt_lookup_min": 1}
    first = {"prompt_lookup_min": 1, "num_speculative_tokens": 3, "draft_order": "first"}
    for window, speculative_config, keeps in (
        (None, None, "off"), (None, last, "off"), (9, last, "off"), (None, first, "off"), (None, first, "all"),
    ):  # fmt: skip
        llm, sessions = open_on(model, page_size=4, speculative_config=speculative_config, kv_groups=keeps)

        async def talk(sessions: Sessions = sessions, window: int | None = window) -> list[int]:
            session = await sessions.create(OWNER, SessionSettings(sink=3, window=window))
            told: list[int] = []
            for _ in range(3):
                told += await say(sessions, session, [7, 8, 9] * 5, 25)
            info = await sessions.info(OWNER, session)
            assert info.history_length == 3 * (15 + 25)
            await sessions.shut_down()
            return told

        said.append(asyncio.run(talk()))
        llm.check()
        if speculative_config is not None:
            assert llm.drafts is not None
            assert (llm.drafts.num_accepted_tokens > 0) is (window is None)
    assert said[1] == said[3] == said[4] == said[0]
