"""Sessions without a server, on a clock of their own, that do what a test tells them; and records of long runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from random import Random
from typing import Any

import msgspec

from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.soak.run import Sample, SoakPlan, SoakRecord
from kvarts.run.sessions.values import (
    Done,
    SessionInfo,
    SessionNotReadyError,
    SessionSettings,
    StopReason,
    Token,
    UnknownSessionError,
    Update,
)

BYTES_PER_TOKEN = 1000


def plan_of(**changes: Any) -> SoakPlan:
    """A run of two sessions that fill up in their third turn."""
    values: dict[str, Any] = {
        "target": "fake",
        "duration_s": 200.0,
        "turn_spacing_s": 1.0,
        "num_sessions": 2,
        "prompt_tokens": 16,
        "max_tokens": 8,
        "sink": 4,
        "window": 64,
        **changes,
    }
    return SoakPlan(**values)


class FakeTarget:
    """Bounded sessions of BYTES_PER_TOKEN bytes a token and 10 ms a token, beside one page of slack.

    `itl_s`: time between tokens, of the number of the generation; `reading`: changes what is said of a session;
    `rss`: memory, of the number of the generation; `fails_at`: the generation that raises `error`.
    """

    def __init__(
        self,
        *,
        itl_s: Callable[[int], float] = lambda _: 0.01,
        reading: Callable[[SessionInfo, int], SessionInfo] = lambda reading, _: reading,
        rss: Callable[[int], int | None] = lambda _: None,
        fails_at: int | None = None,
        error: Exception | None = None,
    ) -> None:
        self.time_s = 100.0
        self.num_generations = 0
        self.is_closed: dict[str, bool] = {}
        self.lengths: dict[str, int] = {}
        self._itl_s = itl_s
        self._reading = reading
        self._rss = rss
        self._fails_at = fails_at
        self._error = error or UnknownSessionError("the server has gone")
        self._settings: SessionSettings | None = None

    def now_s(self) -> float:
        return self.time_s

    async def sleep_s(self, duration_s: float) -> None:
        await asyncio.sleep(0)
        self.time_s += duration_s

    async def create(self, settings: SessionSettings) -> str:
        session_id = f"{len(self.lengths):032x}"
        self._settings = settings
        self.lengths[session_id] = 0
        self.is_closed[session_id] = False
        return session_id

    async def append(self, session_id: str, tokens: Sequence[int], *, expected_length: int) -> int:
        if self.lengths[session_id] != expected_length:
            raise SessionNotReadyError("another length")
        self.lengths[session_id] += len(tokens)
        return self.lengths[session_id]

    async def generate(self, session_id: str, params: SamplingParams) -> AsyncGenerator[Update, None]:
        self.num_generations += 1
        if self.num_generations == self._fails_at:
            raise self._error
        for number in range(params.max_tokens):
            await asyncio.sleep(0)
            self.time_s += self._itl_s(self.num_generations)
            self.lengths[session_id] += 1
            yield Token(number)
        yield Done(StopReason.MAX_TOKENS, params.max_tokens, 0.0, 0.0)

    async def info(self, session_id: str) -> SessionInfo:
        assert self._settings is not None
        length = self.lengths[session_id]
        live = BYTES_PER_TOKEN * self._settings.num_retained(length)
        info = SessionInfo(
            session_id=session_id,
            label="",
            settings=self._settings,
            state="idle",
            num_retained=0,
            num_dropped=0,
            kv_peak_bytes=0,
            idle_s=0.0,
            num_turns=0,
            num_computed_tokens=0,
            restored=None,
            history_length=length,
            kv_live_bytes=live,
            kv_allocated_bytes=live + 16 * BYTES_PER_TOKEN,
            kv_bound_bytes=84 * BYTES_PER_TOKEN,
            inv1_violations=0,
            inv2_violations=0,
        )
        return self._reading(info, self.num_generations)

    async def close(self, session_id: str) -> int:
        self.is_closed[session_id] = True
        return self.lengths[session_id]

    def rss_bytes(self) -> int | None:
        return self._rss(self.num_generations)


def record_of(
    num_turns: int = 100, *, noise: float = 0.02, seed: int = 0, drift: float = 0.0, **plan: Any
) -> SoakRecord:
    """A hand-made run: two sessions in rotation, 16 tokens in and 8 out each turn, bounded, with noisy latency.

    `drift`: by which share the time between tokens rises over the run.
    """
    random = Random(seed)
    lengths = [0, 0]
    samples = []
    for turn in range(num_turns):
        session = turn % 2
        for phase, num_tokens in (("append", 16), ("turn", 8)):
            lengths[session] += num_tokens
            itl_s = 0.01 * (1 + drift * turn / num_turns) * (1 + noise * random.gauss(0, 1))
            samples.append(
                Sample(
                    turn=turn,
                    phase=phase,  # type: ignore[arg-type]
                    session=session,
                    at_s=30.0 * turn,
                    num_sent_tokens=lengths[session],
                    history_length=lengths[session],
                    kv_live_bytes=BYTES_PER_TOKEN * min(68, lengths[session] - (phase == "turn")),
                    kv_allocated_bytes=84 * BYTES_PER_TOKEN,
                    kv_bound_bytes=84 * BYTES_PER_TOKEN,
                    inv1_violations=0,
                    inv2_violations=0,
                    num_generated=8 if phase == "turn" else 0,
                    itl_s=itl_s if phase == "turn" else None,
                    ttft_s=0.02 if phase == "turn" else None,
                )
            )
    duration_s = 30.0 * num_turns
    return SoakRecord(
        plan=plan_of(duration_s=duration_s or 1.0, turn_spacing_s=30.0, **plan),
        samples=samples,
        duration_s=duration_s,
        ended_by="duration",
    )


def with_sample(record: SoakRecord, index: int, **changes: Any) -> SoakRecord:
    """The run with one sample changed."""
    samples = list(record.samples)
    samples[index] = msgspec.structs.replace(samples[index], **changes)
    return msgspec.structs.replace(record, samples=samples)


def with_samples(record: SoakRecord, change: Callable[[Sample], dict[str, Any]]) -> SoakRecord:
    """The run with every sample changed."""
    samples = [msgspec.structs.replace(sample, **change(sample)) for sample in record.samples]
    return msgspec.structs.replace(record, samples=samples)
