"""Law L17 without SGLang: kvarts and a restatement on recorded steps of SGLang, and next to each other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equal.sglang import RECORDED, ROWS, describe, draw_load, first_difference, first_of, shrunk
from equal.sglang_ours import config_of, kvarts_steps
from kvarts import OffloadConfig, replay, verify
from kvarts.proof.evidence import timelines_of
from kvarts.sim.traffic.mooncake import load_mooncake

from oracles.naive_sglang import Asked, SglangLoad, SglangStep, naive_steps


class Recorded(msgspec.Struct):
    """A load, and what SGLang did in each step."""

    load: SglangLoad
    steps: list[SglangStep]


CASES = msgspec.json.decode(RECORDED.read_bytes(), type=list[Recorded])


def restated(load: SglangLoad) -> SglangLoad:
    """Return the first requests of a load, without what the restatement does not know."""
    asks = [msgspec.structs.replace(ask, salt=None) for ask in load.asks[:25]]
    return msgspec.structs.replace(first_of(load, 25), asks=asks, has_events=False)


@pytest.mark.parametrize(
    ("steps", "case"),
    [(steps, case) for steps in (naive_steps, kvarts_steps) for case in CASES if not case.load.has_events]
    + [(kvarts_steps, case) for case in CASES if case.load.has_events],
    ids=lambda each: f"page-{each.load.page_size}" if isinstance(each, Recorded) else each.__name__,
)
def test_the_steps_are_those_that_were_recorded_of_sglang(steps: object, case: Recorded) -> None:
    difference = first_difference(case.load, steps, lambda load: iter(case.steps), Counter())  # type: ignore[arg-type]
    assert difference is None


def test_recorded_steps_contain_retractions_hits_and_both_orders_of_results() -> None:
    steps = [step for case in CASES for step in case.steps]
    assert sum(len(step.retracted) for step in steps) > 3
    assert sum(map(bool, (step.admitted.values() for step in steps))) > 20
    assert sum(len(step.loaded) for step in steps) > 3
    assert sum(len(step.fetched) for step in steps) > 3
    assert {case.load.overlap for case in CASES} == {True, False}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", range(5))
def test_kvarts_and_the_restatement_agree(row: str, seed: int) -> None:
    load = restated(draw_load(row, 1000 + seed))
    assert first_difference(load, kvarts_steps, naive_steps, Counter()) is None


@pytest.mark.laws
@given(st.sampled_from(["windows", "states"]), st.integers(0, 1 << 30))
def test_second_pools_are_those_of_the_restatement(row: str, seed: int) -> None:
    """L17, for pools of window KV and of states."""
    load = first_of(restated(draw_load(row, seed)), 8)
    assert first_difference(load, kvarts_steps, naive_steps, Counter()) is None


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_left_of_requests_that_are_cancelled_while_storage_is_read_for_them(seed: int) -> None:
    """L2, in host memory: what was taken to be read into is free in the end."""
    load = restated(draw_load("storage", 3000 + seed))
    load.prefetch_policy, load.storage_config, load.read_steps = "wait_complete", {"prefetch_threshold": 1}, 5
    steps = list(kvarts_steps(load, cancels=0.1))
    assert max(step.reserved for step in steps) > 0
    assert steps[-1].reserved == steps[-1].waiting == 0
    assert 0 < sum(len(step.ended) for step in steps) < len(load.asks)


@pytest.mark.parametrize("seed", range(6))
def test_no_slot_is_left_to_requests_that_are_cancelled(seed: int) -> None:
    """L2, of states: the tree has what is not free in the end."""
    load = restated(draw_load("states", 3000 + seed))
    steps = list(kvarts_steps(load, cancels=0.1))
    assert min(step.slots_free for step in steps) < load.slots
    assert steps[-1].slots_free + steps[-1].slots_evictable == load.slots
    assert sum(len(step.ended) for step in steps) < len(load.asks)


def test_a_prompt_that_sglang_never_admits_is_computed_from_its_first_token() -> None:
    """What it finds is in use then, and leaves too little window KV for the rest."""
    prompt = list(range(100))
    load = SglangLoad(
        page_size=1,
        size=4_000,
        chunk=8_192,
        max_running=4,
        asks=[Asked(0, prompt, [1]), Asked(3, [*prompt, *range(1_000, 1_390)], [1])],
        overlap=False,
        window=15,
        window_ratio=0.1,
    )
    assert any(step.fails for step in islice(naive_steps(load), 5))
    assert [step.admitted for step in kvarts_steps(load) if step.admitted] == [{0: 0}, {1: 0}]


def with_own_answers(load: SglangLoad) -> SglangLoad:
    """Return a load in which nobody else has the tokens that a request generates."""
    for index, ask in enumerate(load.asks):
        ask.output = [10**6 * (index + 1) + place for place in range(len(ask.output))]
    return load


def load_of_fast_copies(row: str, seed: int) -> tuple[SglangLoad, OffloadConfig]:
    """Return a load with host memory whose copies take less than a step, so that no step begins when one ends."""
    fast = OffloadConfig(kv_bytes_per_token=1, h2d="100GB/s", d2h="100GB/s", latency_us=0)
    if row == "storage":
        fast = msgspec.structs.replace(fast, disk_read="100GB/s", disk_write="100GB/s", disk_latency_us=0)
    for number in range(2000 + seed, 2300, 3):
        load = with_own_answers(restated(draw_load(row, number)))
        load.d2h_steps, load.h2d_steps, load.stored = 1 if load.overlap else 2, 1, []
        load.query_steps = load.read_steps = load.write_steps = 0
        if load.write_policy == "write_back":
            continue
        steps = list(naive_steps(load))
        is_idle = any(step.kind is None and step.waiting for step in steps)
        if not is_idle and any(step.fetched if row == "storage" else step.loaded for step in steps):
            return load, fast
    raise AssertionError("no such load")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_admits_hits_and_retracts_as_the_steps(row: str, seed: int, tmp_path: Path) -> None:
    """A step takes a millisecond; nobody else has the tokens that a request of the trace generates."""
    load, offload = with_own_answers(restated(draw_load(row, 2000 + seed))), None
    if row in ("host", "storage"):
        load, offload = load_of_fast_copies(row, seed)
    admitted: dict[int, tuple[int, int]] = {}
    retracted: Counter[int] = Counter()
    loaded: Counter[int] = Counter()
    fetched: Counter[int] = Counter()
    for number, step in enumerate(naive_steps(load)):
        for index, count in step.admitted.items():
            admitted.setdefault(index, (number - load.asks[0].step, count))
        retracted.update(step.retracted)
        loaded.update(step.loaded)
        fetched.update(step.fetched)
    names: dict[tuple[int, int], int] = {}
    rows = []
    for ask in load.asks:
        ids: list[int] = []
        for token in ask.prompt:
            ids.append(names.setdefault((ids[-1] if ids else -1, token), len(names)))
        counts = {"input_length": len(ask.prompt), "output_length": len(ask.output)}
        rows.append({"timestamp": ask.step, **counts, "hash_ids": ids, "priority": ask.priority})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = replay(load_mooncake(path, trace_block_size=1), msgspec.structs.replace(config_of(load), offload=offload))
    for timeline in timelines_of(report):
        verdict = verify(timeline.to_json())
        assert verdict.verdict == "ok", [rule for rule in verdict.rules if rule.status == "violated"]
    requests = report.requests
    if not retracted:  # the tokens that are lost then had gaps as well
        last_ms, first_ms = np.array(requests["last_token_ms"]), np.array(requests["first_token_ms"])
        gaps = [np.asarray(gaps_ns) @ np.asarray(counts) for gaps_ns, counts in report._gaps()]
        assert sum(gaps) / 1e6 == pytest.approx((last_ms - first_ms).sum())
    ours = zip(requests["first_admitted_ms"], requests["cached_tokens"], requests["preemptions"], strict=True)
    assert list(ours) == [(*admitted[index], retracted[index]) for index in range(len(load.asks))]
    if row in ("host", "storage") and not retracted:
        of_host = [loaded[index] - fetched[index] for index in range(len(load.asks))]
        assert list(requests["host_tokens"]) == of_host
    if row == "storage" and not retracted:
        assert list(requests["disk_tokens"]) == [fetched[index] for index in range(len(load.asks))]


def faulty_steps(load: SglangLoad) -> Iterator[SglangStep]:
    """Yield the restatement's steps, with a token more for a request that hits any."""
    for step in naive_steps(load):
        step.admitted = {index: count + (count > 0) for index, count in step.admitted.items()}
        yield step


def test_a_fault_is_found_and_shrunk_to_the_requests_that_show_it() -> None:
    prompt = list(range(30))
    load = SglangLoad(
        page_size=1,
        size=200,
        chunk=64,
        max_running=4,
        asks=[Asked(0, [99], [1]), Asked(1, prompt, [1]), Asked(3, prompt[:20], [1]), Asked(9, prompt[:5], [2])],
    )
    smaller = shrunk(load, faulty_steps, naive_steps)
    assert len(smaller.asks) == 2
    assert "admitted={1: 5}" in describe(smaller, faulty_steps, naive_steps)  # of 4
