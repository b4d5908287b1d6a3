"""Pages that a worker reads from the host memory of another: how long it takes, and what happens if that fails."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.base.settings import SettingError
from kvarts.core.kv.groups import PartGroup
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.links import PeerLinks
from kvarts.core.tiers.peers import PeerMemory
from kvarts.cost.polynomial import LinearCost
from kvarts.cost.simulated import PrefillCost
from kvarts.sim.config import ReplayConfig
from kvarts.sim.fleet import replay as fleet_replay
from kvarts.sim.fleet.config import FleetConfig, ModelPools, PoolConfig, StoreSettings
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.fleet.scaling import parse_scaler
from kvarts.sim.replaying import replay
from kvarts.sim.routers.directory import EventIndex
from kvarts.sim.routers.policies import PrefixAware
from kvarts.sim.routers.view import Asked, View
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import TraceRequest

from builders.case import Case, Row
from builders.fleet import ENDS, SCALERS, FleetCase, fleets, replayed_with
from builders.grouped import part_groups
from builders.laws import assert_steps_as_in_naive
from builders.tiered import Tiered, naive_settings, tiered, tiers_below
from oracles.naive import Batch, NaiveEngine, run_naive
from oracles.naive_peers import NaivePeerEngine, NaivePeers

MS = 1_000_000
TOKEN_BYTES = 1000
PAGE_MS = 1
RATE = TOKEN_BYTES * 10 * 1000
"""At this rate a page of ten tokens takes a millisecond, and ten to compute."""


def fleet_of(
    case: Case, *, num_workers: int = 2, host_pages: int = 1000, router: str = "round-robin", **settings: Any
) -> FleetConfig:
    offload = OffloadConfig(
        host_pages=host_pages, kv_bytes_per_token=TOKEN_BYTES, h2d=10**15, d2h=10**15, latency_us=0.0
    )
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    each = case.config(cost=cost, audit=True, offload=offload, replicas=num_workers, router=router)
    pool = PoolConfig(role="mixed", each=each)
    return FleetConfig(pools=(pool,), **{"pulls": True, "bytes_per_s": RATE, "token_bytes": TOKEN_BYTES, **settings})


def replayed(prompts: list[tuple[int, list[int]]], *, num_workers: int = 2, **settings: Any) -> FleetReport:
    """Of prompts at times in milliseconds, on workers in turn; a token takes a millisecond to compute."""
    rows = [Row(at_ms, units, len(units), 2, None, 0, None) for at_ms, units in prompts]
    case = Case(rows, 1, 10, 200, 8192, 8, "default", num_workers)
    report: FleetReport = replay(case.trace(), fleet_of(case, num_workers=num_workers, **settings))
    return report


def first_tokens(report: FleetReport) -> list[float]:
    return [float(value) for value in report.requests["first_token_ms"]]


A = [1] * 401


def test_a_worker_reads_what_another_has_in_host_memory() -> None:
    """40 pages take 40 ms, and the last token is computed."""
    report = replayed([(0, A), (1000, A)])
    assert first_tokens(report) == [401, 1041]
    assert report.summary["fleet"]["pulls"] == {
        "num_pulled_pages": 40, "pulled": [{"reader": 1, "source": 0, "pages": 40}]
    }  # fmt: skip
    assert list(report.requests["peers_tokens"]) == [0, 400]
    assert first_tokens(replayed([(0, A), (1000, A)], pulls=False)) == [401, 1401]


def test_it_takes_a_latency_and_is_not_worth_it_if_computing_is_sooner() -> None:
    assert first_tokens(replayed([(0, A), (1000, A)], latency_ms=7.0)) == [401, 1048]
    assert first_tokens(replayed([(0, A), (1000, A)], bytes_per_s=RATE / 100)) == [401, 1401]


@pytest.mark.parametrize(("sharing", "took_ms"), [("none", 41), ("worker", 81)])
def test_two_workers_share_what_a_third_sends(sharing: Literal["none", "worker"], took_ms: float) -> None:
    report = replayed([(0, A), (1000, A), (1000, A)], num_workers=3, sharing=sharing)
    assert first_tokens(report) == [401, 1000 + took_ms, 1000 + took_ms]


def test_the_worker_that_has_most_is_read_and_what_is_here_comes_first() -> None:
    """The fourth request is again on the first worker, which has 20 pages on its device."""
    longer = [1] * 301
    report = replayed([(0, [1] * 201), (1000, longer), (2000, [5] * 11), (3000, A[:351])], num_workers=3)
    assert list(report.requests["peers_tokens"]) == [0, 200, 0, 100]
    assert first_tokens(report)[3] == 3000 + 10 + 51
    pulled = report.summary["fleet"]["pulls"]["pulled"]
    assert pulled == [{"reader": 0, "source": 1, "pages": 10}, {"reader": 1, "source": 0, "pages": 20}]


@pytest.mark.parametrize("fault", [Fault("down", 0, 1020 * MS), Fault("cut", 0, 1020 * MS), Fault("cut", 1, 1020 * MS)])
def test_a_request_computes_what_does_not_arrive(fault: Fault) -> None:
    """L14."""
    report = replayed([(0, A), (1000, A)], faults=(fault,))
    assert first_tokens(report) == [401, 1020 + 401]
    assert report.summary["fleet"]["faults"]["num_failed_transfers"] == 1
    assert report.summary["fleet"]["pulls"]["num_pulled_pages"] == 0
    assert report.summary["num_completed"] == 2


def test_what_is_in_host_memory_here_is_kept_when_the_rest_fails() -> None:
    """Of 30 pages, 20 come from the host memory of the worker, and the others do not arrive."""
    prompts = [(0, [1] * 201), (500, [1] * 301), (2000, [7] * 1995), (3000, [3] * 11), (5000, [1] * 301)]
    report = replayed(prompts)
    assert [int(report.requests[name][4]) for name in ("host_tokens", "peers_tokens")] == [200, 100]
    assert first_tokens(report)[4] == pytest.approx(5000 + 10 + 1, abs=0.01)
    report = replayed(prompts, faults=(Fault("cut", 1, 5005 * MS),))
    assert [int(report.requests[name][4]) for name in ("host_tokens", "peers_tokens")] == [200, 0]
    assert first_tokens(report)[4] == 5005 + 101


def test_a_link_that_is_slow_takes_longer_and_one_that_is_cut_is_not_used() -> None:
    slow = (Fault("slow", 1, 1020 * MS, None, 3),)
    assert first_tokens(replayed([(0, A), (1000, A)], faults=slow)) == [401, 1000 + 20 + 60 + 1]
    cut = (Fault("cut", 0, 900 * MS),)
    report = replayed([(0, A), (1000, A)], faults=cut)
    assert first_tokens(report) == [401, 1401]
    assert report.summary["fleet"]["faults"]["num_failed_transfers"] == 0


def test_the_pages_stay_while_they_are_read() -> None:
    """L2: host memory that others fill is not evicted under a reader; the audit looks after each step."""
    prompts = [(0, A), (1000, A), (1001, [2] * 300), (1002, [3] * 300)]
    report = replayed(prompts, host_pages=45)
    assert list(report.requests["peers_tokens"])[1] == 400


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bytes_per_s": None}, "does not say how long it takes"),
        ({"token_bytes": 0}, "does not say how long it takes"),
        ({"store": StoreSettings(pages=10)}, "a store that workers share"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        replayed([(0, A)], **settings)


BUSY = [9] * 101
"""Its ten pages keep a worker busy."""


@pytest.mark.parametrize(("settings", "chosen"), [({}, 1), ({"pulls": False}, 0), ({"bytes_per_s": RATE / 100}, 0)])
def test_a_router_counts_what_reading_saves(settings: dict[str, Any], chosen: int) -> None:
    """Forty pages are on the first worker, which has ten more to compute. On the other one, reading saves 36 pages."""
    report = replayed([(0, A), (1000, BUSY), (1001, A)], router="prefix", **settings)
    assert [int(each) for each in report.requests["replica"]] == [0, 0, chosen]
    assert first_tokens(report)[2] == 1001 + 41 if chosen else True


class Looking:
    """The prefix router, which compares what it knows of other workers' pages with these."""

    memory: ClassVar[PeerMemory]
    needs = PrefixAware.needs

    def choose(self, asked: Asked, view: View) -> int:
        limit = (asked.num_tokens - 1) // view.page_size
        index = view.directory
        assert isinstance(index, EventIndex)
        starts = range(limit + 1)
        there = [tier.find for tier in self.memory.tiers.values()]
        expected = {start: max([find(asked.content, start, limit) for find in there], default=0) for start in starts}
        assert index.elsewhere(asked.content, starts, limit, "host") == expected
        return PrefixAware().choose(asked, view)


@pytest.mark.laws
@given(fleets(max_requests=40, cancels=True, faults=True, profile="default"), tiers_below())
def test_a_router_knows_what_workers_could_read(case: FleetCase, offload: OffloadConfig) -> None:
    """By events without lag, as a router that looks; workers fail meanwhile. All workers are behind it."""
    case.num_layers, case.rate, case.queue = 0, case.rate or 1e6, None
    each = case.case.config(replicas=3, offload=offload, router=Looking)
    down = tuple(fault for fault in case.faults if fault.worker < 3)
    fleet = FleetConfig(
        pools=(PoolConfig(role="mixed", each=each),), bytes_per_s=case.rate, token_bytes=1, pulls=True, faults=down
    )
    opened = fleet_replay.open_peers

    def open_and_look(config: FleetConfig, of_model: ModelPools, links: PeerLinks) -> Any:
        Looking.memory = memory = opened(config, of_model, links)  # type: ignore[assignment]
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_replay, "open_peers", open_and_look)
        report = replay(case.case.trace(), fleet)
    assert report.summary["num_requests"] == len(case.case.rows)


@given(
    st.integers(0, 5), st.integers(1, 12), st.integers(1, 20), st.sampled_from([0, 1, 7, 40, 1000]),
    st.sampled_from([0.1, 1.0, 3.0, 9.0, 12.0, 40.0]),
)  # fmt: skip
def test_what_reading_saves_is_what_is_computed_later_without_it(
    start: int, num_pages: int, num_rest: int, latency_ms: int, page_ms: float
) -> None:
    """As the naive workers have it: a page takes ten milliseconds to compute, and nothing is saved by waiting."""
    naive = NaivePeers(2, 10, Fraction(page_ms) * MS, latency_ms * MS, MS)
    tokens = [1] * ((start + num_pages) * 10 + num_rest)
    naive.devices[0] = {naive.name(tokens, count) for count in range(1, start + 1)}
    naive.hosts[1] = {naive.name(tokens, count) for count in range(1, start + num_pages + 1)}
    times, _ = naive.ask(0, tokens, set())
    memory = PeerMemory(1000, Any, latency_ms=float(latency_ms), bytes_per_s=1000 / page_ms * 1000)  # type: ignore[arg-type]
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    gain = memory.gain(PrefillCost(cost, token_budget=8192, pool_tokens=1000).prefill_ns, 10, "host")
    saved_ns = gain.saved_pages(start, num_pages, len(tokens)) * 10 * MS
    assert saved_ns >= max(0, times[0] - times[num_pages]) - 1000
    assert any(abs(times[0] - took_ns - saved_ns) < 1000 for took_ns in times)


@pytest.mark.laws
@given(
    fleets(max_requests=40, cancels=True, faults=True, profile="default"),
    st.sampled_from(SCALERS),
    st.booleans(),
    tiers_below(),
    st.sampled_from(["round-robin", "least-loaded", "prefix"]),
    st.none() | part_groups(),
)
def test_fast_forward_equals_step_by_step(
    case: FleetCase,
    policy: str | None,
    is_shared: bool,
    offload: OffloadConfig,
    router: str,
    groups: tuple[PartGroup, ...] | None,
) -> None:
    """L1 to L3 after each step, L5, L8 and L14, with workers that come, go and fail while others read from them."""
    case.num_layers = 0
    case.rate = case.rate or 1e6
    memory: dict[str, Any] = {"offload": offload, "router": router}
    if groups is not None:
        kept = "lazy" if offload.policy == "exclusive" else offload.policy
        offload = structs.replace(offload, policy=kept, full_prompt_hits=False, preemption_mode="recompute")
        memory |= {"offload": offload, "kv_groups": "all", "groups": groups}
    told: list[Any] = []
    for step_by_step in (False, True):
        settings = {"is_told": True, "step_by_step": step_by_step, "pulls": True}
        report, heard = replayed_with(case, policy, is_shared, memory, None, **settings)
        steps = {name: column.tobytes() for name, column in report.steps.items()}
        told.append((heard, report.requests_jsonl(), report.to_json(), steps))
        assert sum(report.summary[f"num_{end}"] for end in ENDS if f"num_{end}" in report.summary) == len(
            case.case.rows
        )
    assert told[0] == told[1]


A_TOKEN_A_MS = LinearCost(chunk_token_ms=1.0, decode_ms=1.0)


def a_token_a_ms(batch: Batch, engine: NaiveEngine) -> int:
    """Of the step that is planned, or of a prompt alone that is weighed."""
    num_tokens = engine.max_num_batched_tokens - engine.budget_left
    if batch.prefills and batch.prefills[0][0].seq < 0:
        num_tokens = sum(end - start for _, start, end in batch.prefills)
    return num_tokens * MS


@pytest.mark.laws
@given(
    tiered(max_requests=14),
    st.integers(2, 3),
    st.sampled_from([2_000.0, 1e6, 1e9]),
    st.sampled_from([0.0, 0.0, 3.0]),
)
def test_workers_and_their_tiers_are_as_the_naive_ones(
    tiers: Tiered, num_workers: int, rate: float, latency_ms: float
) -> None:
    """L1 to L4, L7, L8: requests, steps, evictions, and the contents of host memory, which others read."""
    case, offload = tiers.case, tiers.offload
    tiers.offload, case.profile, case.replicas = offload, "default", num_workers
    requests = case.naive_requests()
    naive = [
        NaivePeerEngine(
            index=index, rate=rate, link_ns=round(latency_ms * MS), link_page_bytes=case.page_size * 10,
            **{**naive_settings(tiers), "cost": a_token_a_ms},
        )
        for index in range(num_workers)
    ]  # fmt: skip
    for engine in naive:
        engine.engines, engine.all_names = naive, naive[0].all_names
    run_naive(requests, naive)

    pool = PoolConfig(
        role="mixed", each=case.config(audit=True, cost=A_TOKEN_A_MS, offload=offload, replicas=num_workers)
    )
    links: dict[str, Any] = {"pulls": True, "bytes_per_s": rate, "latency_ms": latency_ms, "token_bytes": 10}
    report: FleetReport = replay(case.trace(), FleetConfig(pools=(pool,), **links))
    rows = report.request_columns
    for index, request in enumerate(requests):
        if request.rejected:
            continue
        mine = {name: int(column[index]) for name, column in rows.items()}
        assert mine["replica"] == request.replica
        assert mine["first_admitted_ns"] == request.first_admitted_ns
        assert mine["first_token_ns"] == request.first_token_ns
        assert mine["last_token_ns"] == request.last_token_ns
        assert mine["cached_tokens"] == request.others_hit_tokens
        assert mine["preemptions"] == request.preemptions
        assert request.replica is not None
        names = ("host", "disk", "peers") if offload.disk_pages else ("host", "peers")
        below = naive[request.replica].below_tokens.get(request.seq, [0] * len(names))
        assert [mine[f"{name}_tokens"] for name in names] == below
    for index, engine in enumerate(naive):
        assert_steps_as_in_naive(report.step_logs[index], engine)
        steps = report.step_logs[index].columns
        assert steps["host_used"].tolist() == [count[0][0] for count in engine.counts]
        assert steps["host_cached"].tolist() == [count[0][1] for count in engine.counts]
    pulled = {(row["reader"], row["source"]): row["pages"] for row in report.summary["fleet"]["pulls"]["pulled"]}
    assert pulled == {
        (engine.index_of_engine, source): num_pages for engine in naive for source, num_pages in engine.pulled.items()
    }


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda units: [unit for unit in units for _ in range(7)]
)


@pytest.mark.laws
@given(
    st.lists(prompts, min_size=2, max_size=14),
    st.integers(1, 4),
    st.sampled_from([0, 3, 20]),
    st.sampled_from([500, 10_000, 77_777]),
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 3), st.sampled_from(["down", "cut"])), max_size=4),
)
def test_requests_one_by_one_read_what_the_naive_workers_do(
    prompts: list[list[int]], num_workers: int, latency_ms: int, rate: int, faults: list[tuple[int, int, str]]
) -> None:
    """A request a second, and faults of 100 ms half a second before one, or for it."""
    naive = NaivePeers(num_workers, 10, Fraction(10 * 1000 * 1_000_000_000, rate * 1000), latency_ms * MS, MS)
    script = {(at, worker, kind) for at, worker, kind in faults if worker < num_workers and at}
    script -= {(at, worker, "down") for at, worker, kind in script if kind == "cut"}
    events = tuple(
        Fault("down", worker, (at * 1000 - 500) * MS, (at * 1000 - 400) * MS)
        if kind == "down"
        else Fault("cut", worker, (at * 1000 - 500) * MS, (at * 1000 + 500) * MS)
        for at, worker, kind in sorted(script)
    )
    report = replayed(
        [(at * 1000, prompt) for at, prompt in enumerate(prompts)],
        num_workers=num_workers, latency_ms=float(latency_ms), bytes_per_s=rate * 1000, faults=events,
    )  # fmt: skip
    pulled: dict[tuple[int, int], int] = {}
    for at, prompt in enumerate(prompts):
        for when, worker, kind in script:
            if when == at and kind == "down":
                naive.lose(worker)
        cut = {worker for when, worker, kind in script if when == at and kind == "cut"}
        reader = int(report.requests["replica"][at])
        num_pages = int(report.requests["peers_tokens"][at]) // 10
        times, source = naive.ask(reader, prompt, cut)
        naive.end(reader, prompt, num_pages, len(times) - 1)
        assert first_tokens(report)[at] == pytest.approx(at * 1000 + times[num_pages] / MS), at
        assert num_pages or times[-1] >= times[0], "reading all of it is sooner than computing it"
        if num_pages:
            assert source is not None
            pulled[reader, source] = pulled.get((reader, source), 0) + num_pages
    rows = report.summary["fleet"]["pulls"]["pulled"]
    assert {(row["reader"], row["source"]): row["pages"] for row in rows} == pulled


def test_a_worker_that_was_removed_has_nothing_to_read() -> None:
    """The third worker, which a scaler removes, is the only one with all of a prompt whose beginning is on worker 0."""

    def replayed(replicas: int, script: str | None) -> tuple[int, int]:
        below = OffloadConfig(host_pages=400)
        each = ReplayConfig(num_pages=400, replicas=replicas, router="prefix", offload=below)
        prompt = range(1600)
        rows = [
            TraceRequest(0, 0, (range(160), range(10**5, 10**5 + 1440)), 1600, 200),
            TraceRequest(1, 1, (range(2 * 10**5, 2 * 10**5 + 1600),), 1600, 200),
            *([TraceRequest(2, 2, (prompt,), 1600, 200)] if replicas == 3 else []),
            TraceRequest(3, 60_000 * MS, (range(3 * 10**5, 3 * 10**5 + 80),), 20, 400),
            TraceRequest(4, 60_001 * MS, (prompt, range(10**7, 10**7 + 16)), 1616, 4),
        ]
        scaler = None if script is None else partial(parse_scaler, script)
        pools = (PoolConfig(role="mixed", each=each),)
        config = FleetConfig(
            pools=pools, bytes_per_s=1e12, latency_ms=5.0, pulls=True, token_bytes=131_072, scaler=scaler
        )
        requests = replay(Trace(rows), config).requests
        return int(requests["replica"][-1]), int(requests["cached_tokens"][-1])

    assert replayed(2, None) == replayed(3, "script,30s=2") == (0, 160)
