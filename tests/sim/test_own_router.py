"""Routers of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvarts import ConfigError, ReplayConfig, load_trace, replay
from kvarts.request import Request
from kvarts.sim.router import LeastLoaded, PrefixAware, RoundRobin, Routed


class Last:
    """Sends everything to the last replica."""

    looks_at_engines = False

    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        return len(replicas) - 1


class Outside(Last):
    def choose(self, request: Request, replicas: Sequence[Routed]) -> int:
        return len(replicas)


class Silent:
    looks_at_engines = True


@pytest.mark.parametrize(
    ("name", "router"), [("round-robin", RoundRobin), ("least-loaded", LeastLoaded), ("prefix", PrefixAware)]
)
def test_a_router_by_its_class_is_that_of_its_name(name: Any, router: Any) -> None:
    trace = load_trace("sample:azure-chat")
    by_name, by_class = (replay(trace, ReplayConfig(replicas=3, router=each)) for each in (name, router))
    assert by_class.requests_jsonl() == by_name.requests_jsonl()
    assert by_class.summary["config"]["router"] == router.__name__


def test_a_router_decides() -> None:
    report = replay(load_trace("sample:azure-chat"), ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", replicas=3,
                                                                             router=Last))  # fmt: skip
    assert set(report.request_columns["replica"].tolist()) == {2}


@pytest.mark.parametrize(("router", "said"), [(Outside, "Outside chose 2"), (Silent, "Silent has no choose")])
def test_what_is_no_router_is_refused(router: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        replay(load_trace("sample:azure-chat"), ReplayConfig(replicas=2, router=router))
    assert caught.value.field == "router"
