"""How many users fit: sessions of a trace as a closed loop, with the client's delays between turns.

Each user is in one session at a time; when it ends, the user begins the next session of the trace. If there are more
users than sessions, the trace is repeated, as sessions that share nothing with the first copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.plan.league import find_policy
from kvarts.plan.replays import share_kept
from kvarts.rooms import from_room
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay, replay_one
from kvarts.sim.trials import ReplayTrials
from kvarts.traffic.editing import repeated
from kvarts.traffic.trace import Trace

__all__ = ["UsersPlan"]

Command = Callable[[int, int, int, Mapping[str, Any]], str]
"""Returns the command that replays the given users, copies of the trace, bytes of host memory, and other settings."""

ROUTERS = ("prefix", "session")
EMPTY: Mapping[str, Any] = MappingProxyType({})


class UsersPlan:
    """Search for the most users, `low` to `high`, with which `slo_share` of the requests keep the SLO of `config`."""

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        low: int,
        high: int,
        *,
        command: Command,
        slo_share: float = 0.99,
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
        self._found: dict[tuple[int, int, str], dict[str, Any]] = {}
        """Replays, by bytes of added host memory, number of users, and the option that was added."""

    def to_builtins(self) -> dict[str, Any]:
        """Return the replays, the most users that keep the SLO, and the fewest found that do not, JSON-able.

        If a limit was found, `host` repeats the search with the host memory that keeps the hits of the failing number
        of users. It contains `memory_bytes`, and `hit_ratio` at that number of users, compared with `hit_ratio_without`
        host memory and `most_hit_ratio` with unlimited memory. It is null if host memory gains nothing or cannot be
        added. `options` are replays of the failing number of users, each with one more option: an eviction policy, a
        router, or KV that is pinned between turns.
        """
        fits = fails = host = None
        options: list[dict[str, Any]] = []
        if self._has_slo:
            fits, fails = self._search(0, self._low)
            if fails is not None:
                host = self._host(fits, fails)
                options = list(self._options(fails))
        else:
            for users in sorted({self._low, (self._low + self._high) // 2, self._high}):
                self._replayed(0, users)
        return {
            "slo": {name: getattr(self._config.slo, name) for name in self._config.slo.__struct_fields__},
            "slo_share": self._slo_share if self._has_slo else None,
            "num_sessions": self._num_sessions,
            "num_devices": self._num_devices,
            "fits": fits,
            "fails_at": fails,
            "points": self._points(0),
            "host": host,
            "options": options,
        }

    def _options(self, users: int) -> Iterator[dict[str, Any]]:
        """Yield a replay for each option that the configuration does not have, with the `option`."""
        config = self._config
        more: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        if "orders" not in config.features:
            more["--eviction auto"] = {"eviction": find_policy("auto", self._trace)}, {"eviction": "auto"}
        if config.replicas > 1:
            for router in ROUTERS:
                if router != config.router:
                    more[f"--router {router}"] = {"router": router}, {"router": router}
        if config.sessions is None:
            try:
                pinned = from_room("session.replay_settings", "SessionReplay", field="users")(retention="pin")
                more["--session-retention pin"] = {"sessions": pinned}, {"sessions.retention": "pin"}
            except ConfigError:
                pass
        for option, (fields, settings) in more.items():
            try:
                yield {"option": option, **self._replayed(0, users, option, fields, settings)}
            except ConfigError:
                continue  # the rest of the configuration cannot have it

    @property
    def _num_devices(self) -> int:
        """The devices of all replicas."""
        cost = self._config.cost
        each = getattr(cost, "tensor_parallel", 1) * getattr(cost, "pipeline_parallel", 1)
        return int(each) * self._config.replicas

    def _host(self, fits: int | None, fails: int) -> dict[str, Any] | None:
        """Return the number of users that fit with the host memory that keeps the hits of `fails` users."""
        trace, _ = self._sessions_of(fails)
        config = msgspec.structs.replace(self._config, concurrency=fails, speedup=1.0)
        trials = ReplayTrials(replay_one, trace, config, is_asked=True, on_replay=self._on_replay)
        if getattr(config.offload, "host_pages", None) or getattr(config.offload, "host_memory", None):
            return None
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
        return [self._found[key] for key in sorted(self._found) if key[0] == host_bytes and not key[2]]

    def _search(self, host_bytes: int, users: int) -> tuple[int | None, int | None]:
        """Return the last number that keeps the SLO and the first that does not; None if not found.

        Starts by doubling from `users`, since replays with many users are slow, then bisects.
        """
        low, high = None, None
        while high is None:
            if self._keeps(host_bytes, users):
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
            if self._keeps(host_bytes, middle):
                low = middle
            else:
                high = middle
        return low, high

    def _keeps(self, host_bytes: int, users: int) -> bool:
        kept: float = self._replayed(host_bytes, users)["slo_ratio"]
        return kept >= self._slo_share

    def _sessions_of(self, users: int) -> tuple[Trace, int]:
        """Return the sessions for `users`, and the number of copies of the trace in them."""
        copies = -(-users // self._num_sessions)
        return self._trace if copies == 1 else repeated(self._trace, copies), copies

    def _replayed(
        self,
        host_bytes: int,
        users: int,
        option: str = "",
        fields: Mapping[str, Any] = EMPTY,
        settings: Mapping[str, Any] = EMPTY,
    ) -> dict[str, Any]:
        """Return a replay; with an `option`, one with changed `fields` of the configuration, which are `settings`."""
        key = host_bytes, users, option
        if key not in self._found:
            if self._on_replay is not None:
                self._on_replay()
            trace, copies = self._sessions_of(users)
            config = msgspec.structs.replace(self._config, concurrency=users, speedup=1.0, **fields)
            if host_bytes:
                config = ReplayTrials(replay_one, trace, config).with_memory(host_memory=host_bytes)
            summary = replay(trace, config.certain).summary
            hours = summary["duration_ms"] / 3.6e6
            self._found[key] = {
                "users": users,
                "hit_ratio": summary["prefix_hit_ratio"],
                **{name: summary[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")},
                "request_throughput_per_s": summary["request_throughput_per_s"],
                "device_hours": hours * self._num_devices,
                "num_completed": summary["num_completed"],
                "slo_ratio": share_kept(summary),
                "num_rejected": summary["num_rejected"],
                "limited_by": summary["limited_by"]["cause"],
                "command": self._command(users, copies, host_bytes, settings),
            }
        return self._found[key]
