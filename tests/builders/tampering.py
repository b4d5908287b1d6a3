"""Tampering with an engine, so that an audit has something to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvarts.content import Content
from kvarts.events import Event
from kvarts.request import Request

PAGE_SIZE = 4


def request(index: int, tokens: list[int], num_output: int) -> Request:
    content = Content.from_tokens(tokens, page_size=PAGE_SIZE, owner=index)
    return Request(index, content, num_prompt_tokens=len(tokens), num_output_tokens=num_output)


SHARED = list(range(12))


def wrap(target: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(target, name)
    setattr(target, name, lambda *args: wrapper(original, *args))


class Tampering(list[Event]):
    """The engine's list of events, with a hand in it."""

    def __init__(self, change: Callable[[Event], Event | None]) -> None:
        super().__init__()
        self.change = change

    def append(self, event: Event) -> None:
        changed = self.change(event)
        if changed is not None:
            super().append(changed)
