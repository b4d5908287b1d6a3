"""A store that workers share: who waits for what, and when."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvarts.base.settings import SettingError
from kvarts.core.tiers.config import OffloadConfig
from kvarts.cost.polynomial import LinearCost
from kvarts.sim.fleet.config import FleetConfig, PoolConfig, StoreSettings
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.fleet.report import FleetReport
from kvarts.sim.replaying import replay

from builders.case import Case, Row
from builders.fleet import assert_of_own_requests
from builders.laws import assert_steps_as_in_naive
from builders.tiered import BYTES_PER_TOKEN, Tiered, naive_settings, tiered
from oracles.naive import Batch, NaiveEngine
from oracles.naive_store import NaiveStore, NaiveStoreEngine, NaiveStoreFleet, NaiveStoreLinks

MS = 1_000_000
PAGE_BYTES = 10 * 131_072


def replayed(
    rows: list[tuple[int, int]], *, store: StoreSettings | None, faults: tuple[Fault, ...] = ()
) -> FleetReport:
    """Of the same prompts, of so many tokens at a time in milliseconds, on two workers in turn; 1 ms a token."""
    of_rows = [Row(at_ms, [1] * num_tokens, num_tokens, 2, None, 0, None) for at_ms, num_tokens in rows]
    case = Case(of_rows, 1, 10, 200, 8192, 8, "default", 2)
    config: dict[str, Any] = {"cost": LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)}
    pool = PoolConfig(role="mixed", each=case.config(**config, audit=True))
    report: FleetReport = replay(case.trace(), FleetConfig(pools=(pool,), store=store, faults=faults))
    return report


def first_tokens(report: FleetReport) -> list[float]:
    return [float(value) for value in report.requests["first_token_ms"]]


PAGES_A_SECOND = 1000
STORE = StoreSettings(
    pages=100, rate=f"{PAGE_BYTES * PAGES_A_SECOND}B/s", worker_rate=f"{PAGE_BYTES * PAGES_A_SECOND}B/s", latency_us=0
)
"""A page takes a millisecond, and ten to compute."""


def test_a_worker_loads_what_another_has_stored() -> None:
    """401 tokens: 40 pages are loaded in 40 ms, and the last token is computed."""
    report = replayed([(0, 401), (1000, 401)], store=STORE)
    assert first_tokens(report) == [401, 1041]
    (loaded,) = report.summary["fleet"]["store"]["loaded"]
    assert loaded == {"reader": 1, "writer": 0, "pages": 40}
    assert list(report.requests["store_tokens"]) == [0, 400]
    assert first_tokens(replayed([(0, 401), (1000, 401)], store=None)) == [401, 1401]


def test_a_request_waits_for_pages_that_another_worker_is_storing() -> None:
    """The first prompt is computed at 401 ms and stored until 441 or so; the second needs 40 ms from there on."""
    report = replayed([(0, 401), (405, 401)], store=STORE)
    first, second = first_tokens(report)
    assert first == 401
    assert 480 < second < 490
    assert report.requests["store_tokens"][1] == 400


def test_a_request_does_not_wait_for_a_write_that_takes_longer_than_computing() -> None:
    slow = StoreSettings(pages=100, rate=STORE.rate, worker_rate=f"{PAGE_BYTES * 80}B/s", latency_us=0)
    assert first_tokens(replayed([(0, 401), (405, 401)], store=slow)) == [401, 806]


def test_a_request_computes_what_a_worker_that_fails_has_not_stored() -> None:
    """And the worker that comes up again finds in the store what it had stored before."""
    down = (Fault("down", 0, 420 * MS, 430 * MS),)
    report = replayed([(0, 401), (405, 401)], store=STORE, faults=down)
    assert 820 < first_tokens(report)[1] < 830
    assert report.summary["fleet"]["store"]["num_loaded_pages"] == 0
    later = (Fault("down", 0, 600 * MS, 700 * MS),)
    report = replayed([(0, 401), (405, 401), (1000, 401)], store=STORE, faults=later)
    assert first_tokens(report)[2] == 1041
    assert report.summary["fleet"]["store"]["loaded"][0] == {"reader": 0, "writer": 0, "pages": 40}


def test_a_request_computes_at_once_what_another_worker_gives_up_to_store() -> None:
    """The first worker needs the memory that the store holds, at 410 ms, for a step of 350 ms."""
    prompts = [[1] * 401, [1] * 401, [2] * 350]
    rows = [
        Row(at_ms, units, len(units), 2, None, 0, None) for at_ms, units in zip((0, 405, 410), prompts, strict=True)
    ]
    case = Case(rows, 1, 10, 45, 8192, 8, "default", 2)
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    rate = f"{PAGE_BYTES * 1000 // 3}B/s"
    store = StoreSettings(pages=100, rate=rate, worker_rate=rate, latency_us=0)
    for step_by_step in (False, True):
        each = case.config(cost=cost, audit=True, step_by_step=step_by_step)
        report = replay(case.trace(), FleetConfig(pools=(PoolConfig(role="mixed", each=each),), store=store))
        assert first_tokens(report) == [401, 811, 760]


@pytest.mark.parametrize("pages", [10, 40, 100])
def test_a_store_that_is_full_evicts_the_ends_of_old_prefixes(pages: int) -> None:
    of_size = StoreSettings(pages=pages, rate=STORE.rate, worker_rate=STORE.worker_rate, latency_us=0)
    report = replayed([(0, 401), (1000, 401)], store=of_size)
    store = report.summary["fleet"]["store"]
    assert store["num_cached_pages"] == min(pages, 40)
    assert store["num_loaded_pages"] == min(pages, 40)


def test_a_store_has_one_size() -> None:
    with pytest.raises(SettingError, match="is given beside"):
        StoreSettings(pages=1, memory="1GB")


@pytest.mark.parametrize(("overlap", "from_host_ms"), [("none", 212), ("layers", 202.1)])
def test_a_step_uses_the_layers_of_host_memory_early_and_not_those_of_the_store(
    overlap: Any, from_host_ms: float
) -> None:
    """201 new tokens take as many milliseconds, a tenth of them in each layer.

    The second worker loads 40 pages from the store, and the first 11 from its host memory, after another prompt.
    """
    prompts = [(0, [1] * 401), (1000, [1] * 601), (3000, [2] * 701), (4000, [3] * 11), (6000, [1] * 400 + [4] * 201)]
    rows = [Row(at_ms, units, len(units), 2, None, 0, None) for at_ms, units in prompts]
    case = Case(rows, 1, 10, 100, 8192, 8, "default", 2)
    offload = OffloadConfig(
        host_pages=1000,
        kv_bytes_per_token=PAGE_BYTES // 10,
        h2d=PAGE_BYTES * PAGES_A_SECOND,
        d2h=10**15,
        latency_us=0.0,
        load_overlap=overlap,
        num_layers=10,
    )
    cost = LinearCost(step_ms=0.0, chunk_token_ms=1.0, decode_ms=1.0)
    pool = PoolConfig(role="mixed", each=case.config(cost=cost, audit=True, offload=offload))
    report = replay(case.trace(), FleetConfig(pools=(pool,), store=STORE))
    assert list(report.requests["store_tokens"]) == [0, 400, 0, 0, 0]
    assert list(report.requests["host_tokens"])[4] == 110
    _, from_store, _, _, from_host = first_tokens(report)
    assert from_store == 1000 + 40 + 201
    assert from_host == pytest.approx(6000 + from_host_ms, abs=0.01)


A_TOKEN_A_MS = LinearCost(chunk_token_ms=1.0, decode_ms=1.0)


def a_token_a_ms(batch: Batch, engine: NaiveEngine) -> int:
    """Of the step that is planned, or of a prompt alone that is weighed."""
    num_tokens = engine.max_num_batched_tokens - engine.budget_left
    if batch.prefills and batch.prefills[0][0].seq < 0:
        num_tokens = sum(end - start for _, start, end in batch.prefills)
    return num_tokens * MS


RATES = st.sampled_from([100_000, 1_000_000, 5_000_000, 1_000_000_000, 1_000_000_000])
"""A token takes from a microsecond to 10 ms, and one to compute."""


def with_one_text(tiers: Tiered) -> Tiered:
    """Return `tiers` with prompts that begin alike, on workers that have many tokens to compute."""
    case = tiers.case
    longest = max((row.units for row in case.rows), key=len)
    for row in case.rows:
        row.units, row.tenant, row.priority = longest[: len(row.units)], None, 0
    case.num_pages += 20
    return tiers


@pytest.mark.laws
@given(
    tiered(max_requests=14).map(with_one_text) | tiered(max_requests=14),
    st.sampled_from([1, 4, 20]),
    RATES,
)
def test_a_worker_tells_of_its_own_requests(tiers: Tiered, num_pages: int, rate: int) -> None:
    """Also of pages that another worker's requests have as well, and that are in the store again."""
    tiers.case.profile, tiers.case.replicas = "default", 2
    each = tiers.case.config(cost=A_TOKEN_A_MS)
    store = StoreSettings(pages=num_pages, rate=f"{rate}B/s", worker_rate=f"{rate}B/s", latency_us=0)
    assert_of_own_requests(tiers.case, FleetConfig(pools=(PoolConfig(role="mixed", each=each),), store=store))


@pytest.mark.laws
@given(
    tiered(max_requests=14).map(with_one_text) | tiered(max_requests=14),
    st.booleans(),
    st.sampled_from([1, 2, 2, 3]),
    st.sampled_from([1, 4, 20, 200, 200]),
    st.tuples(RATES, RATES),
    st.sampled_from([0, 0, 100, 5000]),
)
def test_workers_that_share_a_store_are_as_the_naive_ones(
    tiers: Tiered, has_host: bool, num_workers: int, num_pages: int, rates: tuple[int, int], latency_us: int
) -> None:
    """L1 to L4, L7, L8: requests, steps, what is loaded from whom, and what is in the store at the end."""
    offload = structs.replace(tiers.offload, policy="eager", disk_pages=None)
    case, tiers.offload = tiers.case, offload
    case.profile, case.replicas = "default", num_workers
    page_bytes = BYTES_PER_TOKEN * case.page_size
    rate, worker_rate = rates
    links = NaiveStoreLinks(Fraction(rate, 10**9), Fraction(worker_rate, 10**9), latency_us * 1000)
    naive = NaiveStoreFleet(NaiveStore(num_pages), links, page_bytes)
    settings = {**naive_settings(tiers), "cost": a_token_a_ms, "swaps": has_host and offload.preemption_mode == "swap"}
    settings["tiers"] = settings["tiers"] if has_host else []
    naive.engines = [NaiveStoreEngine(index=index, fleet=naive, **settings) for index in range(num_workers)]
    for engine in naive.engines:
        engine.all_names = naive.engines[0].all_names
    requests = case.naive_requests()
    naive.run(requests)

    offload = offload if has_host else structs.replace(offload, host_pages=None)
    each = case.config(audit=True, cost=A_TOKEN_A_MS, offload=offload, replicas=num_workers)
    store = StoreSettings(pages=num_pages, rate=f"{rate}B/s", worker_rate=f"{worker_rate}B/s", latency_us=latency_us)
    fleet = FleetConfig(pools=(PoolConfig(role="mixed", each=each),), store=store)
    assert fleet.behind_routers(by_model=False)[0].stored_unit_bytes == page_bytes
    report: FleetReport = replay(case.trace(), fleet)
    rows = report.request_columns
    names = ("host", "store") if has_host else ("store",)
    for index, request in enumerate(requests):
        if request.rejected:
            continue
        mine = {name: int(column[index]) for name, column in rows.items()}
        assert request.replica is not None
        below = naive.engines[request.replica].below_tokens.get(request.seq, [0] * len(names))
        expected = {
            "replica": request.replica,
            "first_admitted_ns": request.first_admitted_ns,
            "first_token_ns": request.first_token_ns,
            "last_token_ns": request.last_token_ns,
            "cached_tokens": request.others_hit_tokens,
            "preemptions": request.preemptions,
            **{f"{name}_tokens": tokens for name, tokens in zip(names, below, strict=True)},
        }
        assert {name: mine[name] for name in expected} == expected, index
    for index, engine in enumerate(naive.engines):
        assert_steps_as_in_naive(report.step_logs[index], engine)
    used = report.summary["fleet"]["store"]
    assert {(row["reader"], row["writer"]): row["pages"] for row in used["loaded"]} == {
        (engine.index_of_engine, writer): count for engine in naive.engines for writer, count in engine.loaded.items()
    }
    assert used["num_cached_pages"] == naive.store.num_cached()
    assert used["num_evicted_pages"] == len(naive.store.evicted)
