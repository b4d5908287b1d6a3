"""How many users fit: sessions of a trace as a closed loop, with the client's delays between turns.

Each user is in one session at a time; when it ends, the user begins the next session of the trace. If there are more
users than sessions, the trace is repeated, as sessions that share nothing with the first copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Inquiry, Processes
from kvarts.plan.replays import guesses, share_kept
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay_one
from kvarts.sim.report.report import Report
from kvarts.sim.sessions import SessionReplay
from kvarts.sim.traffic.editing import repeated
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.trials import ReplayTrials

__all__ = ["UsersPlan"]

Command = Callable[[int, int, int, Mapping[str, Any]], str]
"""Returns the command that replays the given users, copies of the trace, bytes of host memory, and other settings."""

ROUTERS = ("prefix", "session")
EMPTY: Mapping[str, Any] = MappingProxyType({})


Found = TypeVar("Found")
_Task = tuple[int, ReplayConfig]
"""Copies of the trace, and how these are replayed."""


class _Load(msgspec.Struct, frozen=True, order=True):
    """The bytes of added host memory, and a number of users."""

    host_bytes: int
    users: int


class UsersPlan:
    """Search for the most users, `low` to `high`, with which `slo_share` of the requests keep the SLO of `config`.

    `workers`: processes that replay.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        low: int,
        high: int,
        *,
        command: Command,
        slo_share: float = 0.99,
        workers: int | None = 1,
        on_replay: Callable[[], object] | None = None,
    ) -> None:
        if not trace.has_sessions:
            raise ConfigError("a user needs sessions, and the trace has none", field="users")
        self._trace = trace
        self._config = config
        self._low, self._high = low, high
        self._command = command
        self._slo_share = slo_share
        self._on_replay = on_replay
        self._num_sessions = len({request.session_id or request for request in trace})
        self._has_slo = any(getattr(config.slo, field) is not None for field in config.slo.__struct_fields__)
        self._processes = Processes(workers, trace)
        self._found: dict[_Load, dict[str, Any]] = {}
        """The summaries of replays."""

    def to_builtins(self) -> dict[str, Any]:
        """Return the replays, the most users that keep the SLO, and the fewest found that do not, JSON-able.

        If a limit was found, `host` repeats the search with the host memory that keeps the hits of the failing number
        of users. It contains `memory_bytes`, and `hit_ratio` at that number of users, compared with `hit_ratio_without`
        host memory and `most_hit_ratio` with unlimited memory. It is null if host memory gains nothing or cannot be
        added. `options` are replays of the failing number of users, each with one more option: an eviction policy, a
        router, or KV that is pinned between turns.
        """
        found: dict[str, Any] = {"fits": None, "fails_at": None, "host": None, "options": []}
        is_complete = True
        with self._processes:
            try:
                self._search_through(found)
            except KeyboardInterrupt:
                if not self._found:
                    raise
                is_complete = False
                if found["fits"] is None and found["fails_at"] is None:
                    found |= self._bracket()
        return {
            "slo": {name: getattr(self._config.slo, name) for name in self._config.slo.__struct_fields__},
            "slo_share": self._slo_share if self._has_slo else None,
            "num_sessions": self._num_sessions,
            "num_devices": self._num_devices,
            **found,
            "points": self._points(0),
            "is_complete": is_complete,
        }

    def _search_through(self, found: dict[str, Any]) -> None:
        """Put the results of searches into `found`, one after the other."""
        if not self._has_slo:
            loads = [_Load(0, users) for users in sorted({self._low, (self._low + self._high) // 2, self._high})]
            self._asked(lambda asked: asked.all(loads))
            return
        fits, fails = self._search(0, self._low)
        found |= {"fits": fits, "fails_at": fails}
        if fails is not None:
            found["host"] = self._host(fits, fails)
            found["options"] = self._options(fails)

    def _bracket(self) -> dict[str, Any]:
        """Return the most users so far that keep the SLO, and the fewest above them that do not."""
        kept = {
            load.users: (share_kept(summary) or 0.0) >= self._slo_share
            for load, summary in self._found.items()
            if not load.host_bytes and self._has_slo
        }
        fits = max((users for users, keeps in kept.items() if keeps), default=None)
        missed = (users for users, keeps in kept.items() if not keeps and users > (fits or 0))
        return {"fits": fits, "fails_at": min(missed, default=None)}

    def _options(self, users: int) -> list[dict[str, Any]]:
        """Return a replay for each option that the configuration does not have, with the `option`."""
        config = self._config
        more: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        if "orders" not in config.features:
            more["--eviction auto"] = {"eviction": "auto"}, {"eviction": "auto"}
        if config.replicas > 1:
            for router in ROUTERS:
                if router != config.router:
                    more[f"--router {router}"] = {"router": router}, {"router": router}
        if config.sessions is None:
            pinned = SessionReplay(retention="pin")
            more["--set sessions.retention=pin"] = {"sessions": pinned}, {"sessions.retention": "pin"}
        tasks: dict[str, _Task] = {}
        for option, (fields, _) in more.items():
            with suppress(ConfigError):  # the rest of the configuration cannot have it
                tasks[option] = self._copies_for(users), self._config_of(users, fields)
        found = dict(self._processes.results(_summary_or_none, tasks))
        rows = []
        for option, (_, settings) in more.items():
            if self._on_replay is not None:
                self._on_replay()
            if found.get(option) is not None:
                rows.append({"option": option, **self._row(_Load(0, users), found[option], settings)})
        return rows

    @property
    def _num_devices(self) -> int:
        cost = self._config.cost
        each = getattr(cost, "tensor_parallel", 1) * getattr(cost, "pipeline_parallel", 1)
        return int(each) * self._config.replicas

    def _host(self, fits: int | None, fails: int) -> dict[str, Any] | None:
        """Return the number of users that fit with the host memory that keeps the hits of `fails` users."""
        config = self._config_of(fails, {})
        if config.tiers:
            return None
        trials = ReplayTrials(
            partial(_replayed, self._copies_for(fails)),
            self._trace,
            config,
            is_asked=True,
            on_replay=self._on_replay,
            processes=self._processes,
        )
        found = trials.host_memory(trials.replayed(0)) if trials.can_have_host_memory else None
        if found is None:
            return None
        host_bytes = found.num_bytes
        more, fails_at = self._search(host_bytes, fits or self._low)
        return {
            "memory_bytes": host_bytes,
            "hit_ratio_without": trials.replayed(0)["prefix_hit_ratio"],
            "hit_ratio": found.hit_ratio,
            "most_hit_ratio": found.most_hit_ratio,
            "fits": more,
            "fails_at": fails_at,
            "points": self._points(host_bytes),
        }

    def _points(self, host_bytes: int) -> list[dict[str, Any]]:
        return [self._row(load, self._found[load]) for load in sorted(self._found) if load.host_bytes == host_bytes]

    def _search(self, host_bytes: int, users: int) -> tuple[int | None, int | None]:
        """Return the last number that keeps the SLO and the first that does not; None if not found."""
        return self._asked(lambda asked: self._bisected(asked, host_bytes, users))

    def _bisected(self, asked: Inquiry[_Load], host_bytes: int, users: int) -> tuple[int | None, int | None]:
        """Start by doubling from `users`, since replays with many users are slow, then bisect."""

        def keeps(users: int) -> bool:
            share = share_kept(asked(_Load(host_bytes, users)))
            assert share is not None
            return share >= self._slo_share

        low, high = None, None
        while high is None:
            if keeps(users):
                low = users
                if users == self._high:
                    return low, None
                users = min(self._high, users * 2)
            else:
                high = users
        if low is None:
            return None, high
        while high - low > 1:
            middle = (low + high) // 2
            if keeps(middle):
                low = middle
            else:
                high = middle
        return low, high

    def _asked(self, search: Callable[[Inquiry[_Load]], Found]) -> Found:
        return self._processes.searched(
            search, _summary, self._task_of, _guess, found=self._found, on_ask=self._on_replay
        )

    def _copies_for(self, users: int) -> int:
        """Return the number of copies of the trace that have a session for each of `users`."""
        return -(-users // self._num_sessions)

    def _config_of(self, users: int, fields: Mapping[str, Any]) -> ReplayConfig:
        return msgspec.structs.replace(self._config, concurrency=users, speedup=1.0, **fields).certain

    def _task_of(self, load: _Load) -> _Task:
        config = self._config_of(load.users, {})
        if load.host_bytes:
            config = ReplayTrials(replay_one, self._trace, config).with_memory(load.host_bytes)
        return self._copies_for(load.users), config

    def _row(self, load: _Load, summary: dict[str, Any], settings: Mapping[str, Any] = EMPTY) -> dict[str, Any]:
        hours = summary["duration_ms"] / 3.6e6
        return {
            "users": load.users,
            "hit_ratio": summary["prefix_hit_ratio"],
            **{name: summary[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")},
            "request_throughput_per_s": summary["request_throughput_per_s"],
            "device_hours": hours * self._num_devices,
            "num_completed": summary["num_completed"],
            "slo_ratio": share_kept(summary),
            "num_rejected": summary["num_rejected"],
            "limited_by": summary["limited_by"]["cause"],
            "command": self._command(load.users, self._copies_for(load.users), load.host_bytes, settings),
        }


# Tasks, which also run in other processes


def _replayed(copies: int, trace: Trace, config: ReplayConfig) -> Report:
    return replay_one(trace if copies == 1 else repeated(trace, copies), config)


def _summary(trace: Trace, task: _Task) -> dict[str, Any]:
    copies, config = task
    return _replayed(copies, trace, config).summary


def _guess(_: _Load, known: Mapping[_Load, Any]) -> list[tuple[float, dict[str, Any]]]:
    return guesses(0.5, len(known))


def _summary_or_none(trace: Trace, task: _Task) -> dict[str, Any] | None:
    """Return the summary of a replay; None if the configuration turns out to be impossible."""
    try:
        return _summary(trace, task)
    except ConfigError:
        return None
