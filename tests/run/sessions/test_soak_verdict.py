"""The verdict on hand-made runs: what is bounded, what is violated, and what can never be told."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.run.sessions.soak.rules import SoakRuleResult, expected_bytes, judge_soak
from kvarts.run.sessions.soak.run import KvLayers, Sample, SoakRecord

from builders.soak import BYTES_PER_TOKEN, record_of, with_sample, with_samples


def result(record: SoakRecord, rule: str) -> SoakRuleResult:
    return next(result for result in judge_soak(record).rules if result.rule == rule)


def test_a_bounded_run_is_bounded() -> None:
    verdict = judge_soak(record_of())
    assert (verdict.verdict, verdict.exit_code) == ("bounded", 0)
    assert verdict.layers == (KvLayers(68, BYTES_PER_TOKEN),)
    assert "to the byte; 68,000 when full, in 200 samples" in verdict.to_text()


@pytest.mark.laws
@given(index=st.integers(0, 199), off_by=st.sampled_from([1, -1, BYTES_PER_TOKEN, 10**9]))
def test_one_byte_once_is_violated(index: int, off_by: int) -> None:
    record = record_of()
    sample = record.samples[index]
    assert sample.kv_live_bytes is not None
    is_filling = sample.num_sent_tokens <= 68
    if sample.phase == "turn" and is_filling and off_by == BYTES_PER_TOKEN:
        return  # as if the token that was generated last had KV already
    verdict = judge_soak(with_sample(record, index, kv_live_bytes=sample.kv_live_bytes + off_by))
    assert (verdict.verdict, verdict.exit_code) == ("violated", 5)


def test_growth_beyond_the_bound_is_violated() -> None:
    def grown(sample: Sample) -> dict[str, Any]:
        return {"kv_live_bytes": BYTES_PER_TOKEN * sample.num_sent_tokens}

    found = result(with_samples(record_of(), grown), "kv_live_bytes")
    assert found.status == "violated"
    assert found.what.startswith("turn 4, session 0: 72,000 bytes at 72 tokens, and not 68,000")
    assert found.what.endswith("; and 185 more")


def test_history_that_the_client_does_not_count_is_violated() -> None:
    record = with_sample(record_of(), 100, history_length=7)
    assert "7 tokens, and the client counts" in result(record, "history").what
    assert judge_soak(record).verdict == "violated"


def test_constant_zero_is_inconclusive() -> None:
    verdict = judge_soak(with_samples(record_of(), lambda _: {"kv_live_bytes": 0}))
    assert (verdict.verdict, verdict.exit_code) == ("inconclusive", 6)
    assert "constant zero" in verdict.to_text()


def test_a_constant_is_never_bounded() -> None:
    """A server that says its bound, whatever it keeps."""
    record = with_samples(record_of(), lambda _: {"kv_live_bytes": 68 * BYTES_PER_TOKEN})
    assert judge_soak(record).verdict == "inconclusive"
    assert "cannot be derived" in result(record, "kv_live_bytes").what
    told = with_samples(record_of(layers=(KvLayers(68, BYTES_PER_TOKEN),)), lambda _: {"kv_live_bytes": 68000})
    assert judge_soak(told).verdict == "violated"


def test_full_sessions_alone_do_not_show_what_a_token_takes() -> None:
    record = record_of()
    full = [sample for sample in record.samples if sample.num_sent_tokens > 80]
    assert judge_soak(msgspec.structs.replace(record, samples=full)).verdict == "inconclusive"
    told = record_of(layers=(KvLayers(68, BYTES_PER_TOKEN),))
    assert judge_soak(msgspec.structs.replace(told, samples=full)).verdict == "bounded"


@pytest.mark.parametrize("num_turns", [0, 1, 4, 8, 20])
def test_too_few_turns_are_inconclusive(num_turns: int) -> None:
    assert judge_soak(record_of(num_turns)).verdict == "inconclusive"


def test_a_bound_that_is_never_reached_is_inconclusive() -> None:
    record = record_of(sink=4, window=2000)
    silent = {"kv_allocated_bytes": None, "kv_bound_bytes": None}
    linear = with_samples(record, lambda sample: {"kv_live_bytes": BYTES_PER_TOKEN * sample.num_sent_tokens, **silent})
    assert result(linear, "kv_live_bytes").what == "2 of 2 sessions never reached the bound of 2004 tokens"
    assert judge_soak(linear).verdict == "inconclusive"


@pytest.mark.parametrize("field", ["history_length", "kv_live_bytes", "inv1_violations", "inv2_violations"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_is_missing_is_inconclusive(field: str, everywhere: bool) -> None:
    record = with_samples(record_of(), lambda sample: {field: None} if everywhere or sample.turn == 50 else {})
    verdict = judge_soak(record)
    assert verdict.verdict == "inconclusive"
    assert f"{field} is missing in {200 if everywhere else 2} of 200 samples" in verdict.to_text()


def test_a_violation_outweighs_what_is_missing() -> None:
    record = with_sample(record_of(), 0, kv_live_bytes=None)
    assert judge_soak(with_sample(record, 150, kv_live_bytes=1)).verdict == "violated"


def test_latencies_that_are_missing_are_inconclusive() -> None:
    assert judge_soak(with_samples(record_of(), lambda _: {"itl_s": None})).verdict == "inconclusive"


@pytest.mark.parametrize("field", ["inv1_violations", "inv2_violations"])
def test_a_counted_violation_is_violated(field: str) -> None:
    assert judge_soak(with_sample(record_of(), 199, **{field: 1})).verdict == "violated"


def test_pages_beyond_the_bound_of_the_server_are_violated() -> None:
    record = record_of()
    for changes in ({"kv_allocated_bytes": 84_001}, {"kv_bound_bytes": 90_000}, {"kv_allocated_bytes": 10}):
        assert judge_soak(with_sample(record, 120, **changes)).verdict == "violated"
    silent = with_samples(record, lambda _: {"kv_allocated_bytes": None, "kv_bound_bytes": None})
    assert judge_soak(silent).verdict == "bounded"
    assert result(silent, "kv_allocated_bytes").status == "not_run"


# Slopes ------------------------------------------------------------------------------------------------------


def test_noise_without_drift_is_never_violated() -> None:
    verdicts = [result(record_of(200, seed=seed, noise=0.05), "latency").status for seed in range(60)]
    assert verdicts.count("ok") == 60


def test_noise_that_hides_a_drift_is_inconclusive_and_not_violated() -> None:
    verdicts = [result(record_of(60, seed=seed, noise=0.5), "latency").status for seed in range(60)]
    assert "violated" not in verdicts
    assert verdicts.count("inconclusive") > 50


def test_noise_that_is_alike_for_a_while_is_not_taken_for_drift() -> None:
    """Slow minutes follow slow minutes: the interval is wider for it."""
    statuses = []
    for seed in range(60):
        random, level = Random(seed), 0.0
        slow = {}
        for turn in range(200):
            level = 0.9 * level + random.gauss(0, 0.03)
            slow[turn] = 0.01 * (1 + level)
        record = with_samples(record_of(200), lambda sample: {"itl_s": slow[sample.turn]})  # noqa: B023
        statuses.append(result(record, "latency").status)
    assert statuses.count("violated") <= 2


def test_drift_beyond_the_tolerance_is_violated() -> None:
    for seed in range(30):
        record = record_of(200, seed=seed, drift=0.4, noise=0.05)
        assert judge_soak(record).verdict == "violated"
        found = result(record, "latency")
        assert found.low_growth is not None and found.high_growth is not None
        assert 0.1 < found.low_growth < found.high_growth < 0.6


def test_drift_within_the_tolerance_is_bounded() -> None:
    assert judge_soak(record_of(200, drift=0.03)).verdict == "bounded"
    assert judge_soak(record_of(200, drift=0.03, max_drift=0.01)).verdict == "violated"


def test_equal_latencies_have_no_slope() -> None:
    record = with_samples(record_of(), lambda _: {"itl_s": 0.01})
    found = result(record, "latency")
    assert (found.low_growth, found.high_growth) == (0, 0)


def test_warm_up_does_not_count() -> None:
    record = with_samples(record_of(200), lambda sample: {"itl_s": 0.5} if sample.turn < 15 else {})
    assert result(record, "latency").status == "ok"


def test_memory_of_the_server() -> None:
    def run(rss: Any, **plan: Any) -> SoakRuleResult:
        record = record_of(200, expects_rss=True, **plan)
        return result(with_samples(record, lambda sample: {"rss_bytes": rss(sample.turn)}), "rss")

    assert run(lambda _: 500_000_000).status == "ok"
    assert run(lambda turn: 500_000_000 + 1_000_000 * turn).status == "violated"
    assert run(lambda turn: 500_000_000 + 10_000 * turn).status == "ok"
    assert run(lambda turn: None if turn == 100 else 500_000_000).what == "missing in 1 turns"
    assert result(record_of(), "rss").status == "not_run"
    # Histories may grow by 8 bytes a token, which is much for a small process.
    assert run(lambda turn: 10_000 + 24 * 8 * turn, max_rss_growth=0.01).status == "ok"
    assert run(lambda turn: 10_000 + 24 * 9 * turn, max_rss_growth=0.01).status == "violated"


# Runs that did not end ---------------------------------------------------------------------------------------


def test_a_run_that_broke_off_is_never_bounded() -> None:
    record = record_of()
    assert judge_soak(msgspec.structs.replace(record, ended_by="error", why="gone")).verdict == "inconclusive"
    assert judge_soak(msgspec.structs.replace(record, ended_by=None)).verdict == "inconclusive"
    assert judge_soak(msgspec.structs.replace(record, ended_by="stopped")).verdict == "bounded"


def test_layers_of_several_kinds_add_up() -> None:
    layers = (KvLayers(68, 100), KvLayers(512, 10))
    assert [expected_bytes(layers, tokens) for tokens in (0, 1, 68, 69, 512, 513)] == [0, 110, 7480, 7490, 11920, 11920]
    record = record_of(100, layers=layers)
    exact = with_samples(record, lambda sample: {"kv_live_bytes": expected_bytes(layers, sample.num_sent_tokens),
                                                 "kv_allocated_bytes": None, "kv_bound_bytes": None})  # fmt: skip
    assert judge_soak(exact).verdict == "bounded"
