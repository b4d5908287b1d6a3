"""The report of a replay on a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import msgspec

from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.fleet.handoff import TIMES
from kvarts.sim.fleet.pool import Pool
from kvarts.sim.report.distributions import NS_PER_MS, distribution_ms
from kvarts.sim.report.report import EngineTotals, Report, latencies_of
from kvarts.sim.report.requests import COMPLETED, RequestLog, of_prompts
from kvarts.sim.report.steps import StepLog
from kvarts.sim.traffic.trace import Trace

__all__ = ["FleetReport"]

WAITS = (
    ("prefill_queue_ms", "arrival_ns", "prefill_admitted_ns"),
    ("prefill_ms", "prefill_admitted_ns", "held_ns"),
    ("reservation_ms", "held_ns", "reserved_ns"),
    ("transfer_ms", "reserved_ns", "activated_ns"),
    ("decode_queue_ms", "activated_ns", "decode_admitted_ns"),
    ("first_step_ms", "decode_admitted_ns", "first_token_ns"),
)
"""The parts of the time to first token, with the start and end of each."""


class FleetOutcome(msgspec.Struct, frozen=True):
    """The outcome of a fleet that its engines do not record. `deadlocks`: time, worker, and the request that failed.

    `models`: those that requests were sent to by their names; empty if all went to any worker. `stores`, `pulls`: of
    each of them, or one of all. `pools`: in the order of those of the configuration.
    """

    models: Sequence[str]
    stores: Sequence[Mapping[str, Any]]
    pulls: Sequence[Mapping[str, Any]]
    deadlocks: Sequence[tuple[int, int, str]]
    num_faults: int
    num_failed_transfers: int
    pools: Sequence[Pool]


class FleetReport(Report):
    """The outcome of a replay on a fleet."""

    config: FleetConfig

    def __init__(
        self,
        trace: Trace,
        config: FleetConfig,
        requests: RequestLog,
        steps: Sequence[StepLog],
        engines: Sequence[EngineTotals],
        outcome: FleetOutcome,
    ) -> None:
        super().__init__(trace, config, requests, steps, engines)
        self._tiers = config.tier_names
        self._outcome = outcome
        self._models = outcome.models

    @cached_property
    def requests(self) -> dict[str, Any]:
        """One row per request, in arrival order."""
        raw = self._request_log.columns
        columns = dict(super().requests)
        for name in TIMES:
            times_ns = raw[name]
            values = times_ns / NS_PER_MS
            values[times_ns < 0] = float("nan")
            columns[name.removesuffix("_ns") + "_ms"] = values
        columns["prefill_replica"] = raw["source"]
        columns["transferred_bytes"] = raw["num_bytes"]
        columns["restarts"] = raw["num_restarts"]
        if self._models:
            columns["model"] = [None if place < 0 else self._models[place] for place in raw["model"].tolist()]
        return columns

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The whole report as one JSON-able value."""
        return {**super().summary, "fleet": self._fleet()}

    @cached_property
    def advice(self) -> str | None:
        """None: advice exists only for single pools."""
        return None

    def _worker_ns(self, duration_s: float) -> float:
        """Return the time of all workers together, those that a scaler adds included."""
        if self.config.scaler is None:
            return super()._worker_ns(duration_s)
        return sum(lives.worker_ns(round(duration_s * 1e9)) for lives in self._outcome.pools)

    def _fleet(self) -> dict[str, Any]:
        raw = self._request_log.as_ended
        waits = {}
        if any(pool.role != "mixed" for pool in self.config.pools):
            is_handed = (raw["status"] == COMPLETED) & (raw["held_ns"] > -1)
            times = dict.fromkeys(name for _, start, end in WAITS for name in (start, end))
            handed = {name: raw[name][is_handed] for name in times}
            # Pages that are reserved before the prompt is computed are not waited for.
            handed["reserved_ns"] = _no_earlier(handed["reserved_ns"], handed["held_ns"])
            waits = {name: distribution_ms(_between(handed[start], handed[end])) for name, start, end in WAITS}
        pools = self._pools()
        return {
            "waits": waits,
            "pools": pools,
            **self._cost(pools),
            **({"models": self._of_models(raw)} if self._models else {}),
            **({} if self.config.least_remote is None else {"num_local_prefills": int((raw["is_local"] > 0).sum())}),
            "transferred_bytes": int(raw["num_bytes"].sum()),
            **self._of_each("store", self._outcome.stores),
            **self._of_each("pulls", self._outcome.pulls),
            **self._faults(raw),
            "num_deadlocks": len(self._outcome.deadlocks),
            "deadlocks": [
                {"at_ms": at_ns / NS_PER_MS, "replica": worker, "request_id": request}
                for at_ns, worker, request in self._outcome.deadlocks[:10]
            ],
        }

    def _cost(self, pools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the cost of all pools, in total and per output; empty without prices."""
        costs = [pool["cost"] for pool in pools if "cost" in pool]
        if not costs:
            return {}
        cost, summary = sum(costs), super().summary
        num_tokens, goodput = summary["num_output_tokens"], summary["goodput"]
        num_good = 0.0 if goodput is None else (goodput["requests_per_s"] or 0.0) * summary["duration_ms"] / 1e3
        return {
            "cost": cost,
            "cost_per_million_output_tokens": cost / num_tokens * 1e6 if num_tokens else None,
            "cost_per_thousand_good": cost / num_good * 1e3 if num_good else None,
        }

    def _of_each(self, name: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a part of the report that each model has; empty if none has it."""
        if not parts:
            return {}
        if not self._models:
            return {name: dict(parts[0])}
        return {name: [{"model": model, **part} for model, part in zip(self._models, parts, strict=True)]}

    def _of_models(self, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the latencies and the hits of the requests for each model."""
        found = []
        summary = super().summary
        for place, model in enumerate(self._models):
            is_mine = raw["model"] == place
            done = is_mine & (raw["status"] == COMPLETED)
            latencies = latencies_of(partial(_some, raw, done), self.config.slo)
            num_input, num_output = (int(raw[name][done].sum()) for name in ("input_tokens", "output_tokens"))
            num_cached = int(of_prompts(raw["cached_tokens"][done], raw["input_tokens"][done]).sum())
            duration_s = summary["duration_ms"] / 1e3
            found.append(
                {
                    "name": model,
                    "num_requests": int(is_mine.sum()),
                    "num_completed": int(done.sum()),
                    "num_input_tokens": num_input,
                    "num_output_tokens": num_output,
                    **latencies.distributions,
                    "goodput": self._goodput(latencies, duration_s),
                    "prefix_hit_ratio": self._hit_ratio(num_cached, num_input),
                }
            )
        return found

    def _faults(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the number of faults and their cost; empty if no faults were configured."""
        if not self.config.faults:
            return {}
        restarted = raw["num_restarts"] > 0
        return {
            "faults": {
                "num_faults": self._outcome.num_faults,
                "num_failed_transfers": self._outcome.num_failed_transfers,
                "num_restarted": int(restarted.sum()),
                "num_restarts": int(raw["num_restarts"].sum()),
                "recomputed_tokens": int(raw["recomputed_tokens"][restarted].sum()),
            }
        }

    def _pools(self) -> list[dict[str, Any]]:
        """Return utilization and cost per pool, summed over its workers."""
        pools = []
        summary = super().summary
        end_ns = round(summary["duration_ms"] * NS_PER_MS)
        for pool, lives in zip(self.config.pools, self._outcome.pools, strict=True):
            mine = [summary["replicas"][worker.index] for worker in lives.workers]
            busy_ms = sum(worker["busy_ms"] for worker in mine)
            worker_s = lives.worker_ns(end_ns) / 1e9
            gpu_hours = worker_s * devices_of(pool.each) / 3600
            pools.append(
                {
                    "name": pool.name,
                    "role": pool.role,
                    "replicas": [worker.index for worker in lives.workers],
                    "num_gpus": devices_of(pool.each),
                    "busy_pct": busy_ms / 1e3 / worker_s if worker_s else None,
                    "peak_used_pct": max(worker["peak_used_pct"] for worker in mine),
                    "num_preemptions": sum(worker["num_preemptions"] for worker in mine),
                    "worker_seconds": worker_s,
                    "mean_workers": worker_s / summary["duration_ms"] * 1e3 if summary["duration_ms"] else None,
                    "gpu_hours": gpu_hours,
                    **({} if pool.gpu_price is None else {"cost": gpu_hours * pool.gpu_price}),
                }
            )
        return pools


def devices_of(config: ReplayConfig) -> int:
    """Return the number of devices of a worker."""
    ways = (getattr(config.cost, name, 1) for name in ("tensor_parallel", "pipeline_parallel"))
    return prod(map(int, ways))


def _some(columns: Mapping[str, Any], are_meant: Any, name: str) -> Any:
    """Return a column of the requests that are meant."""
    return columns[name][are_meant]


def _between(start: Any, end: Any) -> Any:
    """Return the durations between two times, for requests that have both."""
    return (end - start)[(start > -1) & (end > -1)]


def _no_earlier(times: Any, least: Any) -> Any:
    """Return `times`, as far as there are any, or `least` where they are earlier."""
    late = times.copy()
    is_early = (times > -1) & (times < least)
    late[is_early] = least[is_early]
    return late
