"""Sessions on small real models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import SessionInfo, SessionSettings
from kvarts.run.torch.llm import LLM

from builders.sessions import talk_at_random
from oracles.masked_forward import masked_greedy

__all__ = ["VOCABULARY", "Models", "assert_says_as_whole_passes", "ids"]

Models = Callable[[str], tuple[Any, Any]]
VOCABULARY = 257


def ids(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def assert_says_as_whole_passes(
    llm: LLM,
    sessions: Sessions,
    reference: Any,
    check: Callable[[SessionInfo], object],
    *,
    seed: int,
    sink: int,
    window: int,
    num_turns: int = 3,
    most_new: int = 25,
    most_to_roll_back: int = 7,
) -> None:
    """A session in which anything happens says what a pass over its whole history says; then nothing is kept of it."""
    random = Random(seed)

    def expected(history: list[int], count: int) -> list[int]:
        return masked_greedy(reference, history, count, sink=sink, window=window)

    asyncio.run(
        talk_at_random(
            sessions, SessionSettings(sink=sink, window=window), partial(ids, random), random, expected, check,
            num_turns=num_turns, most_new=most_new, most_to_roll_back=min(sink + window, most_to_roll_back),
        )
    )  # fmt: skip
    llm.check()
    assert llm.kv_live_bytes() == 0
