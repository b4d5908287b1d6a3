"""Comparison of routers on one trace: hits, latencies and balance behind each, for several ages of their view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from kvarts.base.processes import Processes
from kvarts.base.settings import SettingError
from kvarts.plan.replays import share_kept
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import policy_of
from kvarts.sim.routers.view import Needs
from kvarts.sim.traffic.trace import Trace

__all__ = ["RoutersPlan"]

MOST_ROWS = 100


class RoutersPlan:
    """Replays of `trace` under `config` behind each of `routers`.

    `ages`: ages of a router's view, such as 50ms, applied to its metrics and to the cache events it receives. A router
    that uses neither is replayed once. `command` returns the command line of a replay, given its changes by setting
    key. `workers`: processes that replay. Raise ConfigError for an unknown router, and for more than MOST_ROWS
    replays.
    """

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        routers: Sequence[str],
        ages: Sequence[str] = (),
        *,
        command: Callable[[dict[str, Any]], str],
        workers: int | None = 1,
        on_replay: Callable[[], object] | None = None,
    ) -> None:
        if config.replicas < 2:
            raise SettingError("needs replicas to choose from", "routers", hint="Give {replicas} 2 or more.")
        if len(routers) * max(1, len(ages)) > MOST_ROWS:
            raise SettingError(f"are more than {MOST_ROWS} replays", "routers", hint="Compare fewer at a time.")
        self._trace = trace
        self._config = config.certain
        self._command = command
        self._num_workers = workers
        self._on_replay = on_replay
        routing = Routing() if config.routing is None else config.routing
        assert isinstance(routing, Routing)
        self._cases: list[tuple[str, str | None, Routing, dict[str, Any]]] = []
        for router in routers:
            needs = getattr(policy_of(router), "needs", Needs())
            fields = ["staleness"] * needs.metrics + ["event_lag"] * (needs.pages != "no")
            for age in ages or (None,) if fields else (None,):
                changes = {} if age is None else dict.fromkeys(fields, age)
                keys: dict[str, Any] = {f"routing.{field}": age for field in changes}
                seen = msgspec.structs.replace(routing, **changes)
                seen.check(router)
                self._cases.append((router, age, seen, {"router": router, **keys}))

    def to_builtins(self) -> dict[str, Any]:
        """Return a row per router and age, JSON-able."""
        configs = {
            str(place): msgspec.structs.replace(self._config, router=router, routing=routing)
            for place, (router, _, routing, _) in enumerate(self._cases)
        }
        found = {}
        with Processes(self._num_workers, self._trace) as processes:
            try:
                for place, row in processes.results(_replayed, configs):
                    found[int(place)] = row
                    if self._on_replay is not None:
                        self._on_replay()
            except KeyboardInterrupt:
                if not found:
                    raise
        return {
            "replicas": self._config.replicas,
            "slo": {name: getattr(self._config.slo, name) for name in self._config.slo.__struct_fields__},
            "is_complete": len(found) == len(configs),
            "points": [
                {"router": router, "age": age, **found[place], "command": self._command(changes)}
                for place, (router, age, _, changes) in enumerate(self._cases)
                if place in found
            ],
        }


def _replayed(trace: Trace, config: ReplayConfig) -> dict[str, Any]:
    """Replay a trace behind a router and return its row. Runs in other processes, too."""
    report = replay(trace, config)
    summary, columns = report.summary, report.request_columns
    tokens = np.bincount(
        np.maximum(columns["replica"], 0),
        weights=columns["input_tokens"] + columns["output_tokens"],
        minlength=config.replicas,
    )
    return {
        "hit_ratio": summary["prefix_hit_ratio"],
        "ttft_ms": summary["ttft_ms"],
        "tpot_ms": summary["tpot_ms"],
        "num_preemptions": summary["num_preemptions"],
        "most_to_mean_tokens": float(tokens.max() / tokens.mean()) if tokens.any() else None,
        "slo_ratio": share_kept(summary),
    }
