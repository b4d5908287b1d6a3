"""Many tokens at one moment: what is done before it, what is written in one pass, and how late that was."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
import uvloop

from kvarts.base.clock import PutOffClock, VirtualClock
from kvarts.doors.openai.answer import Answer
from kvarts.doors.openai.running import RunningServer
from kvarts.run import llm_engine as outboxes
from kvarts.run.llm_engine import Outbox
from kvarts.run.wrappers import WaitingExecutor

from builders.http_client import call, events_of

Start = Callable[..., RunningServer]


def test_what_is_put_off_is_waited_for_when_all_is_done() -> None:
    clock = VirtualClock(100)
    put_off = PutOffClock(clock)
    seen: list[tuple[str, int]] = []

    class Inner:
        needs_page_ids = True

        def execute(self, plan: Any) -> Any:
            put_off.wait_until_ns(250)
            put_off.wait_until_ns(200)
            seen.append(("text", clock.now_ns()))
            if plan == "bad":
                raise RuntimeError
            return put_off.now_ns()

    executor = WaitingExecutor(Inner(), put_off)
    plan: Any = "good"
    assert executor.needs_page_ids and executor.execute(plan) == 250
    assert seen == [("text", 100)] and clock.now_ns() == put_off.now_ns() == 250
    put_off.wait()
    assert clock.now_ns() == 250
    bad: Any = "bad"
    with pytest.raises(RuntimeError):
        executor.execute(bad)
    assert put_off.now_ns() == clock.now_ns()


class FakeLoop:
    """An event loop that does what is put into it when it is told to."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> object:
        self.later.append((delay_s, callback))
        return object()

    def run(self) -> None:
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()


def test_with_too_much_to_write_more_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"wall": 10.0, "cpu": 1.0}
    monkeypatch.setattr(outboxes, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(outboxes, "thread_time", lambda: now["cpu"])
    loop, outbox = FakeLoop(), Outbox()
    outbox.open(loop)  # type: ignore[arg-type]
    written: list[int] = []

    class Slow(Answer):
        def wake(self) -> None:
            written.append(len(self.pieces))
            self.pieces.clear()
            now["wall"] += 0.010  # of which others had the half
            now["cpu"] += 0.005

    one: Any = Slow(outbox)
    outbox.due_s = lambda: now["wall"] - 0.001
    late_s: list[float] = []
    outbox.on_late = late_s.extend

    def step(number: int) -> None:
        outbox.hold()
        one.put(number)
        outbox.release()

    step(1)
    loop.run()
    assert written == [1]
    for number in (2, 3, 4):
        step(number)
        loop.run()
    assert written == [1]
    ((delay_s, again),) = loop.later
    assert delay_s == pytest.approx(0.005)
    now["wall"] += delay_s
    again()
    assert written == [1, 3]
    now["wall"] += 0.020
    step(5)
    loop.run()
    assert written == [1, 3, 1]
    # Of what was put off, the first step counts: 1 ms before it was told, 5 ms that it waited, and 10 ms to write.
    assert sum(late_s) == pytest.approx(0.011 + 0.016 + 0.011)


class SlowToWake:
    """What a coroutine waits for, which takes 0.2 ms to wake."""

    def __init__(self) -> None:
        self.is_marked = False
        self.is_awake = threading.Event()

    def wake(self) -> None:
        """Wake it."""
        begin_s = thread_time()
        while thread_time() - begin_s < 0.0002:
            pass
        self.is_awake.set()


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
def test_what_is_put_off_is_woken_though_timers_come_early(runs: Callable[..., None]) -> None:
    # uvloop rounds to whole milliseconds: half of one is none at all.
    outbox = Outbox()
    num_lost = 0

    def steps() -> None:
        nonlocal num_lost
        for _ in range(200):
            waits = SlowToWake()
            outbox.hold()
            outbox.mark(waits)
            outbox.release()
            num_lost += not waits.is_awake.wait(10.0)
            if num_lost:
                return

    async def serve() -> None:
        outbox.open(asyncio.get_running_loop())
        await asyncio.to_thread(steps)

    runs(serve())
    assert num_lost == 0


def test_streams_are_written_whole_while_one_client_does_not_read(start: Start) -> None:
    server = start(cost="linear:step_ms=1", pages=4096)
    server.excuse("unread stream")

    async def read(body: dict[str, Any]) -> bytes:
        return (await asyncio.to_thread(call, server.url, "/v1/completions", body)).payload

    async def all_of_them() -> list[bytes]:
        bodies = [{"prompt": f"number {k}", "max_tokens": 60, "stream": True, "n": 2} for k in range(12)]
        return await asyncio.gather(*map(read, bodies))

    async def run() -> list[bytes]:
        host, _, port = server.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=64)
        body = b'{"prompt": "x", "max_tokens": 50000, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        payloads = await all_of_them()
        writer.close()
        return payloads

    for number, payload in enumerate(asyncio.run(run())):
        texts = ["", ""]
        for event in events_of(payload):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        whole = call(server.url, "/v1/completions", {"prompt": f"number {number}", "max_tokens": 60, "n": 2})
        assert texts == [choice["text"] for choice in whole.json["choices"]]
    told = call(server.url, "/metrics").payload.decode()
    found = re.search(r"^kvarts:mock_write_late_seconds_count\{.*\} (\S+)$", told, re.MULTILINE)
    assert found is not None and float(found[1]) >= 60
