"""Tampering with an engine, so that an audit has something to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from kvarts.core.content import Content
from kvarts.core.events import Event
from kvarts.core.request import Request
from kvarts.proof.audit.auditor import AuditError, Finding
from kvarts.sim.replica import Replica

PAGE_SIZE = 4
Plant = Callable[[Replica], None]


def request(index: int, tokens: list[int], num_output: int) -> Request:
    content = Content.from_tokens(tokens, page_size=PAGE_SIZE, owner=index)
    return Request(index, content, num_prompt_tokens=len(tokens), max_tokens=num_output)


SHARED = list(range(12))


def findings_of(
    engine: Replica, plant: Plant | None, requests: Iterable[Request], *, most_steps: int | None = None
) -> list[Finding]:
    """What the audit of an engine with a fault says. A request comes when those before it have ended, or `most_steps`
    after the last one."""
    if plant is not None:
        plant(engine)
    now_ns = 0

    def step() -> None:
        nonlocal now_ns
        engine.start(now_ns, now_ns + 1)
        now_ns = engine.now_ns
        engine.finish()

    try:
        for each in requests:
            engine.submit(each, now_ns)
            num_steps = 0
            while engine.has_work and num_steps != most_steps:
                step()
                num_steps += 1
        while engine.has_work:
            step()
    except AuditError as error:
        return list(error.findings)
    return []


def wrap(target: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(target, name)
    try:
        setattr(target, name, lambda *args: wrapper(original, *args))
    except (AttributeError, TypeError):
        pytest.skip(f"{name} is compiled, and cannot be replaced")


def hear(replica: Replica, change: Callable[[Sequence[Event]], list[Event]]) -> None:
    """Lets the auditor hear something else than what happened."""
    reader = replica.engine.log._readers[-1]
    wrap(reader, "observe", lambda original, events: original(change(events)))


def tamper(replica: Replica, change: Callable[[Event], Event | None]) -> None:
    """As `hear`, event by event."""
    hear(replica, lambda events: [changed for event in events if (changed := change(event)) is not None])
