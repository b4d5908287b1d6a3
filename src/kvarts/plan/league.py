"""Comparison of eviction policies on one trace: hits one request at a time, and latencies under load.

Both use the engine's own tree and pool. With LRU, the hits one request at a time equal the curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvarts.base.processes import Processes
from kvarts.base.user_code import name_apart
from kvarts.plan.cache import HitPlan
from kvarts.plan.confidence import find_lead, lead_factors
from kvarts.plan.replays import share_kept, summary_of, worth, worth_of
from kvarts.sim.config import ReplayConfig
from kvarts.sim.eviction import MakeOrder, order_maker

__all__ = ["League", "spelled"]


def spelled(policy: Any) -> tuple[str, str | None]:
    """Return the name of a policy in a table, and how the command line spells it; None if it cannot."""
    if isinstance(policy, str):
        return policy, policy
    kind = policy if hasattr(policy, "__qualname__") else type(policy)
    name: str = kind.__qualname__
    is_importable = kind is policy and kind.__module__ != "__main__" and name.isidentifier()
    return name.rpartition(".")[2], f"{kind.__module__}:{name}" if is_importable else None


class League:
    """Comparison of policies on the trace of `plan`: at sizes one request at a time, and in replays under `config`.

    `policies`: names, module:Class, classes or objects; two of the same name are told apart by a number.
    `command` returns the command line that shows the hit ratio of a policy at a size; `replay_command` returns the one
    that replays it. `processes`: those that replay, which share the trace; default: this one.
    """

    def __init__(
        self,
        plan: HitPlan,
        policies: Sequence[Any],
        *,
        config: ReplayConfig | None = None,
        command: Callable[[str, int], str],
        replay_command: Callable[[str, int], str],
        on_replay: Callable[[], object] = lambda: None,
        processes: Processes | None = None,
    ) -> None:
        self._plan = plan
        self._processes = Processes(shared=plan.trace) if processes is None else processes
        self._makers: dict[str, MakeOrder] = {}
        self._spelled: dict[str, str | None] = {}
        policies = ("lru", *policies)
        for place, policy in enumerate(policies):
            if policy in policies[:place]:  # by equality, since an object may have no hash
                continue
            name, as_option = spelled(policy)
            name = name_apart(name, self._makers)
            self._makers[name] = order_maker(policy, plan.trace)
            self._spelled[name] = as_option
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
            self._on_replay()
        summaries = self._processes.all(summary_of, changed)
        return rows + [self._replayed(*case, summary) for case, summary in zip(cases, summaries, strict=True)]

    def lead(self, rows: Sequence[dict[str, Any]], cost_error: float) -> dict[str, Any] | None:
        """Return the replayed policy that gains most on LRU, and in how many worlds it is ahead; None without replays.

        `rows`: those of `to_builtins`. `cost_error`: relative error of costs.
        """
        replayed = {(row["policy"], row["pages"]): row for row in rows if "replayed" in row}
        others = [case for case in replayed if case[0] != "lru"]
        if self._config is None or not others:
            return None

        def gain(case: tuple[str, int]) -> tuple[float, float]:
            ours, of_lru = worth(replayed[case]), worth(replayed["lru", case[1]])
            return ours[0] - of_lru[0], ours[1] - of_lru[1]

        name, num_pages = best = max(others, key=gain)
        config = msgspec.structs.replace(self._config.certain, num_pages=num_pages)
        factors = lead_factors(cost_error)
        changed = [
            msgspec.structs.replace(config, eviction=self._makers[each], cost_factor=config.cost_factor * factor)
            for factor in factors
            for each in (name, "lru")
        ]
        for _ in changed:
            self._on_replay()
        found = [worth_of(summary) for summary in self._processes.all(summary_of, changed)]
        is_ahead = [ours > of_lru for ours, of_lru in zip(found[::2], found[1::2], strict=True)]
        confidence, times = find_lead(is_ahead, config.cost, cost_error)
        of_lru = replayed["lru", num_pages]
        return {
            "policy": name,
            "pages": num_pages,
            "is_ahead": worth(replayed[best]) > worth(of_lru),
            "ttft_ms_mean": {"policy": replayed[best]["ttft_ms"]["mean"], "lru": of_lru["ttft_ms"]["mean"]},
            "slo_ratio": {"policy": replayed[best]["slo_ratio"], "lru": of_lru["slo_ratio"]},
            "confidence": confidence,
            "sensitivity": {"step_times": times},
        }

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
            "command": self._command_of(self._command, name, num_pages),
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
            "command": self._command_of(self._replay_command, name, num_pages),
        }

    def _command_of(self, command: Callable[[str, int], str], name: str, num_pages: int) -> str | None:
        """Return the command line of a row; None for a policy that no command line can name."""
        as_option = self._spelled[name]
        return None if as_option is None else command(as_option, num_pages)
