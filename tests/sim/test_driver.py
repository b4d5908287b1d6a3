"""The loop of a replay asks engines to which nothing came nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.replica import Replica
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.router import RoundRobin
from kvarts.sim.traffic.source import ClosedLoop

from builders.case import Case, Row
from builders.engines import make_replica


class Asked:
    """A runner that counts how often it is asked whether there is work."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.num_asked = 0

    @property
    def has_work(self) -> bool:
        self.num_asked += 1
        return self._replica.has_work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)


@pytest.mark.parametrize("num_replicas", [2, 40])
def test_idle_replicas_cost_nothing_at_an_event(num_replicas: int) -> None:
    rows = [Row(0, [index, index + 1], 2, 5, None, 0, None) for index in range(80)]
    case = Case(rows, 1, 1, 100, 16, 4, "default", num_replicas)
    trace = case.trace()
    replicas = [make_replica(case.config()) for _ in range(num_replicas)]
    runners = [Asked(replica) for replica in replicas]
    arrivals = Arrivals(
        trace,
        ClosedLoop(trace, concurrency=2),
        RoundRobin(num_replicas),
        replicas,
        RequestLog(largest_hit_counts=False),
    )
    Driver([arrivals], runners).run()
    # A request has a step for its prompt, the rest at once, and each may end while another is looked at.
    assert sum(runner.num_asked for runner in runners) < 10 * len(rows) + 2 * num_replicas
