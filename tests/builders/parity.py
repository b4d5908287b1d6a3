"""What happened in an engine, in values that can be compared with what happened in another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvarts.core.content import Content
from kvarts.core.engine import Engine
from kvarts.core.events import Arrived, Event, Finished
from kvarts.core.sampling import SamplingParams
from kvarts.doors.openai.opening import Opened, OwnReaders
from kvarts.doors.openai.served import Ask
from kvarts.run.engine_loop import EngineLoop
from kvarts.run.llm_engine import LLMEngine
from kvarts.sim.config import ReplayConfig

from builders.fields import fields_of

__all__ = ["Heard", "HeardBy", "Sent", "come_to_rest", "run_live", "shifted"]


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


def run_live(opened: Opened, sent: Sequence[tuple[str | None, Sent]]) -> None:
    """Send requests to mocks on the wall clock, each to the model with this name, until nothing is under way."""

    async def one(number: int, name: str | None, request: Sent) -> None:
        await asyncio.sleep(request.delay_ms / 1000)
        served, ends = opened.models.of(name), tuple(range(request.num_stops))
        ask = Ask(
            tokens=request.prompt,
            params=SamplingParams(max_tokens=request.num_tokens, temperature=1.0, stop_token_ids=ends),
            priority=request.priority,
            salt=request.salt,
            request_id=str(number),
        )
        answer, choices = served.start([ask])
        try:
            while not choices[0].is_over or answer.pieces:
                await answer.take()
        except Exception as error:
            assert "can never" in str(error) or "needs" in str(error)  # noqa: PT017  # refused: the replay refuses too
        finally:
            served.finish(choices)

    async def all_of_them() -> None:
        opened.models.open()
        await asyncio.gather(*(one(number, *each) for number, each in enumerate(sent)))

    asyncio.run(all_of_them())

    come_to_rest(opened.served.host.loop, [served.host.core for served in opened.models])


def come_to_rest(loop: EngineLoop, cores: Iterable[Engine]) -> None:
    """Let the stores under way end, as a replay does, and check the books of the engines of `loop`."""

    def rest(engine: LLMEngine) -> None:
        while engine.has_work:
            engine.step()
        for core in cores:
            core.emit()
            core.scheduler.check()

    loop.call(rest)
