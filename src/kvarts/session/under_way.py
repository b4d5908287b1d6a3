"""What is under way in a session, and how to wait for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvarts.llm.llm_engine import LLMEngine

__all__ = ["UnderWay", "settled"]


class UnderWay(NamedTuple):
    """An append or a generation: what ends it, in the thread of the engine, and what is done when it has ended."""

    cancel: Callable[[LLMEngine], None]
    over: asyncio.Future[None]


async def settled(over: asyncio.Future[None]) -> None:
    """Wait for `over`, also while this task is cancelled; that is raised then."""
    cancelled = None
    while not over.done():
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
