"""What observes a fleet while its workers leap sees what it would see if they made one step at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.base.errors import ConfigError
from kvarts.policies import Routing
from kvarts.sim.fleet.config import FleetConfig
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.fleet.scaling import Decision, FleetState, Scaler, parse_scaler
from kvarts.sim.replaying import replay
from kvarts.sim.routers.policies import POLICIES

from builders.case import Case, Row
from builders.fleet import FleetCase, fleets, of_requests, told_to
from builders.grouped import Told, group_settings
from builders.tiered import tiers_below

pytestmark = pytest.mark.laws

SCALERS = {
    "script": ("0s=2:1,0.05s=1:3,0.1s=3:1,0.2s=1:1",),
    "queue": ("target=1,every=0.03s,stable=0.1s", "target=3,every=0.011s,stable=0s,most=3"),
    "kv": ("target=40,every=0.05s,stable=0s,most=3", "target=10,every=0.013s,stable=0.03s"),
    "dynamo": (
        "context=20,every=0.03s",
        "context=100,every=0.011s,target=latency,most=3",
        "every=0.02s,target=load,prefill-up=20,prefill-down=3,decode-up=60,decode-down=20",
    ),
    "llm-d": ("every=0.04s", "every=0.007s,most=3"),
    "llm-d-v2": ("every=0.04s", "every=0.017s,most=4"),
}
"""Each scaler, with ticks while decodes run."""


class Recorded:
    """A scaler that keeps what it saw."""

    def __init__(self, scaler: Scaler, seen: list[FleetState]) -> None:
        self._scaler = scaler
        self._seen = seen

    def first_ns(self) -> int | None:
        return self._scaler.first_ns()

    def on_tick(self, state: FleetState) -> Decision:
        self._seen.append(state)
        return self._scaler.on_tick(state)


@st.composite
def routers(draw: st.DrawFn) -> dict[str, Any]:
    """Each policy, with metrics and events of any age that has an effect on it, with and without a queue."""
    router = draw(st.sampled_from(sorted(POLICIES)))
    lag: Any = draw(st.sampled_from([0, 0, "3ms", "40ms"]))
    routing = Routing(
        staleness=draw(st.sampled_from([None, 0, "7ms", "50ms"])),
        event_lag=lag,
        queue_threshold=draw(st.sampled_from([None, None, 0.0, 0.5, 2])),
    )
    for field, nothing in (("staleness", None), ("event_lag", 0)):
        try:
            routing.check(router)
        except ConfigError as error:
            if error.field == f"routing.{field}":
                routing = structs.replace(routing, **{field: nothing})
    return {"router": router, "routing": routing}


def test_every_scaler_is_drawn() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scaler("none")
    assert caught.value.hint == f"Known: {', '.join(SCALERS)}."


def observed(
    case: FleetCase, config: FleetConfig, policy: str, *, is_read: bool, step_by_step: bool
) -> tuple[FleetReport, list[FleetState], list[Any]]:
    """A replay, what its scaler saw, and what was told of its requests and pages."""
    seen: list[FleetState] = []
    told: dict[int, Told] = {}
    each = [structs.replace(pool, each=structs.replace(pool.each, step_by_step=step_by_step)) for pool in config.pools]
    config = structs.replace(config, pools=tuple(each), scaler=lambda: Recorded(parse_scaler(policy), seen))
    report = replay(case.case.trace(), config, observers_of=partial(told_to, told) if is_read else None)
    return report, seen, [of_requests(reader) for reader in told.values()]


def assert_seen_as_in_steps(case: FleetCase, config: FleetConfig, policy: str, *, is_read: bool) -> None:
    """L5, for every observer."""
    fast, seen, told = observed(case, config, policy, is_read=is_read, step_by_step=False)
    slow, seen_in_steps, told_in_steps = observed(case, config, policy, is_read=is_read, step_by_step=True)
    assert seen == seen_in_steps
    assert fast.requests_jsonl() == slow.requests_jsonl()
    assert fast.to_json() == slow.to_json()
    assert told == told_in_steps


@st.composite
def settings(draw: st.DrawFn) -> tuple[FleetCase, FleetConfig]:
    """A fleet with any router, and with KV groups, tiers, planning ahead and an audit, or without."""
    case = draw(fleets(max_requests=40, cancels=draw(st.booleans()), faults=draw(st.booleans())))
    changes: dict[str, Any] = draw(routers())
    if draw(st.booleans()):
        changes.update(draw(group_settings()))
        case.case.profile = "default"
    if draw(st.booleans()):
        has_groups = "groups" in changes
        changes["offload"] = draw(tiers_below(of_groups=has_groups, sync_loads=not has_groups))
    changes["async_scheduling"] = draw(st.booleans())
    config = structs.replace(case.config(**changes), startup_s=draw(st.sampled_from([0.0, 0.03])))
    if draw(st.booleans()):
        pools = tuple(structs.replace(pool, each=structs.replace(pool.each, audit=False)) for pool in config.pools)
        config = structs.replace(config, pools=pools)
    return case, config


of_scalers = st.sampled_from(sorted(SCALERS)).flatmap(
    lambda name: st.sampled_from([f"{name},{values}" for values in SCALERS[name]])
)


@given(settings(), of_scalers, st.booleans())
def test_leaps_equal_steps_for_whatever_observes_them(
    drawn: tuple[FleetCase, FleetConfig], policy: str, is_read: bool
) -> None:
    assert_seen_as_in_steps(*drawn, policy, is_read=is_read)


@pytest.mark.parametrize("name", ["llm-d-v2", "dynamo"])
def test_a_scaler_counts_the_tokens_of_the_step_under_way(name: str) -> None:
    """Three decodes leap when it ticks: it saw their tokens as they were when the leap began."""
    rows = [Row(0, [0, 1, 2, index], 16, 40, None, 0, None) for index in range(3)]
    case = FleetCase(Case(rows, 4, 4, 60, 64, 4, "default", 1), 1, 1, 60, 4, None, 0.0, only_missing=False)
    for values in SCALERS[name]:
        assert_seen_as_in_steps(case, case.config(), f"{name},{values}", is_read=False)
