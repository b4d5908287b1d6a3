"""How many users fit: sessions of a trace as a closed loop, turn after turn, with the client's times between turns.

Each of so many users is in a session at any time; when it is over, the next session of the trace begins. For more
users than the trace has sessions, it is taken several times, as sessions that share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.plan.replays import share_kept
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay
from kvarts.traffic.editing import repeated
from kvarts.traffic.trace import Trace

__all__ = ["UsersPlan"]

Command = Callable[[int, int], str]
"""Answers what replays so many users, over so many copies of the trace."""


class UsersPlan:
    """Looks for the most users, from `low` to `high`, where `slo_share` of the requests keep the SLO of `config`."""

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
        self._found: dict[int, dict[str, Any]] = {}

    def to_builtins(self) -> dict[str, Any]:
        """Return the replays, the most users that keep the SLO, and the fewest found that do not, JSON-able."""
        fits = fails = None
        if self._has_slo:
            fits, fails = self._search()
        else:
            for users in sorted({self._low, (self._low + self._high) // 2, self._high}):
                self._replayed(users)
        return {
            "slo": {name: getattr(self._config.slo, name) for name in self._config.slo.__struct_fields__},
            "slo_share": self._slo_share if self._has_slo else None,
            "num_sessions": self._num_sessions,
            "fits": fits,
            "fails_at": fails,
            "points": [self._found[users] for users in sorted(self._found)],
        }

    def _search(self) -> tuple[int | None, int | None]:
        """Return the last that keeps it and the first that does not, next to each other; None where there is none.

        Doubling first, since many users are slow to replay; then bisection.
        """
        low, high = None, None
        users = self._low
        while high is None:
            if self._keeps(users):
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
            if self._keeps(middle):
                low = middle
            else:
                high = middle
        return low, high

    def _keeps(self, users: int) -> bool:
        kept: float = self._replayed(users)["slo_ratio"]
        return kept >= self._slo_share

    def _replayed(self, users: int) -> dict[str, Any]:
        if users not in self._found:
            if self._on_replay is not None:
                self._on_replay()
            copies = -(-users // self._num_sessions)
            trace = self._trace if copies == 1 else repeated(self._trace, copies)
            config = msgspec.structs.replace(self._config, concurrency=users, speedup=1.0)
            summary = replay(trace, config.certain).summary
            self._found[users] = {
                "users": users,
                "hit_ratio": summary["prefix_hit_ratio"],
                **{name: summary[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")},
                "request_throughput_per_s": summary["request_throughput_per_s"],
                "slo_ratio": share_kept(summary),
                "num_rejected": summary["num_rejected"],
                "limited_by": summary["limited_by"]["cause"],
                "command": self._command(users, copies),
            }
        return self._found[users]
