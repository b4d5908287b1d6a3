"""The current operation of a session, and waiting for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvarts.llm.llm_engine import LLMEngine

__all__ = ["UnderWay", "settled"]


class UnderWay(NamedTuple):
    """An append or a generation. `cancel` ends it, in the engine's thread; `over` completes when it has ended."""

    cancel: Callable[[LLMEngine], None]
    over: asyncio.Future[None]


async def settled(over: asyncio.Future[None]) -> None:
    """Wait for `over`, even if this task is cancelled meanwhile; the cancellation is raised afterwards."""
    cancelled = None
    while not over.done():
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
