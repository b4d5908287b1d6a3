"""Routers of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvarts import ConfigError, ReplayConfig, load_trace, replay
from kvarts.sim.routers.policies import LeastLoaded, PrefixAware
from kvarts.sim.routers.view import Asked, Needs, View

MOST_WAITING: list[int] = []


class Last:
    """Sends everything to the last worker."""

    def choose(self, asked: Asked, view: View) -> int:
        return view.workers[-1]


class Reads(Last):
    """Keeps what it was told of waiting requests."""

    needs = Needs(metrics=True)

    def choose(self, asked: Asked, view: View) -> int:
        MOST_WAITING.append(max(view.metrics.waiting))
        return super().choose(asked, view)


class Outside(Last):
    def choose(self, asked: Asked, view: View) -> int:
        return len(view.workers)


class Misread:
    needs = "metrics"

    def choose(self, asked: Asked, view: View) -> int:
        return view.workers[0]


class Silent:
    needs = Needs()


@pytest.mark.parametrize(
    ("name", "router"), [("least-loaded", LeastLoaded), pytest.param("prefix", PrefixAware, marks=pytest.mark.slow)]
)
def test_a_router_by_its_class_is_that_of_its_name(name: Any, router: Any) -> None:
    trace = load_trace("sample:azure-chat")
    by_name, by_class = (replay(trace, ReplayConfig(replicas=3, router=each)) for each in (name, router))
    assert by_class.requests_jsonl() == by_name.requests_jsonl()
    assert by_class.summary["config"]["router"] == router.__name__


def test_a_router_decides() -> None:
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", replicas=3, router=Last)
    report = replay(load_trace("sample:azure-chat"), config)
    assert set(report.request_columns["replica"].tolist()) == {2}


def test_a_router_is_found_by_module_and_class() -> None:
    name = f"{__name__}:Last"
    report = replay(load_trace("sample:azure-chat"), ReplayConfig(replicas=3, router=name))
    assert set(report.request_columns["replica"].tolist()) == {2}
    assert report.summary["config"]["router"] == name


def test_a_router_gets_the_metrics_that_it_needs() -> None:
    MOST_WAITING.clear()
    replay(load_trace("sample:mooncake"), ReplayConfig(num_pages=65_536, replicas=2, router=Reads))
    assert max(MOST_WAITING) > 10


@pytest.mark.parametrize(
    ("router", "said"),
    [
        (Outside, "Outside chose 2"),
        (Silent, "Silent has no choose"),
        (Misread, "Misread has needs that are not a Needs: 'metrics'"),
        ("no.such.module:Router", "cannot be imported"),
        (f"{__name__}:Missing", "cannot be imported"),
        ("nearest", "must be one of round-robin, least-loaded"),
        ("llm-d:prefix", "llm-d has no option 'prefix'"),
        ("prefix:host_weight", "prefix has no option 'host_weight'"),
        ("llm-d:prefix=much", "llm-d: Expected `float | null`"),
        ("llm-d:queues=2", "llm-d has no option 'queues=2'"),
        ("llm-d:prefix=-1", "llm-d: prefix must be at least 0"),
        ("round-robin:next_turn=2", "round-robin has no option"),
    ],
)
def test_what_is_no_router_is_refused(router: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        replay(load_trace("sample:azure-chat"), ReplayConfig(replicas=2, router=router))
    assert caught.value.field == "router"


def test_an_option_without_a_value_names_no_code(
    run_command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("replay", "sample:azure-chat", "--replicas", 2, "--router", "prefix:host_weight") == 2
    assert "--router: prefix has no option 'host_weight'. Known: host_weight," in capsys.readouterr().err
