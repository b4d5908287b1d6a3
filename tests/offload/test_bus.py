"""Channels that share a bus."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.config import EngineConfig
from kvarts.content import Content
from kvarts.errors import ConfigError
from kvarts.events import Event, LoadUsed, StepDone, TransferEnded
from kvarts.offload.bus import Bus, BusChannel
from kvarts.offload.channel import Channel
from kvarts.offload.config import OffloadConfig
from kvarts.rates import NEVER_NS
from kvarts.request import Request

from builders.engines import make_replica
from builders.kept import Kept
from builders.tiers import offloader_of
from oracles.naive_bus import NaiveLane, naive_bus_ends

pytestmark = pytest.mark.laws

NS_PER_S, NS_PER_MS = 1_000_000_000, 1_000_000

Lanes = list[tuple[int, int]]
"""Bytes per second and latency of each, in microseconds."""
Submitted = list[tuple[int, int, int]]
"""Time, lane, bytes."""

RATES = st.sampled_from([1_000, 70_000, 10**6, 10**9])
lanes_of = st.lists(st.tuples(RATES, st.sampled_from([0, 10, 5000])), min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Lanes, Submitted]:
    lanes = draw(lanes_of)
    one = st.tuples(st.integers(0, 10**9), st.integers(0, len(lanes) - 1), st.integers(1, 10**6))
    return draw(RATES), lanes, sorted(draw(st.lists(one, min_size=1, max_size=12)), key=lambda each: each[0])


def open_bus(bytes_per_s: int, lanes: Lanes) -> tuple[Bus, list[BusChannel]]:
    bus = Bus(bytes_per_s)
    return bus, [
        bus.open(f"lane {place}", latency_us=latency_us, bytes_per_s=rate)
        for place, (rate, latency_us) in enumerate(lanes)
    ]


def ends_of(bus: Bus, channels: list[BusChannel], submitted: Submitted, looks: list[int]) -> dict[int, int]:
    """When each ends. `looks`: further times at which one looks, and asks what else would take how long."""
    ends: dict[int, int] = {}
    coming, to_look = list(enumerate(submitted)), sorted(looks)
    while True:
        now_ns = min(coming[0][1][0] if coming else NEVER_NS, bus.next_ns())
        if now_ns == NEVER_NS:
            return ends
        while to_look and to_look[0] < now_ns:
            look_ns = to_look.pop(0)
            assert not bus.take_ended(look_ns)
            for channel in channels:
                assert channel.wait_ns(look_ns) >= 0 < channel.within_ns(look_ns, 100)
        ends.update({number: end_ns for end_ns, number in bus.take_ended(now_ns)})
        while coming and coming[0][1][0] <= now_ns:
            number, (_, place, num_bytes) = coming.pop(0)
            assert channels[place].submit(now_ns, num_bytes) == NEVER_NS
            bus.name(number)


@given(cases(), st.lists(st.integers(0, 10**9), max_size=5))
def test_every_end_is_as_in_the_naive_bus(case: tuple[int, Lanes, Submitted], looks: list[int]) -> None:
    bytes_per_s, lanes, submitted = case
    naive = naive_bus_ends(bytes_per_s, [NaiveLane(rate, latency_us * 1000) for rate, latency_us in lanes], submitted)
    found = ends_of(*open_bus(bytes_per_s, lanes), submitted, looks)
    assert found.keys() == naive.keys(), "all that was submitted ends, once"
    for number, end in naive.items():
        assert abs(found[number] - end) <= 4 * len(submitted) + end * 1e-9


@given(cases(), st.lists(st.integers(0, 10**9), max_size=5))
def test_what_is_looked_at_changes_nothing(case: tuple[int, Lanes, Submitted], looks: list[int]) -> None:
    bytes_per_s, lanes, submitted = case
    looked, unseen = (ends_of(*open_bus(bytes_per_s, lanes), submitted, each) for each in (looks, []))
    assert looked == unseen


@given(cases())
def test_a_bus_carries_no_more_than_it_can_and_no_less_than_one_lane_needs(case: tuple[int, Lanes, Submitted]) -> None:
    bytes_per_s, lanes, submitted = case
    ends = ends_of(*open_bus(bytes_per_s, lanes), submitted, [])
    took_ns = max(ends.values()) - submitted[0][0]
    assert sum(num_bytes for _, _, num_bytes in submitted) <= bytes_per_s * took_ns / 1e9 + 1
    for place in range(len(lanes)):
        mine = [ends[number] for number, each in enumerate(submitted) if each[1] == place]
        assert mine == sorted(mine), "a lane carries one after the other"


@given(st.tuples(RATES, st.sampled_from([0, 10, 5000])), cases())
def test_a_wide_bus_is_as_none(lane: tuple[int, int], case: tuple[int, Lanes, Submitted]) -> None:
    _, lanes, submitted = case
    ends = ends_of(*open_bus(10**13, lanes), submitted, [])
    channels = [Channel("alone", latency_us=latency_us, bytes_per_s=rate) for rate, latency_us in lanes]
    for number, (now_ns, place, num_bytes) in enumerate(submitted):
        assert abs(channels[place].submit(now_ns, num_bytes) - ends[number]) <= 4 * len(submitted) + ends[number] * 1e-9


@given(cases(), st.data())
def test_what_is_said_is_what_happens_if_nothing_follows(
    case: tuple[int, Lanes, Submitted], data: st.DataObject
) -> None:
    """How long a lane is busy; and for a lane that is alone, when one more transfer ends."""
    bytes_per_s, lanes, submitted = case
    bus, channels = open_bus(bytes_per_s, lanes)
    for number, (_, place, num_bytes) in enumerate(submitted):
        channels[place].submit(0, num_bytes)
        bus.name(number)
    until_ns = data.draw(st.integers(0, 10**8))
    ends = {number: end_ns for end_ns, number in bus.take_ended(until_ns)}
    busy_ns = [channel.busy_ns(until_ns) for channel in channels]
    foreseen = {number: bus.end_ns(number) for number in range(len(submitted)) if number not in ends}
    while bus.next_ns() < NEVER_NS:
        ends.update({number: end_ns for end_ns, number in bus.take_ended(bus.next_ns())})
    assert foreseen == {number: ends[number] for number in foreseen}
    for place, lane_ns in enumerate(busy_ns):
        mine = [ends[number] for number, each in enumerate(submitted) if each[1] == place]
        assert lane_ns == max(0, max(mine, default=0) - until_ns)
    since_ns = 10**12
    expected_ns = since_ns + channels[0].within_ns(since_ns, 5000)
    channels[0].submit(since_ns, 5000)
    bus.name(99)
    while bus.next_ns() < NEVER_NS:
        ends.update({number: end_ns for end_ns, number in bus.take_ended(bus.next_ns())})
    assert abs(ends[99] - expected_ns) <= 2


@given(cases())
def test_what_is_withdrawn_leaves_its_share_to_others(case: tuple[int, Lanes, Submitted]) -> None:
    bytes_per_s, lanes, submitted = case
    bus, channels = open_bus(bytes_per_s, lanes)
    for number, (_, place, num_bytes) in enumerate(submitted):
        channels[place].submit(0, num_bytes)
        bus.name(number)
    channels[submitted[-1][1]].withdraw(0, submitted[-1][2])
    ends = {}
    while bus.next_ns() < NEVER_NS:
        ends.update({number: end_ns for end_ns, number in bus.take_ended(bus.next_ns())})
    without = [(0, place, num_bytes) for _, place, num_bytes in submitted[:-1]]
    assert ends == ends_of(*open_bus(bytes_per_s, lanes), without, [])
    assert not any(channel.wait_ns(0) for channel in channels)


# A replay -------------------------------------------------------------------------------------------------


class SlowPrefill:
    """A token a second: loading pays."""

    def prefill_ns(self, start: int, end: int) -> int:
        return (end - start) * NS_PER_S


def loaded(num_new: int, **tier: Any) -> tuple[int, list[Event]]:
    """Load 60 pages for a prompt with `num_new` more, beside stores; each direction carries 100 pages a second.

    Return the time before, and the events.
    """
    kept = Kept()
    config = EngineConfig(num_pages=200, page_size=1, max_num_batched_tokens=256, max_num_seqs=4)
    below = OffloadConfig(host_pages=1000, latency_us=0.0, kv_bytes_per_token=1000, h2d=100_000, d2h=100_000, **tier)
    engine = make_replica(config, offload=below, readers=[kept], audit=True, prefill=SlowPrefill().prefill_ns)

    def submit(index: int, first: int, num_tokens: int) -> None:
        content = Content.from_tokens(list(range(first, first + num_tokens)), page_size=1, owner=index)
        engine.submit(Request(index, content, num_prompt_tokens=num_tokens, max_tokens=1), engine.now_ns)

    for index, (first, num_tokens) in enumerate([(0, 61), (1000, 199), (2000, 199)]):
        submit(index, first, num_tokens)
        engine.run_until(1 << 60, [])
    submit(3, 3000, 130)
    engine.run_until(engine.now_ns + 100 * NS_PER_MS, [])
    since_ns = engine.now_ns
    submit(4, 0, 60 + num_new)
    engine.run_until(1 << 60, [])
    engine.flush()
    assert all(channel.wait_ns(engine.now_ns) == 0 for channel in offloader_of(engine).channels)
    return since_ns, kept.events


def load_s(**tier: Any) -> float:
    """How long such a load takes, in seconds."""
    since_ns, events = loaded(1, **tier)
    (ended,) = [event for event in events if isinstance(event, TransferEnded) and event.request == 4]
    return (ended.time_ns - since_ns) / NS_PER_S


def test_on_a_bus_a_load_takes_longer_while_something_is_stored() -> None:
    """The stores take 1.3 seconds alone, and would take twice as long all the while: the load ends before."""
    assert load_s() == pytest.approx(0.6, abs=0.01)
    assert load_s(bus=1_000_000) == pytest.approx(0.6, abs=0.01)
    assert load_s(bus=100_000) == pytest.approx(1.2, abs=0.02)


@pytest.mark.parametrize("rate", ["0B/s", "fast"])
def test_what_is_no_bandwidth_is_refused(rate: str) -> None:
    with pytest.raises(ConfigError, match="bus"):
        OffloadConfig(host_pages=1, bus=rate)


def test_a_step_that_uses_layers_ends_after_a_load_that_stores_delay() -> None:
    """A step of 50 new tokens, which takes 50 seconds in the eyes of the engine, begins with the first layer."""
    end_s = {}
    for bus in (1_000_000, 100_000):
        since_ns, events = loaded(50, bus=bus, load_overlap="layers", num_layers=10)
        (used,) = [event for event in events if isinstance(event, LoadUsed)]
        (end_ns,) = [e.time_ns for e in events if isinstance(e, TransferEnded) and e.transfer == used.transfer]
        steps = [(e.start_ns, e.start_ns + e.duration_ns) for e in events if isinstance(e, StepDone)]
        (step,) = [step for step in steps if step[0] < end_ns <= step[1]]
        assert step[0] < end_ns - 0.25 * NS_PER_S
        assert end_ns <= step[1] < end_ns + 0.1 * NS_PER_S
        end_s[bus] = (end_ns - since_ns) / NS_PER_S
    assert end_s[1_000_000] == pytest.approx(0.6, abs=0.02)
    assert end_s[100_000] > 0.8
