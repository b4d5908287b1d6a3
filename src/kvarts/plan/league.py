"""Comparison of eviction policies on one trace: hits one request at a time, and latencies under load.

Both use the engine's own tree and pool. With LRU, the hits one request at a time equal the curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Processes
from kvarts.base.user_code import code_named
from kvarts.core.kv.eviction import LruOrder
from kvarts.plan.auto_policy import AutoOrder
from kvarts.plan.cache import HitPlan, MakeOrder
from kvarts.plan.orders import HintedOrder, SoonestReturnOrder, finishing
from kvarts.plan.replays import share_kept, summary_of
from kvarts.sim.config import ReplayConfig
from kvarts.sim.traffic.trace import Trace

__all__ = ["ALL_POLICIES", "POLICIES", "League", "find_policy"]

POLICIES: dict[str, MakeOrder] = {
    "lru": LruOrder,
    "auto": AutoOrder,
    "soonest-return": SoonestReturnOrder,
    "hinted": HintedOrder,
}
"""Policies that need nothing beyond the calls of `EvictionOrder` and the hints of requests, by command-line names."""

SESSION_AWARE = "session-aware"
ALL_POLICIES = (*POLICIES, SESSION_AWARE)


class League:
    """Comparison of policies on the trace of `plan`: at sizes one request at a time, and in replays under `config`.

    `command` returns the command line that shows the hit ratio of a policy at a size; `replay_command` returns the one
    that replays it. `processes`: those that replay, which share the trace; default: this one.
    """

    def __init__(
        self,
        plan: HitPlan,
        policies: Sequence[str],
        *,
        config: ReplayConfig | None = None,
        command: Callable[[str, int], str],
        replay_command: Callable[[str, int], str],
        on_replay: Callable[[], object] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._plan = plan
        self._processes = Processes(shared=plan.trace) if processes is None else processes
        self._makers = {name: find_policy(name, plan.trace) for name in dict.fromkeys(("lru", *policies))}
        self._config = config
        self._command = command
        self._replay_command = replay_command
        self._on_replay = on_replay

    def to_builtins(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return a row for each size and policy, and with a `config` also rows of replays with latencies, JSON-able.

        Replays use the same sizes, capped at the pages of `config`.
        """
        cases = [(name, size) for size in sizes for name in self._makers]
        hits = self._plan.hits_under([(self._makers[name], size) for name, size in cases], self._processes)
        found = dict(zip(cases, hits, strict=True))
        rows = [self._row(*case, found[case], found["lru", case[1]]) for case in cases]
        if self._config is None:
            return rows
        config = self._config.certain
        replayed = sorted({min(size, config.num_pages) for size in sizes})
        cases = [(name, size) for size in replayed for name in self._makers]
        changed = [msgspec.structs.replace(config, eviction=self._makers[name], num_pages=size) for name, size in cases]
        for _ in cases:
            if self._on_replay is not None:
                self._on_replay()
        summaries = self._processes.all(summary_of, changed)
        return rows + [self._replayed(*case, summary) for case, summary in zip(cases, summaries, strict=True)]

    def _row(self, name: str, num_pages: int, hits: int, lru_hits: int) -> dict[str, Any]:
        plan, ratio_of = self._plan, self._plan.curve.ratio_of
        most = plan.most_hit_pages(num_pages)
        assert hits <= most, f"{name} finds more than the optimum"
        hit_ratio, of_lru, of_optimum = ratio_of(hits), ratio_of(lru_hits), ratio_of(most)
        gap = of_optimum - of_lru
        return {
            "policy": name,
            "pages": num_pages,
            "hit_ratio": hit_ratio,
            "lru_hit_ratio": of_lru,
            "optimum_hit_ratio": of_optimum,
            "gap_closed": (hit_ratio - of_lru) / gap if gap > 0 else None,
            "command": self._command(name, num_pages),
        }

    def _replayed(self, name: str, num_pages: int, summary: dict[str, Any]) -> dict[str, Any]:
        goodput = summary["goodput"]
        return {
            "policy": name,
            "pages": num_pages,
            "replayed": True,
            "hit_ratio": summary["prefix_hit_ratio"],
            "ttft_ms": summary["ttft_ms"],
            "goodput_per_s": None if goodput is None else goodput["requests_per_s"],
            "slo_ratio": share_kept(summary),
            "num_evicted_pages": summary["num_evicted_pages"],
            "command": self._replay_command(name, num_pages),
        }


def find_policy(name: str, trace: Trace | None) -> MakeOrder:
    """Return the factory of an order: a name of POLICIES, or `module:Class`. Raise ConfigError for anything else.

    The session-aware order takes the ends of sessions from `trace`; None where requests are not known beforehand.
    """
    if name == SESSION_AWARE and trace is not None:
        return finishing(trace)
    if name == SESSION_AWARE:
        raise ConfigError(
            f"{name!r} needs a trace, which has the ends of sessions",
            field="policy",
            hint="Give hinted, and let clients send a ttl.",
        )
    if name in POLICIES:
        return POLICIES[name]
    known = ", ".join(ALL_POLICIES)
    hint = f"Give one of {known}, or module:Class of an EvictionOrder that Python can import."
    if ":" not in name:
        raise ConfigError(f"{name!r} is not a policy", field="policy", hint=hint)
    try:
        make: MakeOrder = code_named(name)
    except ConfigError as error:
        raise ConfigError(error.what, field="policy", hint=hint) from error
    try:
        make().released  # noqa: B018  (found before anything is replayed)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{name!r} makes no EvictionOrder: {error}", field="policy", hint=hint) from error
    return make
