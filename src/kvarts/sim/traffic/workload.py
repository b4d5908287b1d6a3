"""Synthetic traffic: described by numbers, generated from a seed.

Prompts are defined token by token: a group's shared prefix, then the session so far (prompts and answers), then new
tokens. Token ids only define which tokens are equal; they do not represent text.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError
from kvarts.base.limits import (
    LATEST_NS,
    MOST_REQUESTS,
    MOST_SECONDS,
    MOST_SEED,
    TooLateError,
    check_number,
    check_whole,
)
from kvarts.sim.traffic.trace import Trace, TraceRequest

__all__ = ["FixedLength", "Length", "LogNormalLength", "UniformLength", "Workload"]

NS_PER_S = 1_000_000_000


class FixedLength(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """A constant length of `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _at_least_one("tokens", self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths in tokens."""
        return [self.tokens] * count


class UniformLength(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="uniform"):
    """A uniform distribution from `low` to `high` tokens, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _at_least_one("low", self.low)
        _at_least_one("high", self.high)
        if self.high < self.low:
            raise ConfigError(f"must be at least low, {self.low}, got {self.high}", field="high")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths in tokens."""
        lengths: list[int] = rng.integers(self.low, self.high + 1, count).tolist()
        return lengths


class LogNormalLength(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Log-normal with the given `median` in tokens and `sigma` of the logarithm, clipped to [1, `high`]."""

    median: int
    sigma: float = 1.0
    high: int = 131_072

    def __post_init__(self) -> None:
        _at_least_one("median", self.median)
        _at_least_one("high", self.high)
        check_number(self.sigma, "sigma", most=100.0)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths in tokens."""
        drawn = np.rint(rng.lognormal(np.log(self.median), self.sigma, count))
        lengths: list[int] = np.clip(drawn, 1, self.high).astype(np.int64).tolist()
        return lengths


Length = FixedLength | UniformLength | LogNormalLength


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A synthetic workload.

    `num_sessions` sessions of `turns_per_session` turns arrive at `sessions_per_s` on average, as a `poisson` process
    or at a `fixed` rate (0: all at once). A turn is sent `think_time_s` after the answer to the previous one (mean of
    an exponential distribution with `poisson`, exact with `fixed`). A turn adds `new_tokens` to its session, and its
    answer has `output_tokens`. Sessions are assigned in rotation to `num_prefix_groups` groups; a session begins with
    the shared prefix of its group, `prefix_tokens` long. Users abandon the share `stops` of all requests,
    `stop_after_s` after sending them (mean or exact in the same way), unless they have ended by then. With `models`,
    each session asks for one of these, in rotation after all groups; a name may occur more than once.

    Raises ConfigError for a value out of range.

    >>> from kvarts import ReplayConfig, Workload, replay
    >>> from kvarts.sim.traffic.workload import FixedLength
    >>> lengths = {"new_tokens": FixedLength(100), "output_tokens": FixedLength(20)}
    >>> chats = Workload(num_sessions=5, turns_per_session=4, **lengths)
    >>> replay(chats, ReplayConfig(num_pages=500)).summary["num_completed"]
    20
    """

    num_sessions: int
    new_tokens: Length
    output_tokens: Length
    sessions_per_s: float = 0.0
    arrivals: str = "poisson"
    turns_per_session: int = 1
    think_time_s: float = 0.0
    num_prefix_groups: int = 1
    prefix_tokens: int = 0
    stops: float = 0.0
    stop_after_s: float = 0.0
    models: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("num_sessions", "turns_per_session", "num_prefix_groups"):
            _at_least_one(field, getattr(self, field))
        for field in ("sessions_per_s", "think_time_s"):
            check_number(getattr(self, field), f"workload.{field}", most=MOST_SECONDS)
        check_number(self.stops, "workload.stops", most=1.0)
        check_number(self.stop_after_s, "workload.stop_after_s", most=MOST_SECONDS)
        check_whole(self.prefix_tokens, "workload.prefix_tokens", least=0)
        check_whole(self.seed, "workload.seed", least=0, most=MOST_SEED)
        if 0 < self.sessions_per_s < 1 / MOST_SECONDS:
            raise ConfigError(f"must be 0, or at least {1 / MOST_SECONDS:g}", field="workload.sessions_per_s")
        if self.num_sessions * self.turns_per_session > MOST_REQUESTS:
            raise ConfigError(
                f"makes {self.num_sessions * self.turns_per_session:,} requests, and at most {MOST_REQUESTS:,} fit",
                field="workload.num_sessions",
            )
        if self.arrivals not in ("poisson", "fixed"):
            raise ConfigError(f"must be 'poisson' or 'fixed', got {self.arrivals!r}", field="workload.arrivals")

    def trace(self) -> Trace:
        """Return the workload as a trace. The same seed gives the same trace."""
        rng = np.random.Generator(np.random.PCG64(self.seed))
        num_turns = self.turns_per_session
        num_requests = self.num_sessions * num_turns
        gaps_s = self._times(rng, 1.0 / self.sessions_per_s if self.sessions_per_s else 0.0, self.num_sessions)
        starts_s = np.cumsum(gaps_s)
        if starts_s[-1] * NS_PER_S > LATEST_NS:
            raise TooLateError
        starts_ns = np.rint(starts_s * NS_PER_S).astype(np.int64)
        starts_ns -= starts_ns[0]
        delays_ns = np.rint(self._times(rng, self.think_time_s, num_requests) * NS_PER_S).astype(np.int64)
        new_tokens = self.new_tokens.draw(rng, num_requests)
        output_tokens = self.output_tokens.draw(rng, num_requests)
        stops_ns = self._stops_ns(rng, num_requests) if self.stops else [None] * num_requests
        next_token = self.num_prefix_groups * self.prefix_tokens
        requests = []
        row = 0
        for session in range(self.num_sessions):
            group = session % self.num_prefix_groups
            model = None
            if self.models:
                model = self.models[session // self.num_prefix_groups % len(self.models)]
            history: tuple[range, ...] = ()
            if self.prefix_tokens:
                history = (range(group * self.prefix_tokens, (group + 1) * self.prefix_tokens),)
            num_history = self.prefix_tokens
            for turn in range(num_turns):
                prompt = range(next_token, next_token + new_tokens[row])
                output = range(prompt.stop, prompt.stop + output_tokens[row])
                next_token = output.stop
                requests.append(
                    TraceRequest(
                        row,
                        int(starts_ns[session]),
                        (*history, prompt),
                        num_history + len(prompt),
                        len(output),
                        output_units=(output,),
                        session_id=str(session) if num_turns > 1 else None,
                        delay_ns=int(delays_ns[row]) if turn else None,
                        cancel_after_ns=stops_ns[row],
                        model=model,
                    )
                )
                history = (*history, prompt, output)
                num_history += len(prompt) + len(output)
                row += 1
        return Trace(requests, has_output_tokens=True, name="workload")

    def _stops_ns(self, rng: np.random.Generator, count: int) -> list[int | None]:
        """Return, per request, the time after which its user stops it; None for never."""
        has_stopped = (rng.random(count) < self.stops).tolist()
        after_s = self._times(rng, self.stop_after_s, count).tolist()
        return [
            round(each_s * NS_PER_S) if stopped else None for stopped, each_s in zip(has_stopped, after_s, strict=True)
        ]

    def _times(
        self, rng: np.random.Generator, mean_s: float, count: int
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if self.arrivals == "fixed":
            return np.full(count, mean_s)
        return rng.exponential(mean_s, count)


def _at_least_one(field: str, value: int) -> None:
    check_whole(value, f"workload.{field}")
