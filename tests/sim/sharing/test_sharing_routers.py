"""Routers of several models on several devices that read events: what they say without lag, and when they come."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sharing_groups_laws import Device, devices

from kvarts import ModelShare, ReplayConfig, SharingConfig, replay
from kvarts.core.content import pack_units
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.routers.config import Routing
from kvarts.sim.routers.policies import PrefixAware
from kvarts.sim.routers.view import Asked, View
from kvarts.sim.sharing import replay as sharing_replay
from kvarts.sim.traffic.trace import Trace, TraceRequest

from builders.grouped import FULL
from builders.told_routers import told_router

WINDOW = KvLayer(kind="window", num_heads=1, head_numbers=2, span=6)


@pytest.mark.laws
@given(devices(max_requests=14), st.integers(2, 3), st.sampled_from([None, 1, 8, 30]))
def test_events_without_lag_say_what_engines_say(case: Device, num_devices: int, host_pages: int | None) -> None:
    settings: dict[str, Any] = {"replicas": num_devices, "router": "prefix"}
    if host_pages is not None:
        settings["offload"] = OffloadConfig(host_pages=host_pages)
    asked = case.run(**settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing_replay, "make_router", told_router)
        told = case.run(**settings)
    for name, report in asked.reports.items():
        assert report.requests_jsonl() == told.reports[name].requests_jsonl()
    assert asked.to_json() == told.to_json()


class Noting:
    """The prefix router, which notes the pages that it sees."""

    seen: ClassVar[list[dict[int, tuple[int, ...]]]] = []
    needs = PrefixAware.needs

    def choose(self, asked: Asked, view: View) -> int:
        self.seen.append(dict(view.pages(asked, (asked.num_tokens - 1) // view.page_size)))
        return PrefixAware().choose(asked, view)


@pytest.mark.parametrize("groups", [(), (PartGroup(FULL, 2), PartGroup(WINDOW, 2))])
@pytest.mark.parametrize(("at_ms", "is_seen"), [(1499, True), (1500, False)])
def test_what_another_model_evicts_is_gone_after_the_lag(
    at_ms: int, is_seen: bool, groups: tuple[PartGroup, ...]
) -> None:
    """Its own last step was long ago when that happens."""

    def row(number: int, time_ms: int, unit: int, num_tokens: int) -> TraceRequest:
        return TraceRequest(number, time_ms * 1_000_000, pack_units([unit] * num_tokens), num_tokens, 1)

    share: dict[str, Any] = {
        "guarantee": "0B",
        "kv_bytes_per_token": None if groups else 4,
        "cost": LinearCost(1.0, 0.0, 0.0),
    }
    share |= {"kv_groups": "all", "groups": groups} if groups else {"kv_groups": "off"}
    config = SharingConfig(
        models={
            "a": ModelShare(cost=share["cost"], kv_bytes_per_token=1, kv_groups="off", guarantee="0B"),
            "b": ModelShare(**share),
        },
        kv_memory=4 * 4 * 10,
        each=ReplayConfig(page_size=4, replicas=2, router=Noting, routing=Routing(event_lag="500ms")),
    )
    Noting.seen.clear()
    others = [row(number, 1000, 7 + number, 159) for number in range(2)]
    prompts = [row(0, 0, 1, 33), row(1, at_ms, 1, 33)]
    replay({"a": Trace(others, unit_tokens=1), "b": Trace(prompts, unit_tokens=1)}, config)
    assert Noting.seen == [{}, {}, {}, {0: (8,)} if is_seen else {}]
