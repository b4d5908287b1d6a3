"""Links: how long transfers take, alone and beside others."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.request import Request
from kvarts.core.sched.policy import NEVER_NS
from kvarts.core.tiers.links import FixedRate, Links, SharedLinks, StoreLinks
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, Role, Sharing, TransferMode
from kvarts.sim.fleet.handoff import Computed, Handoff
from kvarts.sim.fleet.layer_wise import LayerWise, LayerWiseLinks, SharedLayerWise
from kvarts.sim.replaying import replay
from kvarts.sim.traffic.trace import TraceRequest

from builders.case import Case, Row
from oracles.naive_store import NaiveJob
from oracles.naive_store import naive_ends as naive_store_ends

GB_PER_S = 1e9  # a byte a nanosecond


def handoff(index: int, source: int, target: int) -> Handoff:
    request = Request(index, Content(bytes(8), num_tokens=1, page_size=1, owner=index), 1, 1)
    found = Handoff(request, TraceRequest(index, 0, b"", 1, 1))
    found.source, found.target = source, target
    return found


def ends_of(links: Links, jobs: list[tuple[int, int, int, int]], looks: Iterable[int] = ()) -> dict[int, int]:
    """When each of the transfers (begin, source, target, bytes) ends. `looks`: further times at which one looks."""
    to_look = sorted(looks)
    coming = sorted(enumerate(jobs), key=lambda job: job[1][0])
    ends: dict[int, int] = {}
    while True:
        begin_ns = coming[0][1][0] if coming else NEVER_NS
        now_ns = min(begin_ns, links.next_ns())
        if now_ns == NEVER_NS:
            return ends
        while to_look and to_look[0] < now_ns:
            assert not links.take_ended(to_look.pop(0))
        ends.update({cast(Handoff, each).decode.index: now_ns for each in links.take_ended(now_ns)})
        while coming and coming[0][1][0] == now_ns:
            index, (_, source, target, num_bytes) = coming.pop(0)
            if links.begin(handoff(index, source, target), num_bytes, now_ns):
                ends[index] = now_ns


def naive_ends(jobs: list[tuple[int, int, int, int]]) -> dict[int, Fraction]:
    """The same for shared links, from event to event in exact numbers."""
    left: dict[int, Fraction] = {}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    coming = sorted(range(len(jobs)), key=lambda index: jobs[index][0])
    while left or coming:
        rates = {
            index: Fraction(
                1,
                max(
                    sum(jobs[other][1] == jobs[index][1] for other in left),
                    sum(jobs[other][2] == jobs[index][2] for other in left),
                ),
            )
            for index in left
        }
        times = [now + left[index] / rates[index] for index in left]
        if coming:
            times.append(max(now, Fraction(jobs[coming[0]][0])))
        after = min(times)
        left = {index: left[index] - (after - now) * rates[index] for index in left}
        now = after
        ends.update({index: now for index in left if not left[index]})
        left = {index: rest for index, rest in left.items() if rest}
        while coming and jobs[coming[0]][0] <= now:
            index = coming.pop(0)
            left[index] = Fraction(jobs[index][3])
    return ends


def test_a_transfer_of_a_fixed_rate_has_it_for_itself() -> None:
    assert ends_of(FixedRate(GB_PER_S, 5), [(0, 0, 1, 100), (0, 0, 1, 100), (10, 0, 1, 30)]) == {0: 105, 1: 105, 2: 45}
    assert ends_of(FixedRate(None, 0), [(7, 0, 1, 100)]) == {0: 7}


@pytest.mark.parametrize(
    ("jobs", "ends"),
    [
        ([(0, 0, 1, 100)], {0: 100}),
        ([(0, 0, 1, 100), (0, 0, 2, 100)], {0: 200, 1: 200}),  # one sender
        ([(0, 0, 2, 100), (0, 1, 2, 100)], {0: 200, 1: 200}),  # one receiver
        ([(0, 0, 2, 100), (0, 1, 3, 100)], {0: 100, 1: 100}),  # nothing in common
        ([(0, 0, 1, 100), (50, 0, 2, 100)], {0: 150, 1: 200}),  # alone for a while
    ],
)
def test_transfers_of_a_worker_share_its_rate(jobs: list[tuple[int, int, int, int]], ends: dict[int, int]) -> None:
    assert ends_of(SharedLinks(GB_PER_S, 0), jobs) == ends
    later = {index: end + 7 for index, end in ends.items()}
    assert ends_of(SharedLinks(GB_PER_S, 7), jobs) == later


@pytest.mark.parametrize(
    ("jobs", "ends"),
    [
        ([(0, 0, 2, 100), (0, 1, 3, 100)], {0: 200, 1: 200}),  # workers of one pool send
        ([(0, 0, 2, 100), (0, 3, 1, 100)], {0: 100, 1: 100}),  # both directions
        ([(0, 0, 1, 100), (0, 1, 0, 100)], {0: 200, 1: 200}),  # in a pool
    ],
)
def test_transfers_of_a_pool_share_its_rate(jobs: list[tuple[int, int, int, int]], ends: dict[int, int]) -> None:
    assert ends_of(SharedLinks(GB_PER_S, 0, {0: 0, 1: 0, 2: 1, 3: 1}), jobs) == ends


@pytest.mark.laws
@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 2), st.integers(3, 5), st.integers(1, 1000)),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.integers(0, 3000)),
)
def test_shared_links_are_as_exact_sharing(jobs: list[tuple[int, int, int, int]], looks: list[int]) -> None:
    """A transfer ends within a nanosecond for each that ended before it; and at the same time if one looks between."""
    third = ends_of(SharedLinks(GB_PER_S / 3, 0), jobs)
    assert ends_of(SharedLinks(GB_PER_S / 3, 0), jobs, looks) == third
    mine, exact = ends_of(SharedLinks(GB_PER_S, 0), jobs), naive_ends(jobs)
    assert mine.keys() == exact.keys()
    for index, end_ns in mine.items():
        assert -1e-3 <= end_ns - exact[index] <= 2 * len(jobs)


@pytest.mark.laws
@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 1), st.integers(2, 3), st.integers(1, 1000)),
        min_size=1,
        max_size=4,
    ),
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(4, 5), st.integers(6, 7), st.integers(1, 1000)),
        min_size=1,
        max_size=6,
    ),
)
def test_transfers_elsewhere_change_nothing(
    jobs: list[tuple[int, int, int, int]], elsewhere: list[tuple[int, int, int, int]]
) -> None:
    """To the nanosecond, at a rate that no float holds exactly."""
    alone, beside = (ends_of(SharedLinks(GB_PER_S / 10, 0), each) for each in (jobs, jobs + elsewhere))
    assert {index: beside[index] for index in alone} == alone


Step = tuple[int, int, int]
"""How long after the one before it a step begins, how long it takes, and the bytes of KV that it computes."""
Prompt = tuple[int, int, int, list[Step]]
"""When the transfer of a prompt begins, its ends, and the steps that compute it, the first of them at time 0."""


def computed_in(steps: list[Step]) -> list[Computed]:
    computed, now_ns = [], -steps[0][0]
    for after_ns, duration_ns, num_bytes in steps:
        computed.append(Computed(now_ns + after_ns, now_ns + after_ns + duration_ns, num_bytes))
        now_ns = computed[-1].end_ns
    return computed


def layer_wise_ends(links: LayerWiseLinks, prompts: list[Prompt], looks: Iterable[int] = ()) -> dict[int, int]:
    """When each transfer ends. Links learn of a step when it begins. `looks`: further times at which one looks."""
    happens: list[tuple[int, int, int]] = [(at_ns, index, -1) for index, (at_ns, _, _, _) in enumerate(prompts)]
    of_prompts = [computed_in(steps) for _, _, _, steps in prompts]
    for index, steps in enumerate(of_prompts):
        happens += [(computed.start_ns, index, place) for place, computed in enumerate(steps)]
    happens.sort(key=lambda each: (each[0], each[2] < 0, each))  # nothing is sent before anything is computed
    handoffs = [handoff(index, source, target) for index, (_, source, target, _) in enumerate(prompts)]
    to_look, ends, begun = sorted(looks), dict[int, int](), set[int]()
    while True:
        now_ns = min(happens[0][0] if happens else NEVER_NS, links.next_ns())
        if now_ns == NEVER_NS:
            return ends
        while to_look and to_look[0] < now_ns:
            assert not links.take_ended(to_look.pop(0))
        ends.update({cast(Handoff, each).decode.index: now_ns for each in links.take_ended(now_ns)})
        while happens and happens[0][0] == now_ns:
            _, index, place = happens.pop(0)
            if place < 0:
                links.begin(handoffs[index], sum(each.num_bytes for each in of_prompts[index]), now_ns)
                begun.add(index)
                continue
            handoffs[index].computed.append(of_prompts[index][place])
            if index in begun:
                links.supply(handoffs[index], of_prompts[index][place])


def naive_layer_wise_ends(prompts: list[Prompt], num_layers: int, *, is_shared: bool) -> dict[int, Fraction]:
    """The same at a byte a nanosecond, from layer to layer in exact numbers; `is_shared` by transfers of a worker."""
    coming: list[tuple[Fraction, int, int]] = []
    unsent = dict.fromkeys(range(len(prompts)), 0)
    for index, (at_ns, _, _, steps) in enumerate(prompts):
        for computed in computed_in(steps):
            duration_ns = computed.end_ns - computed.start_ns
            for layer in range(1, num_layers + 1):
                ready_ns = computed.start_ns + duration_ns * layer // num_layers
                num_bytes = computed.num_bytes * layer // num_layers - computed.num_bytes * (layer - 1) // num_layers
                coming.append((Fraction(max(at_ns, ready_ns)), index, num_bytes))
                unsent[index] += num_bytes
    coming.sort()
    now, ends = Fraction(0), dict[int, Fraction]()
    ready: dict[int, Fraction] = {}
    left = {index: Fraction(num_bytes) for index, num_bytes in unsent.items()}
    while coming or ready:
        rates = {
            index: Fraction(
                1, max(sum(prompts[other][end] == prompts[index][end] for other in ready) for end in (1, 2))
            )
            if is_shared
            else Fraction(1)
            for index in ready
        }
        times = [now + ready[index] / rates[index] for index in ready] + ([coming[0][0]] if coming else [])
        after = max(now, min(times))
        for index in list(ready):
            sent = (after - now) * rates[index]
            ready[index] -= sent
            left[index] -= sent
            if not ready[index]:
                del ready[index]
            if not left[index]:
                ends[index] = after
        now = after
        while coming and coming[0][0] <= now:
            _, index, num_bytes = coming.pop(0)
            if num_bytes:
                ready[index] = ready.get(index, Fraction(0)) + num_bytes
    return ends


steps = st.lists(
    st.tuples(st.sampled_from([0, 0, 30]), st.integers(1, 200), st.integers(1, 300)), min_size=1, max_size=3
)
prompts = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2), st.integers(3, 5), steps), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("at_ns", "computed", "end_ns"),
    [
        (0, [(0, 100, 40)], 110),  # the link is faster: the last of four layers remains
        (0, [(0, 100, 400)], 425),  # it is slower, and idle before the first layer is computed
        (50, [(0, 100, 400)], 450),  # two layers are computed before pages are reserved
        (500, [(0, 100, 400)], 900),
        (0, [(0, 100, 400), (0, 100, 4)], 429),
    ],
)
def test_what_remains_after_the_prompt_is_computed(at_ns: int, computed: list[Step], end_ns: int) -> None:
    for make in (LayerWise, SharedLayerWise):
        assert layer_wise_ends(make(GB_PER_S, 0, 4), [(at_ns, 0, 3, computed)]) == {0: end_ns}
        assert layer_wise_ends(make(GB_PER_S, 7, 4), [(at_ns, 0, 3, computed)]) == {0: end_ns + 7}


@pytest.mark.laws
@given(prompts, st.integers(1, 5), st.lists(st.integers(0, 3000)))
def test_layers_are_sent_exactly(prompts: list[Prompt], num_layers: int, looks: list[int]) -> None:
    """Alone to the nanosecond, shared within a nanosecond for each layer that was sent before."""
    alone = layer_wise_ends(LayerWise(GB_PER_S, 0, num_layers), prompts, looks)
    assert alone == naive_layer_wise_ends(prompts, num_layers, is_shared=False)
    shared = layer_wise_ends(SharedLayerWise(GB_PER_S, 0, num_layers), prompts, looks)
    assert shared == layer_wise_ends(SharedLayerWise(GB_PER_S, 0, num_layers), prompts)
    exact = naive_layer_wise_ends(prompts, num_layers, is_shared=True)
    num_sent = sum(len(computed) for _, _, _, computed in prompts) * num_layers
    assert shared.keys() == exact.keys()
    for index, end_ns in shared.items():
        assert -1e-3 <= end_ns - exact[index] <= 2 * num_sent


def store_ends(links: StoreLinks, jobs: list[NaiveJob], looks: Iterable[int] = ()) -> list[int]:
    """When each of `jobs` ends. `looks`: further times at which one looks."""
    to_look = sorted(looks)
    coming = sorted(enumerate(jobs), key=lambda job: job[1].begin_ns)
    ends = [-1] * len(jobs)
    while True:
        now_ns = min(coming[0][1].begin_ns if coming else NEVER_NS, links.next_ns())
        if now_ns == NEVER_NS:
            return ends
        while to_look and to_look[0] < now_ns:
            assert not links.take_ended(to_look.pop(0))
        for transfer in links.take_ended(now_ns):
            ends[transfer.number] = now_ns
        while coming and coming[0][1].begin_ns == now_ns:
            number, job = coming.pop(0)
            links.begin(job.worker, number, job.num_bytes, now_ns, is_read=job.is_read)


def test_a_store_is_as_fast_as_aisimulate_says() -> None:
    """Eight pages of 512 tokens; alone at 10 GB/s of the worker, and by two at 10 GB/s of the store."""
    num_bytes = 8 * 512 * 131_072
    assert store_ends(StoreLinks(80e9, 10e9, 100_000), [NaiveJob(0, 0, num_bytes, True)]) == [53_787_092]
    two = [NaiveJob(0, 0, num_bytes, True), NaiveJob(0, 1, num_bytes, True)]
    assert store_ends(StoreLinks(10e9, 10e9, 100_000), two) == [107_474_183, 107_474_183]
    apart = [NaiveJob(0, 0, num_bytes, True), NaiveJob(0, 0, num_bytes, False)]
    assert store_ends(StoreLinks(10e9, 10e9, 100_000), apart) == [53_787_092, 53_787_092]


@pytest.mark.laws
@given(
    st.lists(
        st.builds(NaiveJob, st.integers(0, 500), st.integers(0, 2), st.integers(1, 1000), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0, 40]),
    st.lists(st.integers(0, 3000)),
)
def test_transfers_share_a_store_exactly(
    jobs: list[NaiveJob], store_rate: int, worker_rate: int, latency_ns: int, looks: list[int]
) -> None:
    mine = store_ends(StoreLinks(store_rate * 1e9, worker_rate * 1e9, latency_ns), jobs)
    assert store_ends(StoreLinks(store_rate * 1e9, worker_rate * 1e9, latency_ns), jobs, looks) == mine
    for end_ns, exact in zip(mine, naive_store_ends(jobs, store_rate, worker_rate, latency_ns), strict=True):
        assert -1e-3 <= end_ns - exact <= 2 * len(jobs)


def test_transfers_of_a_worker_that_is_lost_leave_their_share_to_the_others() -> None:
    links = StoreLinks(1e9, 1e9, 0)
    for worker in (0, 1):
        links.begin(worker, worker, 100, 0, is_read=True)
    assert not links.take_ended(0)
    links.begin(0, 2, 100, 20, is_read=False)
    links.drop(0, 40)
    assert links.next_ns() == 120
    assert [transfer.worker for transfer in links.take_ended(120)] == [1]
    assert links.next_ns() == NEVER_NS


ROLES: tuple[Role, Role] = ("prefill", "decode")


@pytest.mark.parametrize("mode", ["full-prompt", "layer-wise"])
def test_two_prefill_workers_of_a_pool_share_its_link(mode: TransferMode) -> None:
    """Two prompts go to two workers of another pool at the same time."""
    rows = [Row(0, [index] * 100, 100, 2, None, 0, None) for index in range(2)]
    case = Case(rows, 1, 10, 100, 8192, 8, "default", 2)
    prefill, decode = (PoolConfig(role=role, each=case.config(replicas=2)) for role in ROLES)
    took_ms = {}
    for sharing in get_args(Sharing):
        config = FleetConfig(
            pools=(prefill, decode), bytes_per_s=1000, token_bytes=1, sharing=sharing, transfer=mode, layers=1
        )
        rows_of = replay(case.trace(), config).requests
        took_ms[sharing] = {
            round(end - begin) for begin, end in zip(rows_of["held_ms"], rows_of["activated_ms"], strict=True)
        }
    assert took_ms == {"none": {100}, "worker": {100}, "pool": {200}}
