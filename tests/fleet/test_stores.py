"""A store that workers share: who waits for what, and when."""

from __future__ import annotations

from typing import Any

import pytest

from kvarts.executor.cost import LinearCost
from kvarts.fleet.config import FleetConfig, PoolConfig, StoreSettings
from kvarts.fleet.faults import Fault
from kvarts.fleet.report import FleetReport
from kvarts.offload.config import OffloadConfig
from kvarts.settings import SettingError
from kvarts.sim.replay import replay

from builders.case import Case, Row

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
