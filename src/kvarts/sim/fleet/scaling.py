"""Scalers: the number of workers of a fleet over time, and the state that decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import ceil, inf, isfinite
from typing import ClassVar, Protocol

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_REPLICAS, brief
from kvarts.base.units import parse_duration_s

__all__ = ["Decision", "FleetState", "PoolState", "Scaler", "Scripted", "WorkerState", "parse_scaler"]

OF_LOAD = "Write dynamo,target=load,prefill-up=8192,prefill-down=1024,decode-up=80,decode-down=40."


class WorkerState(msgspec.Struct, frozen=True, gc=False):
    """A worker at a tick. `num_waiting`: requests that wait for a place, or for pages for a computed prompt.

    `queued_tokens`: prompt tokens of waiting requests. `used_share`: fraction of the pages that is in use.
    `scheduled_tokens`: tokens of running requests. `capacity_tokens`: tokens that its pages hold.
    """

    worker: int
    num_running: int
    num_waiting: int
    queued_tokens: int
    used_share: float
    scheduled_tokens: int = 0
    capacity_tokens: int = 0


class PoolState(msgspec.Struct, frozen=True):
    """A pool at a tick: its active workers, and the numbers that start and drain.

    `model`: the name by which requests ask for its model; None if they ask for none.
    """

    name: str
    role: str
    active: tuple[WorkerState, ...]
    num_starting: int
    num_draining: int
    model: str | None = None

    @property
    def num_expected(self) -> int:
        """Workers that are active or starting."""
        return len(self.active) + self.num_starting


class FleetState(msgspec.Struct, frozen=True):
    """The input of a scaler at a tick. Times are in nanoseconds."""

    now_ns: int
    pools: tuple[PoolState, ...]


class Decision(msgspec.Struct, frozen=True):
    """How many workers each pool is to have, by its name, those that start included; and when the next tick is.

    A pool that is left out stays as it is, and none has fewer than one worker. None: no further tick.
    """

    targets: Mapping[str, int]
    next_ns: int | None


class Scaler(Protocol):
    """Decides the number of workers. Promises: the same states give the same decisions, in any process."""

    def first_ns(self) -> int | None:
        """Return the time of the first tick; None for never."""

    def on_tick(self, state: FleetState) -> Decision:
        """Return the targets from now on."""


class Scripted:
    """Numbers of workers at given times: (time, {pool: number}), in order of time."""

    def __init__(self, steps: Sequence[tuple[int, Mapping[str, int]]]) -> None:
        self._steps = list(steps)
        self._next = 0
        self.pools = {name for _, targets in steps for name in targets}
        """The names that it has numbers for."""

    def first_ns(self) -> int | None:
        """Return the first time."""
        return self._steps[0][0] if self._steps else None

    def on_tick(self, state: FleetState) -> Decision:
        """Return the targets of this time."""
        targets = self._steps[self._next][1]
        self._next += 1
        return Decision(targets, self._steps[self._next][0] if self._next < len(self._steps) else None)


class _Periodic:
    """Decides every `every_ns`. A pool has from `least` to `most` workers."""

    def __init__(self, *, every_ns: int, least: int, most: int) -> None:
        self._every_ns = every_ns
        self._least = least
        self._most = most

    def first_ns(self) -> int | None:
        """Return the first multiple of the interval."""
        return self._every_ns

    def within(self, wanted: int) -> int:
        """Return the number of workers between the bounds that is nearest to `wanted`."""
        return min(self._most, max(self._least, wanted))


class Proportional(_Periodic):
    """Like a Kubernetes HPA: n workers with a mean of `value` become ceil(n value / target), within `least` and `most`.

    The number stays while the mean is within a tenth of the target. It drops only to the largest number that was wanted
    at any tick of the last `stable_ns`. `of_kv`: the value is the percentage of pages in use; otherwise it is the
    number of requests waiting per worker, for which KEDA's ceil(waiting / target) gives the same result.
    """

    def __init__(self, *, of_kv: bool, target: float, every_ns: int, least: int, most: int, stable_ns: int) -> None:
        super().__init__(every_ns=every_ns, least=least, most=most)
        self._of_kv = of_kv
        self._target = target
        self._stable_ns = stable_ns
        self._wanted: dict[str, list[tuple[int, int]]] = {}

    def on_tick(self, state: FleetState) -> Decision:
        """Return the target of each pool."""
        targets: dict[str, int] = {}
        for pool in state.pools:
            wanted = self._wanted.setdefault(pool.name, [])
            wanted.append((state.now_ns, self._needed(pool)))
            while wanted[0][0] < state.now_ns - self._stable_ns:
                del wanted[0]
            targets[pool.name] = max(number for _, number in wanted)
        return Decision(targets, state.now_ns + self._every_ns)

    def _needed(self, pool: PoolState) -> int:
        n = len(pool.active)
        if not n:
            return max(self._least, pool.num_expected)
        values = [100 * each.used_share if self._of_kv else float(each.num_waiting) for each in pool.active]
        ratio = sum(values) / n / self._target
        if abs(ratio - 1) <= 0.1:
            return pool.num_expected
        if n * ratio >= self._most:
            return self._most  # also where the quotient of a tiny target is infinite
        return max(self._least, ceil(n * ratio - 1e-9))


class SpareCapacity(_Periodic):
    """Version 1 of llm-d's workload-variant autoscaler: adds or removes a worker, by the spare capacity of the others.

    A worker is saturated with 80 % of its pages in use or 5 requests waiting. A worker is added if the unsaturated ones
    have on average less than 10 % of the pages or 3 places in the queue to spare. One is removed if at least two are
    unsaturated and the rest could take its load and keep that margin. A pool does not change while workers start.
    """

    KV, QUEUE, SPARE_KV, SPARE_QUEUE = 0.8, 5.0, 0.1, 3.0

    def on_tick(self, state: FleetState) -> Decision:
        """Return the current number plus one, minus one, or unchanged, per pool."""
        targets = {
            pool.name: self.within(len(pool.active) + self._change(pool))
            for pool in state.pools
            if not pool.num_starting
        }
        return Decision(targets, state.now_ns + self._every_ns)

    def _change(self, pool: PoolState) -> int:
        free = [each for each in pool.active if each.used_share < self.KV and each.num_waiting < self.QUEUE]
        n = len(free)
        if not n:
            return 1
        kv, queue = sum(each.used_share for each in free), sum(each.num_waiting for each in free)
        if self.KV - kv / n < self.SPARE_KV or self.QUEUE - queue / n < self.SPARE_QUEUE:
            return 1
        if n < 2:
            return 0
        still_spare = self.KV - kv / (n - 1) >= self.SPARE_KV and self.QUEUE - queue / (n - 1) >= self.SPARE_QUEUE
        return -1 if still_spare else 0


class Thresholds(_Periodic):
    """NVIDIA Dynamo's planner by load: one worker more if any has too much to do, one less if all have little.

    A prefill worker's load is its prompt tokens that wait, divided by the `context` length; that of others is the
    tokens that run or wait there, divided by what they hold. A worker is removed only if the largest load, shared by
    the rest, stays below the upper threshold. A pool does not change while workers of its
    model start.

    `of_prefill`, `of_others`: the upper and the lower threshold. `are_reached`: a load that is equal to one of them
    counts as beyond it, as for Dynamo's target `load`.
    """

    LIMITS: ClassVar = {"throughput": ((1.0, 0.1), (1.0, 0.6)), "latency": ((0.1, 0.0), (0.4, 0.1))}
    """The thresholds of prefill workers, and of others, by target."""

    def __init__(
        self,
        *,
        of_prefill: tuple[float, float] | None,
        of_others: tuple[float, float],
        are_reached: bool,
        context: float,
        every_ns: int,
        least: int,
        most: int,
    ) -> None:
        super().__init__(every_ns=every_ns, least=least, most=most)
        self._of_prefill = of_prefill
        self._of_others = of_others
        self._are_reached = are_reached
        self._context = context

    def on_tick(self, state: FleetState) -> Decision:
        """Return the current number plus one, minus one, or unchanged, per pool."""
        targets: dict[str, int] = {}
        starting = {pool.model for pool in state.pools if pool.num_starting}
        for pool in state.pools:
            if pool.model not in starting:
                wanted = len(pool.active) + self._change(pool)
                targets[pool.name] = self.within(wanted)
        return Decision(targets, state.now_ns + self._every_ns)

    def limits_of(self, role: str) -> tuple[float, float]:
        """Return the upper and the lower threshold of workers with `role`. Raise ConfigError if they were not given."""
        limits = self._of_prefill if role == "prefill" else self._of_others
        if limits is None:
            raise ConfigError("needs prefill-up and prefill-down for prefill workers", field="scaler", hint=OF_LOAD)
        return limits

    def _change(self, pool: PoolState) -> int:
        is_prefill, n = pool.role == "prefill", len(pool.active)
        upper, lower = self.limits_of(pool.role)
        loads = [
            each.queued_tokens / self._context
            if is_prefill
            else (each.scheduled_tokens + each.queued_tokens) / each.capacity_tokens
            for each in pool.active
        ]
        counts_equal = self._are_reached
        if any(load >= upper if is_prefill or counts_equal else load > upper for load in loads):
            return 1
        has_little = all(load <= lower if counts_equal else load < lower or not load for load in loads)
        return -1 if n > 1 and has_little and max(loads) * n / (n - 1) < upper else 0


class TokenDemand(_Periodic):
    """Version 2 of llm-d's workload-variant autoscaler: as many workers as the tokens in use and in the queue need.

    A worker has 80 % of its tokens to offer. Workers are added until 85 % of what all offer, those that start included,
    is enough, and removed while 70 % of the rest is.
    """

    OFFERED, UP, DOWN = 0.8, 0.85, 0.7

    def on_tick(self, state: FleetState) -> Decision:
        """Return the target of each pool."""
        targets = {pool.name: self.within(self._needed(pool)) for pool in state.pools if pool.active}
        return Decision(targets, state.now_ns + self._every_ns)

    def _needed(self, pool: PoolState) -> int:
        demand = sum(each.scheduled_tokens + each.queued_tokens for each in pool.active)
        offered = self.OFFERED * sum(each.capacity_tokens for each in pool.active) / len(pool.active)
        num_needed, num_enough = ceil(demand / self.UP / offered - 1e-9), ceil(demand / self.DOWN / offered - 1e-9)
        if num_needed > pool.num_expected:
            return num_needed
        return pool.num_expected if pool.num_starting else min(pool.num_expected, num_enough)


def parse_scaler(text: str, pools: Mapping[str, str] | None = None) -> Scaler:
    """Parse a scaler: `script,30s=3:1,90s=1:3`, `queue,target=4`, `kv,target=70`, `dynamo,context=32768`, or `llm-d`.

    A script gives the numbers of prefill and decode workers from each time on, or one number for workers that do both.
    `pools`: the name of the only pool with a role, by role, where that is not the role itself.
    The others also accept `every`, `least` and `most`. Raise ConfigError for anything else.
    """
    name, *parts = (part.strip() for part in text.split(","))
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise ConfigError(f"{brief(part)} is not NAME=VALUE", field="scaler")
        if key in given:
            raise ConfigError(f"has {brief(key)} twice", field="scaler")
        given[key] = value
    if name == "script":
        return Scripted(_script(given, pools or {}))
    known: dict[str, dict[str, str]] = {
        "queue": {"target": "4", "stable": "240s"},
        "kv": {"target": "70", "stable": "240s"},
        "dynamo": {"every": "5s", "target": "throughput", "context": "", **dict.fromkeys(LOADS, "")},
        "llm-d": {"every": "60s"},
        "llm-d-v2": {"every": "60s"},
    }
    if name not in known:
        names = ", ".join(["script", *known])
        raise ConfigError(f"{brief(name)} is not known", field="scaler", hint=f"Known: {names}.")
    defaults = {"every": "15s", "least": "1", "most": "8", **known[name]}
    values = {**defaults, **given}
    unknown = sorted(set(values) - set(defaults))
    if unknown:
        raise ConfigError(f"{name} has no {brief(unknown[0])}", field="scaler", hint=f"Known: {', '.join(defaults)}.")
    every_ns = _ns(values["every"], "every")
    if not every_ns:
        raise ConfigError("every must be above 0", field="scaler")
    bounds = least, most = _count(values["least"], "least"), _count(values["most"], "most")
    if least > most:
        raise ConfigError(f"least is {least} and most is {most}", field="scaler", hint="Give least <= most.")
    if name == "dynamo":
        return _thresholds(values, every_ns, *bounds)
    if name.startswith("llm-d"):
        make = SpareCapacity if name == "llm-d" else TokenDemand
        return make(every_ns=every_ns, least=least, most=most)
    target = _number(values["target"], "target")
    if target <= 0:
        raise ConfigError("target must be above 0", field="scaler")
    return Proportional(
        of_kv=name == "kv",
        target=target,
        every_ns=every_ns,
        least=least,
        most=most,
        stable_ns=_ns(values["stable"], "stable"),
    )


LOADS = ("prefill-up", "prefill-down", "decode-up", "decode-down")
"""Thresholds of Dynamo's target `load`: queued prompt tokens of a prefill worker, percent of the KV of others."""


def _thresholds(values: Mapping[str, str], every_ns: int, least: int, most: int) -> Thresholds:
    target = values["target"]
    if target == "load":
        if values["context"]:
            raise ConfigError("context has no effect with target=load", field="scaler", hint="Leave it out.")
        of_prefill = _pair(values, "prefill") if values["prefill-up"] or values["prefill-down"] else None
        upper, lower = _pair(values, "decode", most=100)
        return Thresholds(
            of_prefill=of_prefill,
            of_others=(upper / 100, lower / 100),
            are_reached=True,
            context=1.0,
            every_ns=every_ns,
            least=least,
            most=most,
        )
    if target not in Thresholds.LIMITS:
        raise ConfigError(f"target: {brief(target)} is not throughput, latency or load", field="scaler")
    for key in LOADS:
        if values[key]:
            raise ConfigError(f"{key} has no effect with target={target}", field="scaler", hint="Add target=load.")
    if not values["context"]:
        hint = "Write dynamo,context=32768 with the context length of the model."
        raise ConfigError("dynamo needs a context", field="scaler", hint=hint)
    context = _number(values["context"], "context")
    if not context >= 1:
        raise ConfigError("context must be 1 or more", field="scaler")
    of_prefill, of_others = Thresholds.LIMITS[target]
    return Thresholds(
        of_prefill=of_prefill,
        of_others=of_others,
        are_reached=False,
        context=context,
        every_ns=every_ns,
        least=least,
        most=most,
    )


def _pair(values: Mapping[str, str], role: str, *, most: float = inf) -> tuple[float, float]:
    """Return the upper and the lower threshold that were given for `role`."""
    keys = f"{role}-up", f"{role}-down"
    for key in keys:
        if not values[key]:
            raise ConfigError(f"target=load needs {key}", field="scaler", hint=OF_LOAD)
    upper, lower = (_number(values[key], key) for key in keys)
    if not 0 <= lower < upper <= most:
        what = f"{keys[0]} is {upper:g} and {keys[1]} is {lower:g}"
        raise ConfigError(what, field="scaler", hint=f"Give 0 <= {keys[1]} < {keys[0]} <= {most:g}.")
    return upper, lower


def _script(given: Mapping[str, str], pools: Mapping[str, str]) -> list[tuple[int, dict[str, int]]]:
    steps: dict[int, dict[str, int]] = {}
    for when, numbers in given.items():
        roles = ("prefill", "decode") if ":" in numbers else ("mixed",)
        parts = numbers.split(":")
        if len(parts) != len(roles):
            raise ConfigError(f"{brief(numbers)} is not P:D", field="scaler", hint="Write script,30s=3:1,90s=1:3.")
        at_ns = _ns(when, when)
        if at_ns in steps:
            raise ConfigError(f"has two steps at {at_ns / 1e9:g} s", field="scaler")
        steps[at_ns] = {pools.get(role, role): _count(part, when) for role, part in zip(roles, parts, strict=True)}
    if not steps:
        raise ConfigError("script has no step", field="scaler", hint="Write script,30s=3:1,90s=1:3.")
    return sorted(steps.items())


def _ns(text: str, what: str) -> int:
    try:
        return round(parse_duration_s(text) * 1e9)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.what}", field="scaler", hint=error.hint) from error


def _count(text: str, what: str) -> int:
    """Return a number of workers of a pool: 1 or more, since none of its requests could end without one."""
    number = _number(text, what)
    if not 1 <= number <= MOST_REPLICAS or number % 1:
        hint = f"Give a whole number from 1 to {MOST_REPLICAS:,}."
        raise ConfigError(f"{what}: {brief(text)} is not a number of workers", field="scaler", hint=hint)
    return int(number)


def _number(text: str, what: str) -> float:
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    raise ConfigError(f"{what}: {brief(text)} is not a number", field="scaler")
