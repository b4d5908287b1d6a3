"""The plan of a soak, the run that drives turns against sessions, and its measurements, with their file format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import msgspec

from kvarts.errors import ConfigError, InputError, KvartsError, parts_of
from kvarts.files import read_bytes, write_whole
from kvarts.limits import MOST_BYTES_PER_TOKEN, MOST_COUNT, MOST_SECONDS, MOST_SEED, check_number, check_whole
from kvarts.session.soak.target import SessionsTarget
from kvarts.session.values import SessionSettings, Token

__all__ = [
    "VERSION",
    "EndedBy",
    "KvLayers",
    "Phase",
    "Sample",
    "SoakPlan",
    "SoakRecord",
    "load_record",
    "run_soak",
    "write_record",
]

T = TypeVar("T")

CHECKPOINT_SHARE = 20
"""A checkpoint writes everything recorded so far, so checkpoints are at least a twentieth of that apart."""
VERSION = 1
MOST_SESSIONS = 100_000

Phase = Literal["append", "turn"]
EndedBy = Literal["duration", "stopped", "error"]


class KvLayers(msgspec.Struct, frozen=True):
    """Layers with the same limit: `bytes_per_token` over all of them, and the most tokens that each keeps."""

    max_tokens: int
    bytes_per_token: int


class SoakPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run, and the criteria of its verdict. Raises ConfigError for a value out of range.

    Each turn appends `prompt_tokens` tokens to one of `num_sessions` sessions, in rotation, and generates `max_tokens`.
    Turns begin `turn_spacing_s` seconds apart, or when the previous one has ended.

    `layers`: bytes per token, if known; if empty, they are derived while sessions fill up. `max_drift`: largest
    relative increase of latency over the run; `max_rss_growth`: the same for the server's memory.
    """

    target: str
    duration_s: float
    turn_spacing_s: float = 0.0
    num_sessions: int = 4
    prompt_tokens: int = 32
    max_tokens: int = 32
    sink: int = 4
    window: int = 64
    vocab_size: int = 256
    seed: int = 0
    turn_timeout_s: float = 600.0
    layers: tuple[KvLayers, ...] = ()
    expects_rss: bool = False
    max_drift: float = 0.1
    max_rss_growth: float = 0.05

    def __post_init__(self) -> None:
        check_whole(self.num_sessions, "num_sessions", most=MOST_SESSIONS)
        at_least = {"prompt_tokens": 1, "max_tokens": 1, "window": 1, "vocab_size": 1, "sink": 0}
        for field, least in at_least.items():
            check_whole(getattr(self, field), field, least=least)
        check_whole(self.seed, "seed", least=0, most=MOST_SEED)
        for field in ("duration_s", "turn_timeout_s", "max_drift", "max_rss_growth"):
            check_number(getattr(self, field), field, above=True, most=MOST_SECONDS)
        check_number(self.turn_spacing_s, "turn_spacing_s", most=MOST_SECONDS)
        for layers in self.layers:
            check_whole(layers.max_tokens, "layers", most=MOST_COUNT)
            check_whole(layers.bytes_per_token, "layers", most=MOST_BYTES_PER_TOKEN)

    @property
    def bound_tokens(self) -> int:
        """Return how many tokens a full session keeps, in the layers that keep most."""
        return max((layers.max_tokens for layers in self.layers), default=self.sink + self.window)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a session, after an append or after a whole turn. None: not reported by the server.

    `num_sent_tokens`: tokens sent and received by the client, its own count of the history. `at_s`: time since the run
    began. A turn also has latencies: `ttft_s` to the first token, and `itl_s`, the mean between tokens.
    """

    turn: int
    phase: Phase
    session: int
    at_s: float
    num_sent_tokens: int
    history_length: int | None = None
    kv_live_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    kv_bound_bytes: int | None = None
    inv1_violations: int | None = None
    inv2_violations: int | None = None
    rss_bytes: int | None = None
    num_generated: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None


class SoakRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run so far. `ended_by` is None while it continues; `why`: the error that ended it.

    Raises ConfigError for an invalid time.
    """

    plan: SoakPlan
    samples: list[Sample]
    duration_s: float
    ended_by: EndedBy | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        check_number(self.duration_s, "duration_s", most=MOST_SECONDS)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    verdict: msgspec.Raw
    record: SoakRecord


def write_record(path: Path, record: SoakRecord, verdict: Any) -> None:
    """Write a run and its verdict as JSON, completely or not at all, with keys in a fixed order. Raise OutputError."""
    raw = msgspec.Raw(msgspec.json.encode(verdict))
    write_whole(path, msgspec.json.encode(_File(version=VERSION, verdict=raw, record=record)) + b"\n")


def load_record(path: Path) -> SoakRecord:
    """Return the run in a file, without its verdict. Raise MissingFileError and InputError."""
    data = read_bytes(path, hint="Give the file of kvarts soak --json.")
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise InputError(f"has version {version}, and this kvarts reads {VERSION}", path=path)
        return msgspec.json.decode(data, type=_File).record
    except RecursionError:
        raise InputError("is no record of a soak: it is nested too deeply", path=path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        raise InputError(f"is no record of a soak: {what}", path=path, field=field) from error
    except ConfigError as error:
        raise InputError(f"is no record of a soak: {error}", path=path) from error


class _Versioned(msgspec.Struct):
    version: int


class _Stopped(Exception):  # noqa: N818  # not an error: the run was asked to stop
    pass


async def run_soak(
    plan: SoakPlan,
    target: SessionsTarget,
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

    def __init__(self, plan: SoakPlan, target: SessionsTarget, stop: asyncio.Event) -> None:
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
