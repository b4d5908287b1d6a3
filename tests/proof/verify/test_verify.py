"""The verifier: every rule bites alone, and what could not be judged is said."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvarts.base.errors import ConfigError
from kvarts.proof.verify.verifier import verify

from builders.body import TOTAL, Body, good, series
from builders.damages import DAMAGES, allocated_is_wrong, free_is_wrong, quiet


def violated_rules(body: Body, **limits: Any) -> set[str]:
    verdict = verify(body, **limits)
    assert (verdict.verdict == "violated") == bool(verdict.violations) == (verdict.exit_code == 5)
    return {violation.rule for violation in verdict.violations}


def test_the_good_one_is_good() -> None:
    verdict = verify(good())
    assert (verdict.verdict, verdict.exit_code, verdict.violations) == ("ok", 0, [])
    assert {result.status for result in verdict.rules} == {"ok"}
    assert verify(good(), max_bytes=98 * 1000, block_bytes=1000).violations == []


@pytest.mark.parametrize(("damage", "rule"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damage_trips_its_rule_and_no_other(damage: Any, rule: str) -> None:
    body = good()
    damage(body)
    assert violated_rules(body) == {rule}


def test_steps_without_a_row_are_noted_where_rows_may_have_been_left_out() -> None:
    body = good()
    assert verify(quiet(body)).notes == []
    del body["timeline"][1]
    verdict = verify(body)
    assert verdict.verdict == "ok"
    assert (
        len(verdict.notes) == 1
        and '1 steps have no row, the first of them step 1, and the body has no "every"' in (verdict.notes[0])
    )
    assert verify({**body, "every": 2}).notes == ["the recording has every 2th row, and those that matter most"]


def test_rests_may_follow_one_another() -> None:
    """One after the other, with nothing between but requests that never ran."""
    body = good()
    rest = body["timeline"][3]
    body["timeline"].insert(4, {**rest, "freed": 0, "t_ms": rest["t_ms"] + 1})
    assert verify(body).verdict == "ok"


def test_what_is_kept_between_requests_may_be_given_back_at_one_moment() -> None:
    """Several rests of one step and one time, each with other counts."""
    body = good()
    place = next(place for place, row in enumerate(body["timeline"]) if not row["active_seqs"])
    rest = body["timeline"][place]
    free = rest["used_blocks"] + rest["free_blocks"]
    kept = {**rest, "used_blocks": 3, "reserved_blocks": 3, "free_blocks": free - 3, "used_pct": 3 / free,
            "freed": rest["freed"] - 3, "cached_blocks": 0}  # fmt: skip
    given_back = {**kept, "used_blocks": 0, "reserved_blocks": 0, "free_blocks": free, "used_pct": 0.0,
                  "allocated": 0, "freed": 3}  # fmt: skip
    body["timeline"][place : place + 1] = [kept, given_back]
    assert verify(body).verdict == "ok", verify(body).to_text()


def test_a_violation_names_its_step_and_its_numbers() -> None:
    body = good()
    free_is_wrong(body)
    allocated_is_wrong(body)
    verdict = verify(body)
    first, second = verdict.violations
    assert (first.rule, first.step, first.row) == ("block_conservation", 0, 0)
    assert first.numbers == {"used_blocks": 40, "free_blocks": 61}
    assert first.what == "used 40 + free 61 = 101, not the total 100"
    assert (second.rule, second.step) == ("flux", 1)
    assert "used went from 40 to 70 with 31 allocated and 0 freed" in verdict.to_text()


def test_every_violation_is_listed() -> None:
    body = good()
    for row in body["timeline"]:
        row["used_pct"] += 0.001
    verdict = verify(body)
    listed = [violation for violation in verdict.violations if violation.rule == "used_pct_arithmetic"]
    assert len(listed) == len(body["timeline"]) == verdict.rules[2].num_violations


# Thresholds and optional rules -----------------------------------------------------------------------------


def bare(body: Body) -> Body:
    """The public form: seven fields, four keys."""
    for row in body["timeline"]:
        for name in ("cached_blocks", "allocated", "freed", "waiting", "asked"):
            row.pop(name, None)
    del body["initial_used_blocks"]
    return body


def test_the_public_form_is_enough_and_what_could_not_run_says_so() -> None:
    verdict = verify(bare(good()))
    assert verdict.verdict == "ok"
    not_run = {result.rule: result.why for result in verdict.rules if result.status == "not_run"}
    assert not_run == {
        "preemption_needed": "no step says what was asked for",
        "flux": "no two rows say what was allocated and freed",
    }
    without_rest = bare(good())
    without_rest["timeline"] = [row for row in without_rest["timeline"] if row["active_seqs"]]
    assert "the timeline has no moment at rest" in verify(without_rest).to_text()


@pytest.mark.parametrize(("threshold", "violated"), [(0.98, False), (0.980000001, True), (0.0, False), (1.0, True)])
def test_the_threshold_accepts_equality(threshold: float, violated: bool) -> None:
    assert violated_rules(bare(good()), preempt_threshold=threshold) == ({"preemption_trigger"} if violated else set())
    # Where the step says what was asked for, that is judged instead.
    assert violated_rules(good(), preempt_threshold=threshold) == set()


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_threshold_outside_of_0_to_1_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match="preempt_threshold: must be a number from 0 to 1"):
        verify(good(), preempt_threshold=threshold)


def test_a_rising_floor_is_named() -> None:
    body = good()
    floor = 0
    before = 0
    for row in body["timeline"]:
        if row["active_seqs"] == 0:
            floor += 3
            row.update(used_blocks=floor, free_blocks=TOTAL - floor, used_pct=floor / TOTAL)
        row["allocated"], row["freed"] = max(0, row["used_blocks"] - before), max(0, before - row["used_blocks"])
        before = row["used_blocks"]
    assert violated_rules(body) == {"leak"}
    assert "the floor keeps rising: from 3 to 15 blocks in 5 moments at rest" in verify(body).to_text()


@pytest.mark.parametrize(("coming", "rules"), [(3, set()), (2, {"leak"})])
def test_blocks_that_are_stored_at_rest_are_no_leak(coming: int, rules: set[str]) -> None:
    """As many as host memory holds room for."""
    body = good()
    body["host_total_blocks"] = TOTAL
    before = 0
    for row in body["timeline"]:
        row.update(host_used_blocks=0, host_cached_blocks=0)
        if row["active_seqs"] == 0:
            row.update(used_blocks=3, free_blocks=TOTAL - 3, used_pct=3 / TOTAL, host_used_blocks=coming)
        row["allocated"], row["freed"] = max(0, row["used_blocks"] - before), max(0, before - row["used_blocks"])
        before = row["used_blocks"]
    assert violated_rules(body) == rules


def test_boundedness_is_judged_by_slope() -> None:
    dice = random.Random(7)
    plateau = [min(step * 20, 4000) + dice.randrange(400) for step in range(4000)]
    assert violated_rules(series(plateau), max_bytes=10**9, block_bytes=1000) == set()
    assert violated_rules(series(plateau), max_bytes=4_300_000, block_bytes=1000) == {"boundedness"}
    # Grows by 6 % in all: a ratio of last to first would not tell it from noise.
    creeping = [value + step // 16 for step, value in enumerate(plateau)]
    verdict = verify(series(creeping), max_bytes=10**9, block_bytes=1000)
    assert [violation.rule for violation in verdict.violations] == ["boundedness"]
    assert verdict.violations[0].numbers["blocks_per_1000_rows"] == pytest.approx(62.5, rel=0.2)


def test_boundedness_that_cannot_be_judged_is_inconclusive() -> None:
    few = verify(series([5] * 50), max_bytes=10**9, block_bytes=1)
    assert (few.verdict, few.exit_code) == ("inconclusive", 6)
    assert few.why is not None and "too few" in few.why
    unknown = verify(series([5] * 500), max_bytes=10**9)
    assert unknown.verdict == "inconclusive"
    assert unknown.why is not None and "--set block_bytes" in unknown.why
    assert verify({**series([5] * 500), "block_bytes": 10}, max_bytes=100).verdict == "ok"
    assert verify({**series([5] * 500), "block_bytes": 10}, max_bytes=49).verdict == "violated"


@pytest.mark.parametrize(
    ("used", "why"),
    [([], "the timeline is empty"), ([0, 0, 0], "no block is ever used"), ([5], "a single row shows no change")],
)
def test_what_shows_nothing_is_inconclusive(used: list[int], why: str) -> None:
    verdict = verify(series(used))
    assert (verdict.verdict, verdict.why, verdict.exit_code) == ("inconclusive", why, 6)


@pytest.mark.parametrize("name", ["block_size_tokens", "total_blocks"])
def test_null_is_a_size_that_was_not_observed_only_where_there_is_no_row(name: str) -> None:
    empty = {**series([]), name: None}
    verdict = verify(empty)
    assert (verdict.verdict, verdict.why) == ("inconclusive", f"the timeline is empty: {name} was not observed")
    assert verify({**series([1, 2]), name: None}).verdict == "violated"
    assert verify({**empty, "timeline": [{}]}).verdict == "violated", "a malformed row is a row"
    assert verify({**empty, name: 0}).verdict == "violated"


def test_the_totals_of_nothing_are_nothing() -> None:
    assert violated_rules({**series([]), "peak_used_pct": 0.5}) == {"peak_consistency"}
    assert violated_rules({**series([]), "preemption_count": 1}) == {"peak_consistency"}
