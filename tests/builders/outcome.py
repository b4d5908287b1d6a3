"""The outcome of a case: what it left in the logs, the engines and the events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvarts.core.event_log import EventReader
from kvarts.core.events import Event
from kvarts.proof.evidence import timelines_of
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver, Runner
from kvarts.sim.replay import open_ranks, open_replica
from kvarts.sim.replica import Replica
from kvarts.sim.report.report import Report
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.report.steps import StepLog
from kvarts.sim.router import RoundRobin

from builders.case import Case
from builders.kept import Kept


@dataclass
class Outcome:
    requests: RequestLog
    engines: list[Replica]
    steps: list[StepLog]
    events: list[list[Event]]


def run_kvarts(case: Case, *, ranks: int = 1, **changes: Any) -> Outcome:
    """The case through kvarts, with page events and the audit on. `ranks`: the number of engines in lock step."""
    config = case.config(**{"audit": True, **changes})
    trace = case.trace()
    tiers = {} if config.offload is None else config.offload.sizes(config.page_size)
    requests = RequestLog(largest_hit_counts=config.profile == "mocker", tiers=tiers)
    steps = [StepLog(config.num_pages, tiers) for _ in range(config.replicas)]
    kept = [Kept() for _ in steps]
    readers: list[list[EventReader]] = [[log, seen] for log, seen in zip(steps, kept, strict=True)]
    runners: list[Runner] = []
    if ranks == 1:
        engines = [open_replica(config, each) for each in readers]
        runners += engines
    else:
        engines, runner = open_ranks(config, readers)
        runners.append(runner)
    router = RoundRobin(len(engines))
    arrivals = Arrivals(trace, config.source(trace), router, engines, requests, config=config)
    Driver([arrivals], runners, ranks=ranks).run()
    return Outcome(requests, engines, steps, [seen.events for seen in kept])


def timelines_json(report: Report) -> list[bytes]:
    """The timelines of `report`."""
    return [timeline.to_json() for timeline in timelines_of(report)]
