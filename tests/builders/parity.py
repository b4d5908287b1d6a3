"""What happened in an engine, in values that can be compared with what happened in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvarts.core.content import Content
from kvarts.core.events import Arrived, Event, Finished
from kvarts.doors.openai.opening import OwnReaders
from kvarts.sim.config import ReplayConfig

from builders.fields import fields_of

__all__ = ["Heard", "HeardBy", "Sent", "shifted"]


class Heard:
    """An EventReader that keeps what it hears, in values that can be compared."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.events += [told(event) for event in events]


class HeardBy(OwnReaders):
    """One reader for each model, or for each worker of a fleet, by name or number; those of added workers are new."""

    def __init__(self, readers: Any) -> None:
        self._by_engine = readers

    def of_model(self, name: str, config: ReplayConfig) -> Sequence[Any]:
        return [self._by_engine[name]]

    def of_worker(self, name: str, config: ReplayConfig, worker: int, *, is_added: bool) -> Sequence[Any]:
        return [self._by_engine.setdefault(worker, Heard())]


def told(event: Event) -> Any:
    """An event as a value: contents by what they hold of the pages that the event is about."""
    fields = []
    for name in fields_of(event):
        if name == "max_tokens":
            continue  # a replay asks for as many as there were
        value = getattr(event, name)
        if isinstance(value, Content):
            known = value.num_known_tokens
            if isinstance(event, Arrived):
                known = event.num_prompt_tokens  # a replay knows from the beginning what will be generated
            elif not isinstance(event, Finished):
                last = "start_page" if name == "parent" else "end_page"
                known = min(known, getattr(event, last, 0) * value.page_size)
            value = (value.owner, value.salt, value.tokens(0, known).tolist())
        if name == "runs":
            value = [
                (run.owner, run.salt, run.tokens(0, end * run.page_size).tolist(), start) for run, start, end in value
            ]
        fields.append((name, value))
    return type(event).__name__, tuple(fields)


def shifted(events: list[Any], by_ns: int) -> list[Any]:
    """The same at another time: a replay begins with its first request. A time that is not known stays -1."""
    times = ("start_ns", "end_ns", "time_ns")
    return [
        (
            kind,
            tuple((name, value - by_ns if name in times and value != -1 else value) for name, value in fields),
        )
        for kind, fields in events
    ]


class Sent(msgspec.Struct):
    """A request: after how long it is sent, and what it asks."""

    delay_ms: float
    prompt: list[int]
    num_tokens: int
    priority: int = 0
    salt: str | None = None
    num_stops: int = 0
    """So many of the words end it."""
