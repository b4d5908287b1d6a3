"""Sessions over HTTP: requests that name one go on with it, in the store that gRPC has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvarts.base.tenants import Keys
from kvarts.doors.client import AsyncSessions
from kvarts.doors.grpc.server import Binding, SessionServer
from kvarts.doors.openai.opening import Door
from kvarts.doors.openai.server import Address, OpenAIServer
from kvarts.doors.openai.sessions.door import open_beside, word_mock
from kvarts.run.sessions.opening import open_sessions
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import SessionSettings

from builders.http_client import OpenStream, Reply, call, events_of

CHAT = "/v1/chat/completions"
Ask = Callable[..., Awaitable[Reply]]


class Both:
    """One runtime at both doors."""

    def __init__(self, sessions: Sessions, url: str, address: str, served: Any) -> None:
        self.sessions = sessions
        self.url = url
        self.address = address
        self.served = served

    async def say(self, messages: Any, headers: Any = None, **fields: Any) -> Reply:
        body = {"messages": messages, "max_tokens": 6, **fields}
        return await asyncio.to_thread(call, self.url, CHAT, body, headers=headers)


@asynccontextmanager
async def both(
    *, window: int | None = 32, door: Door | None = None, speedup: float = 50.0, **settings: Any
) -> AsyncIterator[Both]:
    sessions = open_sessions(
        mock=word_mock,
        speedup=speedup,
        kv_memory="256MiB",
        defaults=SessionSettings(sink=2, window=window),
        **settings,
    )
    opened = open_beside(sessions, Door() if door is None else door, model="mock")
    server = OpenAIServer(opened.app, opened.models, Address(port=0))
    over_grpc = SessionServer(sessions, Binding())
    await server.start()
    try:
        yield Both(sessions, server.url, await over_grpc.start(), opened.served)
    finally:
        await server.stop(1.0)
        await over_grpc.stop(0.5)
        host = sessions.host
        host.loop.call(lambda _: host.core.scheduler.check())


def told(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


FIRST = [told("Tell me of the sea, and of the land beside it, and of all the ships that were ever there.")]


def cached(reply: Reply) -> int:
    assert reply.status == 200, reply.payload
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("window", [32, None])
@pytest.mark.parametrize("name", ["field", "x-session-id", "X-Session-Affinity", "X-Dynamo-Session-ID"])
def test_a_conversation_goes_on_where_it_was_and_grpc_sees_it(name: str, window: int | None) -> None:
    async def run() -> None:
        async with both(window=window) as doors:
            of = {"session_id": "mine"} if name == "field" else {}
            headers = None if name == "field" else {name: "mine"}
            messages = list(FIRST)
            length = 0
            for turn in range(3):
                reply = await doors.say(messages, headers, **of)
                # Of what was there, only what is beside a boundary of pages may be computed again.
                assert cached(reply) == length if window else cached(reply) >= length - length % 16
                usage = reply.json["usage"]
                length = usage["total_tokens"]
                messages += [reply.json["choices"][0]["message"], told(f"And then, for the time {turn}?")]
                async with AsyncSessions(doors.address) as grpc_sessions:
                    (info,) = await grpc_sessions.list()
                    assert (info.label, info.history_length) == ("mine", length)
            if window:
                assert info.num_retained <= 2 + window

    asyncio.run(run())


def test_a_session_made_over_grpc_goes_on_over_http_by_its_id() -> None:
    async def run() -> None:
        async with both() as doors:
            session_id = await doors.sessions.create("")
            first = await doors.say(FIRST, session_id=session_id)
            assert cached(first) == 0
            (info,) = await doors.sessions.list("")
            assert info.session_id == session_id and info.history_length == first.json["usage"]["total_tokens"]

    asyncio.run(run())


def test_who_edits_the_past_is_answered_as_without_a_session() -> None:
    async def run() -> None:
        async with both(window=None) as doors:
            one = await doors.say(FIRST, session_id="a")
            messages = [*FIRST, one.json["choices"][0]["message"], told("And then?")]
            await doors.say(messages, session_id="a")
            messages[-1] = told("Something else, please.")
            edited = await doors.say(messages, session_id="a", seed=3)
            fresh = await doors.say(messages, seed=3)
            assert edited.json["choices"][0]["message"] == fresh.json["choices"][0]["message"]
            assert cached(edited) > 0
            assert len(await doors.sessions.list("")) == 1

    asyncio.run(run())


def test_a_past_that_was_dropped_and_is_edited_begins_again() -> None:
    async def run() -> None:
        async with both(window=8) as doors:
            await doors.say([told("word " * 100)], session_id="a")
            again = await doors.say([told("word " * 50)], session_id="a")
            assert cached(again) == 0
            (info,) = await doors.sessions.list("")
            assert info.history_length == again.json["usage"]["total_tokens"]

    asyncio.run(run())


def test_a_stream_in_a_session_has_the_same_text_and_stops_at_a_stop_text() -> None:
    async def run() -> None:
        async with both() as doors:
            whole = await doors.say(FIRST, session_id="a", max_tokens=12)
            text = whole.json["choices"][0]["message"]["content"]
            body = {"messages": FIRST, "max_tokens": 12, "stream": True, "session_id": "b"}
            streamed = await asyncio.to_thread(call, doors.url, CHAT, body)
            deltas = [event["choices"][0]["delta"].get("content", "") for event in events_of(streamed.payload)]
            assert "".join(deltas) == text
            word = text.split()[4]
            stopped = await doors.say(FIRST, session_id="c", max_tokens=12, stop=f" {word}")
            (choice,) = stopped.json["choices"]
            assert choice["finish_reason"] == "stop" and choice["message"]["content"] == text.split(f" {word}")[0]

    asyncio.run(run())


def test_who_goes_ends_the_answer_and_keeps_the_session() -> None:
    async def run() -> None:
        async with both() as doors:
            body = {"messages": FIRST, "max_tokens": 2000, "stream": True, "session_id": "a"}
            with OpenStream(doors.url, CHAT, body):
                while not (await doors.sessions.list("")):
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.05)
            for _ in range(400):
                if doors.served.num_live == 0 and (await doors.sessions.list(""))[0].state == "idle":
                    break
                await asyncio.sleep(0.005)
            (info,) = await doors.sessions.list("")
            assert info.state == "idle" and info.history_length < 2000
            assert cached(await doors.say(FIRST, session_id="a")) >= 0

    asyncio.run(run())


def test_two_requests_of_one_session_come_one_after_the_other() -> None:
    async def run() -> None:
        async with both() as doors:
            replies = await asyncio.gather(*(doors.say(FIRST, session_id="a") for _ in range(6)))
            assert {reply.status for reply in replies} == {200}
            assert len({reply.json["choices"][0]["message"]["content"] for reply in replies}) == 1
            assert len(await doors.sessions.list("")) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"logprobs": True, "top_logprobs": 99}, {"session_id": "x" * 257}, {"session_id": 7}, {"messages": []}],
)
def test_what_a_session_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    async def run() -> None:
        async with both() as doors:
            reply = await doors.say(**{"messages": FIRST, "session_id": "a", **fields})
            assert reply.status == 400 and reply.error["message"]
            assert await doors.sessions.list("") == []

    asyncio.run(run())


def test_one_session_too_many_is_refused_with_a_time_to_come_again() -> None:
    async def run() -> None:
        async with both(max_sessions=1) as doors:
            assert (await doors.say(FIRST, session_id="a")).status == 200
            refused = await doors.say(FIRST, session_id="b")
            assert refused.status == 429 and refused.error["type"] == "RateLimitError"
            assert refused.headers["retry-after"] == "1"
            assert (await doors.say(FIRST, session_id="a")).status == 200

    asyncio.run(run())


def test_a_name_is_its_owners() -> None:
    async def run() -> None:
        async with both(door=Door(keys=Keys.of(("one", "two")))) as doors:
            found = []
            for key in ("one", "two", "one"):
                reply = await doors.say(FIRST, {"Authorization": f"Bearer {key}"}, session_id="a")
                found.append(cached(reply))
            assert found[:2] == [0, 0] and found[2] > 0
            assert (await doors.say(FIRST, session_id="a")).status == 401
            assert await doors.sessions.list("") == []

    asyncio.run(run())


def test_the_priority_of_a_turn_is_that_of_its_request() -> None:
    """One sequence at a time: of the turns that wait, that of the lowest number goes first."""

    async def run() -> None:
        async with both(window=None, max_num_seqs=1, speedup=5.0) as doors:
            ended: list[str] = []

            async def say(name: str, **fields: Any) -> None:
                reply = await doors.say(FIRST, session_id=name, **fields)
                assert reply.status == 200, reply.payload
                ended.append(name)

            scheduler = doors.served.host.core.scheduler

            async def until(holds: Callable[[], bool]) -> None:
                async with asyncio.timeout(20):
                    while not holds():
                        await asyncio.sleep(0.001)

            first = asyncio.create_task(say("first", max_tokens=1000))
            await until(lambda: scheduler.running.num_running == 1)
            late = asyncio.create_task(say("late", priority=5, max_tokens=60))
            await until(lambda: scheduler.waiting.num_waiting == 1)
            early = asyncio.create_task(say("early", priority=-5, max_tokens=60))
            await until(lambda: scheduler.waiting.num_waiting == 2)
            await asyncio.gather(first, late, early)
            assert ended == ["first", "early", "late"]

    asyncio.run(run())
