"""L12 on a mock: any interleaving of sessions, bounded or not, and of requests beside; each says what it says alone."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.run.engine_loop import ModelHost
from kvarts.run.sessions.sessions import Sessions
from kvarts.run.sessions.values import (
    Done,
    SessionNotReadyError,
    SessionsConfig,
    SessionSettings,
    StopReason,
    Token,
    Truncated,
)
from kvarts.sim.report.steps import StepLog

from builders.session_timeline import check_timeline
from builders.sessions import OWNER, check_at_rest, greedy, mock_says, mock_sessions

ACTS = ("append", "generate", "cancel", "drop", "leave", "fork", "rollback", "look")


class Talker:
    """One session, and its history as it should be."""

    def __init__(self, sessions: Sessions, random: Random, page_size: int, num_pages: int) -> None:
        self.sessions = sessions
        self.random = random
        self.page_size = page_size
        # An unbounded history must fit beside what is reserved.
        self.most = 120 if num_pages >= 200 else 60
        self.session = ""
        self.history: list[int] = []

    async def talk(self, num_acts: int) -> None:
        window = self.random.choice([None, 1, 2, 5, 10, 16])
        self.settings = SessionSettings(
            sink=self.random.randrange(7), window=window, retention=self.random.choice(["cache", "pin"])
        )
        self.session = await self.sessions.create(OWNER, self.settings)
        for _ in range(num_acts):
            act = self.random.choice(ACTS) if self.history else "append"
            await getattr(self, act)()
            await self.look()
        assert await self.sessions.close(OWNER, self.session) == len(self.history)

    def room(self, most: int) -> int:
        if self.settings.window is None:
            most = min(most, self.most - len(self.history))
        return max(0, most)

    async def append(self) -> None:
        new = [self.random.randrange(3000) for _ in range(self.room(self.random.choice([0, 1, 3, 17, 60])))]
        length = await self.sessions.append(OWNER, self.session, new, expected_length=len(self.history))
        self.history += new
        assert length == len(self.history)

    async def generate(self) -> None:
        if count := self.room(self.random.randrange(1, 30)):
            said, done = await self.read(count)
            assert (done.stop_reason, done.num_tokens) == (StopReason.MAX_TOKENS, count)
            assert said == mock_says(self.history, count)
            self.history += said

    async def read(self, count: int) -> tuple[list[int], Done]:
        said = []
        num_dropped = len(self.history) - self.settings.num_retained(len(self.history))
        async for update in self.sessions.generate(OWNER, self.session, greedy(count)):
            if isinstance(update, Token):
                said.append(update.token_id)
            elif isinstance(update, Truncated):
                assert update.num_dropped == num_dropped
                num_dropped = 0
            else:
                last = update
        assert self.settings.window is None or not num_dropped, "what was dropped was not said"
        return said, last

    async def generated(self) -> None:
        """Take over what was generated, however much that was."""
        length = (await self.sessions.info(OWNER, self.session)).history_length
        self.history += mock_says(self.history, length - len(self.history))

    async def drop(self) -> None:
        """A client goes in the middle."""
        if not (count := self.room(30)):
            return
        reading = asyncio.ensure_future(self.read(count))
        for _ in range(self.random.randrange(30)):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await self.generated()

    async def leave(self) -> None:
        """A client goes in the middle of an append: all of the tokens are there, or none."""
        new = [self.random.randrange(3000) for _ in range(self.room(40))]
        appending = asyncio.ensure_future(self.sessions.append(OWNER, self.session, new))
        for _ in range(self.random.randrange(20)):
            await asyncio.sleep(0)
        if self.random.random() < 0.5:
            appending.cancel()
        else:
            await self.sessions.cancel(OWNER, self.session)
        await asyncio.gather(appending, return_exceptions=True)
        length = await self.sessions.append(OWNER, self.session, [], queue=True)
        assert length in (len(self.history), len(self.history) + len(new))
        self.history += new[: length - len(self.history)]

    async def cancel(self) -> None:
        if not (count := self.room(30)):
            return
        reading = asyncio.ensure_future(self.read(count))
        for _ in range(self.random.randrange(30)):
            await asyncio.sleep(0)
        was_there = await self.sessions.cancel(OWNER, self.session)
        said, done = await reading
        if not was_there:
            assert done.stop_reason is StopReason.MAX_TOKENS
        assert said == mock_says(self.history, done.num_tokens)
        self.history += said

    async def fork(self) -> None:
        forked = await self.sessions.fork(OWNER, self.session, label="a fork")
        other = Talker(self.sessions, Random(self.random.random()), self.page_size, 0)
        other.session, other.settings, other.history, other.most = forked, self.settings, [*self.history], self.most
        await asyncio.gather(self.generate(), other.generate())
        await other.append()
        await other.generate()
        await other.look()
        assert await self.sessions.close(OWNER, forked) == len(other.history)

    async def rollback(self) -> None:
        length = max(0, len(self.history) - self.random.choice([0, 1, 2, 5, 1000]))
        try:
            assert await self.sessions.rollback(OWNER, self.session, length) == length
        except SessionNotReadyError:
            window, sink = self.settings.window, self.settings.sink
            assert window is not None
            assert length > sink, "what the sink holds is always there"
            assert len(self.history) > sink + window, "nothing was dropped"
            assert length < len(self.history)
        else:
            del self.history[length:]

    async def look(self) -> None:
        info = await self.sessions.info(OWNER, self.session)
        assert info.history_length == len(self.history)
        assert info.state == "idle"
        assert (info.inv1_violations, info.inv2_violations) == (0, 0)
        assert info.kv_live_bytes == info.num_retained * (info.kv_live_bytes // max(1, info.num_retained))
        if self.settings.window is None:
            assert info.num_retained <= len(self.history)
            return
        assert info.num_retained == min(len(self.history), self.settings.sink + self.settings.window)
        assert info.num_dropped == len(self.history) - info.num_retained
        bound = -(-self.settings.sink // self.page_size) + -(-self.settings.window // self.page_size) + 1
        assert info.kv_bound_bytes is not None
        assert info.kv_allocated_bytes <= info.kv_bound_bytes
        assert info.kv_bound_bytes % (bound * self.page_size) == 0


async def ask(host: ModelHost, random: Random, count: int) -> None:
    """Plain requests beside the sessions."""
    for _ in range(count):
        prompt = [random.randrange(3000) for _ in range(random.randrange(1, 60))]
        (completion,) = await asyncio.to_thread(host.loop.generate, [(prompt, greedy(random.randrange(1, 20)))])
        assert list(completion.tokens) == mock_says(prompt, len(completion.tokens))


def run(seed: int, page_size: int, chunk: int, budget: int, num_pages: int, *, num_talkers: int, num_acts: int) -> None:
    steps = StepLog(num_pages)
    sessions, host = mock_sessions(
        SessionsConfig(defaults=SessionSettings(sink=3, window=10), chunk_tokens=chunk),
        num_pages=num_pages,
        page_size=page_size,
        budget=budget,
        seqs=5,
        readers=[steps],
    )

    async def main() -> None:
        random = Random(seed)
        talkers = [Talker(sessions, Random(random.random()), page_size, num_pages) for _ in range(num_talkers)]
        await asyncio.wait_for(
            asyncio.gather(*(talker.talk(num_acts) for talker in talkers), ask(host, Random(random.random()), 3)), 60
        )
        assert not await sessions.list(OWNER)
        await sessions.shut_down()

    asyncio.run(main())
    check_at_rest(host)
    check_timeline(steps, page_size)


@pytest.mark.laws
@settings(max_examples=2 * settings().max_examples)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 4, 16]),
    chunk=st.sampled_from([1, 7, 16, 64]),
    budget=st.sampled_from([5, 16, 64]),
    num_pages=st.sampled_from([600, 900]),
)
def test_each_session_says_what_it_says_alone(
    seed: int, page_size: int, chunk: int, budget: int, num_pages: int
) -> None:
    run(seed, page_size, chunk, budget, num_pages, num_talkers=5, num_acts=6)
