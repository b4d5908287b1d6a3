"""The outcome of a case: what it left in the logs, the engines and the events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarts.engine import Engine
from kvarts.events import Event
from kvarts.executor.simulated import SimExecutor
from kvarts.report.requests import RequestLog
from kvarts.report.steps import StepLog
from kvarts.sim.driver import Driver
from kvarts.sim.router import RoundRobin
from kvarts.traffic.source import OpenLoop

from builders.case import Case
from builders.kept import Kept
from builders.rooms import HAS_AUDIT


@dataclass
class Outcome:
    requests: RequestLog
    engines: list[Engine]
    steps: list[StepLog]
    events: list[list[Event]]


def run_kvarts(case: Case, **changes: Any) -> Outcome:
    """The case through kvarts, with page events and the audit on."""
    config = case.config(**{"audit": HAS_AUDIT, **changes})
    trace = case.trace()
    tiers = {} if config.offload is None else config.offload.tiers(config.page_size)
    requests = RequestLog(largest_hit_counts=config.profile == "mocker", tiers=tiers)
    steps = [StepLog(config.num_pages, tiers) for _ in range(config.replicas)]
    kept = [Kept() for _ in steps]
    engines = [
        Engine(
            config,
            SimExecutor(config.cost_model),
            sink=log,
            observers=[seen],
            step_by_step=config.step_by_step,
            audit=config.audit,
            offload=config.offload,
        )
        for log, seen in zip(steps, kept, strict=True)
    ]
    Driver(trace, OpenLoop(trace), engines, RoundRobin(), requests).run()
    return Outcome(requests, engines, steps, [seen.events for seen in kept])
