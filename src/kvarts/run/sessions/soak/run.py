"""The plan of a soak, the run that drives turns against sessions, and its measurements, with their file format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec

from kvarts.base.errors import KvartsError
from kvarts.base.files import write_whole
from kvarts.base.limits import MOST_BYTES_PER_TOKEN, MOST_COUNT, MOST_SECONDS, MOST_SEED, check_number, check_whole
from kvarts.core.sampling import SamplingParams
from kvarts.run.sessions.values import Done, SessionSettings, Token

__all__ = ["KvLayers", "Sample", "SoakClock", "SoakPlan", "SoakRecord", "rss_of", "run_soak", "write_record"]

CHECKPOINT_SHARE = 20
"""A checkpoint writes everything recorded so far, so checkpoints are at least a twentieth of that apart."""
VERSION = 1
MOST_SESSIONS = 100_000
REPORTED = ("history_length", "kv_live_bytes", "kv_allocated_bytes", "kv_bound_bytes", "inv1_violations",
            "inv2_violations")  # fmt: skip
"""Fields of a sample that a server reports of a session."""


class SoakClock(NamedTuple):
    """A monotonic clock in seconds. `is_virtual`: it may be ahead of the updates that are read."""

    now_s: Callable[[], float]
    sleep_s: Callable[[float], Awaitable[None]]
    is_virtual: bool = False


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
        for field in ("prompt_tokens", "max_tokens", "window", "vocab_size", "sink"):
            check_whole(getattr(self, field), field, least=int(field != "sink"))
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
    phase: Literal["append", "turn"]
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
    """A run so far. `ended_by` is None while it continues; `why`: the error that ended it. Raises ConfigError."""

    plan: SoakPlan
    samples: list[Sample]
    duration_s: float
    ended_by: Literal["duration", "stopped", "error"] | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        check_number(self.duration_s, "duration_s", most=MOST_SECONDS)


def write_record(path: Path, record: SoakRecord, verdict: Any) -> None:
    """Write a run and its verdict as JSON, completely or not at all, with keys in a fixed order. Raise OutputError."""
    write_whole(path, msgspec.json.encode({"version": VERSION, "verdict": verdict, "record": record}) + b"\n")


async def run_soak(
    plan: SoakPlan,
    sessions: Any,
    clock: SoakClock,
    *,
    stop: asyncio.Event,
    checkpoint: Callable[[SoakRecord], None],
    checkpoint_turns: int = 10,
    rss_bytes: Callable[[], int | None] = lambda: None,
) -> SoakRecord:
    """Run turns until the duration has passed or `stop` is set, and return the record.

    `sessions`: an object with the methods of SessionRuntime without an owner. `rss_bytes`: returns the resident memory
    of the server, None if it is unknown. `checkpoint` receives the record after every `checkpoint_turns` turns, or less
    often once these are less than a twentieth of all, and at the end. When `stop` is set, the current turn is
    cancelled. An error of the server ends the run and is recorded; one before the first turn is raised.
    """
    run = _Run(plan, sessions, clock, rss_bytes)
    await run.create_sessions()
    both = driving, _ = (
        asyncio.ensure_future(run.drive(checkpoint, checkpoint_turns)),
        asyncio.ensure_future(stop.wait()),
    )
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    error = driving.exception() if driving.done() else None
    ended: dict[str, Any] = {"ended_by": "duration" if driving.done() else "stopped"}
    if error is not None:  # keeps hours of samples, whatever the error
        ended = {"ended_by": "error", "why": str(error) if isinstance(error, KvartsError) else repr(error)}
    for task in both:
        task.cancel()
    await asyncio.gather(*both, return_exceptions=True)
    record = run.record(**ended)
    checkpoint(record)
    await run.close_sessions()
    return record


class _Run:
    """The sessions of one run, and its samples."""

    def __init__(self, plan: SoakPlan, sessions: Any, clock: SoakClock, rss_bytes: Callable[[], int | None]) -> None:
        self._plan = plan
        self._sessions = sessions
        self._clock = clock
        self._rss_bytes = rss_bytes
        self._random = Random(plan.seed)
        self._begin_s = clock.now_s()
        self._lengths: dict[str, int] = {}
        """The client's own count of each history, by id."""
        self._samples: list[Sample] = []
        self._num_turns = 0

    def time_s(self) -> float:
        """Return the time since the start of the run."""
        return self._clock.now_s() - self._begin_s

    def record(self, **ended: Any) -> SoakRecord:
        """Return the record so far. `ended`: how and why the run has ended."""
        return SoakRecord(plan=self._plan, samples=list(self._samples), duration_s=self.time_s(), **ended)

    async def create_sessions(self) -> None:
        """Open all sessions. They may pass the positions that the model was trained for: memory counts, not text."""
        plan = self._plan
        settings = SessionSettings(sink=plan.sink, window=plan.window, past_max_positions=True, label="kvarts soak")
        for _ in range(plan.num_sessions):
            self._lengths[await self._sessions.create(settings)] = 0

    async def close_sessions(self) -> None:
        """Close all sessions, ignoring errors."""
        for session_id in self._lengths:
            with suppress(Exception):
                await self._sessions.close(session_id)

    async def drive(self, checkpoint: Callable[[SoakRecord], None], checkpoint_turns: int) -> None:
        """Run turns until the duration has passed."""
        plan, turns_due, ids = self._plan, checkpoint_turns, list(self._lengths)
        while self.time_s() < plan.duration_s:
            try:
                async with asyncio.timeout(plan.turn_timeout_s):
                    await self._turn(self._num_turns % len(ids), ids[self._num_turns % len(ids)])
            except TimeoutError:
                raise KvartsError(f"a turn took longer than {plan.turn_timeout_s:g} s") from None
            self._num_turns += 1
            if self._num_turns >= turns_due:
                checkpoint(self.record())
                turns_due = self._num_turns + max(checkpoint_turns, self._num_turns // CHECKPOINT_SHARE)
            if (left_s := min(self._num_turns * plan.turn_spacing_s, plan.duration_s) - self.time_s()) > 0:
                await self._clock.sleep_s(left_s)

    async def _turn(self, session: int, session_id: str) -> None:
        """Append to a session, generate greedily beyond the model's end, and take samples."""
        plan = self._plan
        ends = [plan.prompt_tokens]
        if not self._lengths[session_id]:  # the first prompt is split, to observe how memory fills up
            ends = sorted({1, min(plan.prompt_tokens, max(2, plan.bound_tokens // 2)), plan.prompt_tokens})
        for begin, end in zip([0, *ends], ends, strict=False):
            tokens = [self._random.randrange(plan.vocab_size) for _ in range(begin, end)]
            await self._sessions.append(session_id, tokens, expected_length=self._lengths[session_id])
            self._lengths[session_id] += len(tokens)
            await self._sample(session, session_id, phase="append")
        times_s, done = [self._clock.now_s()], None
        params = SamplingParams(max_tokens=plan.max_tokens, ignore_eos=True)
        async with aclosing(self._sessions.generate(session_id, params)) as updates:
            async for update in updates:
                if isinstance(update, Token):
                    times_s.append(self._clock.now_s())
                elif isinstance(update, Done):
                    done = update
        num_tokens = len(times_s) - 1
        ttft_s, all_s = times_s[min(1, num_tokens)] - times_s[0], times_s[-1] - times_s[0]
        if self._clock.is_virtual and done is not None:
            ttft_s, all_s = done.prefill_s, done.total_s
        self._lengths[session_id] += num_tokens
        itl_s = (all_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None
        latencies = {"ttft_s": ttft_s if num_tokens else None, "itl_s": itl_s}
        await self._sample(session, session_id, phase="turn", num_generated=num_tokens, **latencies)

    async def _sample(self, session: int, session_id: str, **measured: Any) -> None:
        at_s, info = self.time_s(), await self._sessions.info(session_id)
        known: dict[str, Any] = {name: getattr(info, name, None) for name in REPORTED} | measured
        known |= {"at_s": at_s, "num_sent_tokens": self._lengths[session_id], "rss_bytes": self._rss_bytes()}
        self._samples.append(Sample(turn=self._num_turns, session=session, **known))


def rss_of(pid: int) -> int | None:
    """Return the resident memory in bytes of a process on this machine; None if Linux does not report it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), None)
    except OSError:
        return None
