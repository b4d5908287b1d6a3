"""Drives turns against sessions, and records the measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from random import Random
from typing import TypeVar

from kvarts.errors import KvartsError
from kvarts.session.soak.record import EndedBy, Phase, Sample, SoakPlan, SoakRecord
from kvarts.session.soak.target import SoakTarget
from kvarts.session.values import SessionSettings, Token

__all__ = ["run_soak"]

T = TypeVar("T")

CHECKPOINT_SHARE = 20
"""A checkpoint writes everything recorded so far, so checkpoints are at least a twentieth of that apart."""


class _Stopped(Exception):  # noqa: N818  # not an error: the run was asked to stop
    pass


async def run_soak(
    plan: SoakPlan,
    target: SoakTarget,
    *,
    stop: asyncio.Event,
    checkpoint: Callable[[SoakRecord], None],
    checkpoint_turns: int = 10,
) -> SoakRecord:
    """Run turns until the duration has passed or `stop` is set, and return the record.

    `checkpoint` is called with the record so far after every `checkpoint_turns` turns, or less often once these are
    less than a twentieth of all, and at the end. When `stop` is set, the current turn is cancelled; its append may have
    been sampled. An error of the server ends the run and is recorded; one before the first turn is raised.
    """
    run = _Run(plan, target, stop)
    ended_by: EndedBy = "duration"
    why = None
    await run.create_sessions()
    turns_due = checkpoint_turns
    try:
        while run.time_s() < plan.duration_s:
            await run.turn()
            if run.num_turns >= turns_due:
                checkpoint(run.record(None, None))
                turns_due = run.num_turns + max(checkpoint_turns, run.num_turns // CHECKPOINT_SHARE)
            next_s = run.num_turns * plan.turn_spacing_s
            if next_s > run.time_s():
                await run.unless_stopped(target.sleep_s(min(next_s, plan.duration_s) - run.time_s()))
    except _Stopped:
        ended_by = "stopped"
    except Exception as error:  # keeps hours of samples, whatever the error
        ended_by, why = "error", str(error) if isinstance(error, KvartsError) else repr(error)
    record = run.record(ended_by, why)
    checkpoint(record)
    await run.close_sessions()
    return record


class _Run:
    """The sessions of one run, and its samples."""

    def __init__(self, plan: SoakPlan, target: SoakTarget, stop: asyncio.Event) -> None:
        self._plan = plan
        self._target = target
        self._stop = stop
        self._random = Random(plan.seed)
        self._begin_s = target.now_s()
        self._session_ids: list[str] = []
        self._lengths: list[int] = []
        self._samples: list[Sample] = []
        self.num_turns = 0

    def time_s(self) -> float:
        """Return the time since the start of the run."""
        return self._target.now_s() - self._begin_s

    def record(self, ended_by: EndedBy | None, why: str | None) -> SoakRecord:
        """Return the record so far."""
        return SoakRecord(
            plan=self._plan, samples=list(self._samples), duration_s=self.time_s(), ended_by=ended_by, why=why
        )

    async def create_sessions(self) -> None:
        """Open all sessions."""
        # The run measures memory, not text, so it continues beyond the positions that the model was trained for.
        settings = SessionSettings(
            sink=self._plan.sink, window=self._plan.window, past_max_positions=True, label="kvarts soak"
        )
        for _ in range(self._plan.num_sessions):
            self._session_ids.append(await self._target.create(settings))
            self._lengths.append(0)

    async def close_sessions(self) -> None:
        """Close all sessions, ignoring errors."""
        for session_id in self._session_ids:
            with suppress(Exception):
                await self._target.close(session_id)

    async def unless_stopped(self, work: Awaitable[T], *, timeout_s: float | None = None) -> T:
        """Return the result of `work`. If the run is asked to stop, cancel `work` and raise _Stopped.

        Raise KvartsError if it takes longer than `timeout_s` of real time.
        """
        task = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
            if task.done():
                return task.result()
            if stopping.done():
                raise _Stopped
            raise KvartsError(f"a turn took longer than {timeout_s:g} s")
        finally:
            for other in (task, stopping):
                other.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    async def turn(self) -> None:
        """Append to the next session, generate, and take samples."""
        if self._stop.is_set():
            raise _Stopped
        await self.unless_stopped(self._turn(), timeout_s=self._plan.turn_timeout_s)
        self.num_turns += 1

    async def _turn(self) -> None:
        session = self.num_turns % self._plan.num_sessions
        session_id = self._session_ids[session]
        for num_tokens in self._parts(is_first=not self._lengths[session]):
            tokens = [self._random.randrange(self._plan.vocab_size) for _ in range(num_tokens)]
            await self._target.append(session_id, tokens, self._lengths[session])
            self._lengths[session] += num_tokens
            self._samples.append(await self._sample("append", session))
        times_s = [self._target.now_s()]
        async with aclosing(self._target.generate(session_id, self._plan.max_tokens)) as updates:
            async for update in updates:
                match update:
                    case Token():
                        times_s.append(self._target.now_s())
        num_generated = len(times_s) - 1
        self._lengths[session] += num_generated
        self._samples.append(
            await self._sample(
                "turn",
                session,
                num_generated,
                ttft_s=times_s[1] - times_s[0] if num_generated else None,
                itl_s=(times_s[-1] - times_s[1]) / (num_generated - 1) if num_generated > 1 else None,
            )
        )

    def _parts(self, *, is_first: bool) -> list[int]:
        """Return the lengths of the pieces of a prompt. The first prompt is split, to observe how memory fills up."""
        num_tokens = self._plan.prompt_tokens
        if not is_first:
            return [num_tokens]
        ends = sorted({1, min(num_tokens, max(2, self._plan.bound_tokens // 2)), num_tokens})
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    async def _sample(
        self,
        phase: Phase,
        session: int,
        num_generated: int = 0,
        *,
        ttft_s: float | None = None,
        itl_s: float | None = None,
    ) -> Sample:
        at_s = self.time_s()
        reading = await self._target.read(self._session_ids[session])
        return Sample(
            turn=self.num_turns,
            phase=phase,
            session=session,
            at_s=at_s,
            num_sent_tokens=self._lengths[session],
            num_generated=num_generated,
            ttft_s=ttft_s,
            itl_s=itl_s,
            rss_bytes=self._target.rss_bytes(),
            **{name: getattr(reading, name) for name in reading.__struct_fields__},
        )
