"""The verifier: every rule bites alone, nothing makes it fall over, and how a file is laid out does not matter."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.errors import ConfigError, InputError, MissingFileError
from kvarts.verify import chunk
from kvarts.verify import text as reading
from kvarts.verify.verifier import verify, verify_file

from builders.body import TOTAL, Body, good


def violated_rules(body: Body, **limits: Any) -> set[str]:
    verdict = verify(body, **limits)
    assert (verdict.verdict == "violated") == bool(verdict.violations) == (verdict.exit_code == 5)
    return {violation.rule for violation in verdict.violations}


def test_the_good_one_is_good() -> None:
    verdict = verify(good())
    assert (verdict.verdict, verdict.exit_code, verdict.violations) == ("ok", 0, [])
    assert {result.status for result in verdict.rules} == {"ok"}
    assert verify(good(), max_bytes=98 * 1000, block_bytes=1000).violations == []


def drop_key(body: Body) -> None:
    del body["block_size_tokens"]


def drop_field(body: Body) -> None:
    # The row after the one that is left out has nothing to be compared with.
    del body["timeline"][1]["active_seqs"]


def a_bool_for_a_number(body: Body) -> None:
    body["timeline"][1]["waiting"] = True


def a_negative_number(body: Body) -> None:
    body["timeline"][1]["allocated"] = -30


def no_positive_size(body: Body) -> None:
    body["block_size_tokens"] = 0


def free_is_wrong(body: Body) -> None:
    body["timeline"][0]["free_blocks"] += 1


def more_cached_than_free(body: Body) -> None:
    body["timeline"][1]["cached_blocks"] = 31


def pct_is_wrong(body: Body) -> None:
    body["timeline"][1]["used_pct"] += 1e-8


def peak_is_wrong(body: Body) -> None:
    body["peak_used_pct"] = 0.99


def count_is_wrong(body: Body) -> None:
    body["preemption_count"] = 2


def preempts_with_room(body: Body) -> None:
    body["timeline"][1]["preempted_seqs"] = 1
    body["preemption_count"] = 2


def preempts_what_would_fit(body: Body) -> None:
    asking(body)["asked"][0]["blocks"] = 2


def saw_less_than_there_was(body: Body) -> None:
    asking(body)["asked"][0]["free_blocks"] = 1


def asks_and_preempts_nobody(body: Body) -> None:
    body["timeline"][0]["asked"] = [{"request": "7", "blocks": 99, "free_blocks": 60}]


def preempts_more_than_it_says(body: Body) -> None:
    asking(body)["preempted_seqs"] += 5
    body["preemption_count"] += 5


def asks_for_more_than_there_is(body: Body) -> None:
    asking(body)["asked"][0]["blocks"] = 101


def withholds_more_than_there_is(body: Body) -> None:
    asking(body).update(withheld_blocks=10**9)


def withholds_what_is_used(body: Body) -> None:
    body["timeline"][2].update(withheld_blocks=51)


def fills_a_tier_beyond_its_size(body: Body) -> None:
    body["host_total_blocks"] = 50
    body["timeline"][2].update(host_used_blocks=20, host_cached_blocks=31)


def quiet(body: Body) -> Body:
    """Add a step in which nothing changes after the first."""
    first = body["timeline"][0]
    for row in body["timeline"][1:]:
        row["step"] += 1
    body["timeline"].insert(1, {**first, "step": 1, "t_ms": first["t_ms"] + 1, "allocated": 0, "freed": 0})
    return body


def a_quiet_step_is_there_twice(body: Body) -> None:
    body["timeline"].insert(1, dict(quiet(body)["timeline"][1]))


def a_rest_is_there_twice(body: Body) -> None:
    rest = body["timeline"][3]
    assert not rest["active_seqs"]
    body["timeline"].insert(4, {**rest, "freed": 0})


def a_quiet_step_is_missing(body: Body) -> None:
    del quiet(body)["timeline"][1]
    body["every"] = 1


def more_steps_are_missing_than_are_left_out(body: Body) -> None:
    for row in body["timeline"][1:]:
        row["step"] += 7
    body["every"] = 7


def asking(body: Body) -> Body:
    found: Body = next(row for row in body["timeline"] if row.get("asked"))
    return found


def step_goes_back(body: Body) -> None:
    body["timeline"][4]["step"] = 1


def time_goes_back(body: Body) -> None:
    body["timeline"][4]["t_ms"] = 5


def allocated_is_wrong(body: Body) -> None:
    body["timeline"][1]["allocated"] += 1


def the_first_row_does_not_begin_with_nothing(body: Body) -> None:
    body["timeline"][0]["allocated"] -= 1


def something_is_left(body: Body) -> None:
    rest, after = body["timeline"][3], body["timeline"][4]
    assert rest["active_seqs"] == 0
    rest.update(used_blocks=2, free_blocks=98, used_pct=0.02, freed=58)
    after["allocated"] -= 2


DAMAGES = [
    (drop_key, "schema"),
    (drop_field, "schema"),
    (a_bool_for_a_number, "schema"),
    (a_negative_number, "schema"),
    (no_positive_size, "schema"),
    (free_is_wrong, "block_conservation"),
    (more_cached_than_free, "block_conservation"),
    (pct_is_wrong, "used_pct_arithmetic"),
    (peak_is_wrong, "peak_consistency"),
    (count_is_wrong, "peak_consistency"),
    (preempts_with_room, "preemption_trigger"),
    (preempts_what_would_fit, "preemption_needed"),
    (saw_less_than_there_was, "preemption_needed"),
    (asks_and_preempts_nobody, "preemption_needed"),
    (preempts_more_than_it_says, "preemption_needed"),
    (asks_for_more_than_there_is, "preemption_needed"),
    (withholds_more_than_there_is, "block_conservation"),
    (withholds_what_is_used, "block_conservation"),
    (fills_a_tier_beyond_its_size, "block_conservation"),
    (a_quiet_step_is_there_twice, "step_order"),
    (a_rest_is_there_twice, "step_order"),
    (a_quiet_step_is_missing, "step_order"),
    (more_steps_are_missing_than_are_left_out, "step_order"),
    (step_goes_back, "step_order"),
    (time_goes_back, "step_order"),
    (allocated_is_wrong, "flux"),
    (the_first_row_does_not_begin_with_nothing, "flux"),
    (something_is_left, "leak"),
]


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


def series(used: list[int]) -> Body:
    rows = [
        {
            "step": step,
            "t_ms": float(step),
            "used_blocks": value,
            "free_blocks": 10_000 - value,
            "used_pct": value / 10_000,
            "active_seqs": 1,
            "preempted_seqs": 0,
        }
        for step, value in enumerate(used)
    ]
    peak = max(used, default=0) / 10_000
    return {
        "timeline": rows,
        "block_size_tokens": 1,
        "total_blocks": 10_000,
        "peak_used_pct": peak,
        "preemption_count": 0,
    }


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
    assert unknown.why is not None and "--block-bytes" in unknown.why
    assert verify({**series([5] * 500), "block_bytes": 10}, max_bytes=100).verdict == "ok"
    assert verify({**series([5] * 500), "block_bytes": 10}, max_bytes=49).verdict == "violated"


@pytest.mark.parametrize(
    ("used", "why"),
    [([], "the timeline is empty"), ([0, 0, 0], "no block is ever used"), ([5], "a single row shows no change")],
)
def test_what_shows_nothing_is_inconclusive(used: list[int], why: str) -> None:
    verdict = verify(series(used))
    assert (verdict.verdict, verdict.why, verdict.exit_code) == ("inconclusive", why, 6)


def test_the_totals_of_nothing_are_nothing() -> None:
    assert violated_rules({**series([]), "peak_used_pct": 0.5}) == {"peak_consistency"}
    assert violated_rules({**series([]), "preemption_count": 1}) == {"peak_consistency"}


# Files ----------------------------------------------------------------------------------------------------


def layouts(body: Body) -> dict[str, bytes]:
    """The same body, as different people write it."""
    ends = {name: value for name, value in body.items() if name != "timeline"}
    rows = body["timeline"]
    lines = [json.dumps(ends), *map(json.dumps, rows)]
    texts = {
        "first.json": json.dumps(body),
        "last.json": json.dumps({**ends, "timeline": rows}),
        "pretty.json": json.dumps(body, indent=4),
        "deep.json": json.dumps({"about": {"timeline": [1, {"]": "}"}]}, 'od"d\\': "]},{", **body, "more": [[], {}]}),
        "lines.jsonl": "\n".join(lines),
        "lines.ndjson": "\n\n".join(lines) + "\n",
        "totals.jsonl": "\n".join(lines[1:] + lines[:1]),
    }
    out = {name: text.encode() for name, text in texts.items()}
    out["bom.json"] = b"\xef\xbb\xbf" + out["first.json"]
    return {**out, **{f"{name}.gz": gzip.compress(text) for name, text in out.items()}}


@pytest.mark.parametrize("block_bytes", [64, 1 << 12, 1 << 22])
def test_the_layout_of_a_file_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Blocks so small that every row is cut, and rows with brackets and quotes in strings."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
    for damage, _ in [(None, ""), *DAMAGES]:
        body = good()
        for index, row in enumerate(body["timeline"]):
            row["comment"] = '}],"\\' * (index % 3) + "é"
        if damage is not None:
            damage(body)
        expected = verify(body)
        for name, text in layouts(body).items():
            path = tmp_path / name
            path.write_bytes(text)
            verdict = verify_file(path)
            assert verdict == expected, (name, verdict.to_text(), expected.to_text())


def test_what_breaks_off_is_no_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({**good(), "end": True}).encode()
    path = tmp_path / "cut.json"
    for block_bytes in (64, 1 << 22):
        monkeypatch.setattr(reading, "BLOCK_BYTES", block_bytes)
        for cut in [*range(0, 400, 7), *range(len(text) - 200, len(text), 3)]:
            path.write_bytes(text[:cut])
            with pytest.raises(InputError, match=r"cut\.json"):
                verify_file(path)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '{"timeline": [1, 2,]}',
        '{"timeline": [{} {}]}',
        '{"timeline": [,{}]}',
        '{"timeline": []} {}',
        '{"timeline": [], "timeline": [1]}',
        '{"timeline": [{"step": NaN}]}',
        '{"timeline": [{"step": 1}',
        "[" * 100_000,
        '{"timeline": [' + "[" * 100_000,
        "",
        "\x00",
    ],
)
def test_what_is_no_json_is_a_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"bad\.json: "):
        verify_file(path)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file"):
        verify_file(tmp_path / "nothing.json")
    with pytest.raises(InputError):
        verify_file(tmp_path)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = layouts(good())["lines.jsonl"].splitlines()
    lines[5] = b"{oops"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InputError, match=r"bad\.jsonl:6: is no JSON"):
        verify_file(path)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the rows, the same memory."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", 1 << 16)
    peaks = []
    for num_rows in (10_000, 100_000):
        path = tmp_path / f"{num_rows}.json"
        path.write_text(json.dumps(series([step % 5000 for step in range(num_rows)])))
        tracemalloc.start()
        assert verify_file(path).verdict == "ok"
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


# Fuzz -----------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.one_of(st.integers(-1, 5), st.integers(0, 100), st.floats(), st.integers())
ROWS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(chunk.NUMBERS, NUMBERS | JSON),
        "asked": st.lists(st.fixed_dictionaries({"blocks": NUMBERS, "free_blocks": NUMBERS}), max_size=2) | JSON,
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "timeline": st.lists(ROWS, max_size=6) | st.lists(ROWS | JSON, max_size=3) | JSON,
        "block_size_tokens": NUMBERS | JSON,
        "total_blocks": NUMBERS | JSON,
        "peak_used_pct": NUMBERS | JSON,
        "preemption_count": NUMBERS | JSON,
        "initial_used_blocks": NUMBERS | JSON,
        "block_bytes": NUMBERS | JSON,
        "every": NUMBERS | JSON,
    },
)


def assert_judged(body: Any, **limits: Any) -> None:
    verdict = verify(body, **limits)
    counted = sum(result.num_violations for result in verdict.rules)
    assert counted == len(verdict.violations)
    assert (verdict.verdict == "violated") == (counted > 0)
    assert verdict.exit_code == {"ok": 0, "violated": 5, "inconclusive": 6}[verdict.verdict]
    assert verdict.to_text().startswith(verdict.verdict)


@pytest.mark.laws
@given(BODIES | JSON, st.booleans())
def test_anything_gets_a_verdict(body: Any, bounded: bool) -> None:
    limits = {"max_bytes": 100} if bounded else {}
    if isinstance(body, dict):
        assert_judged(body, **limits)
    else:
        with pytest.raises(InputError):
            verify(body, **limits)


@pytest.mark.laws
@given(st.data())
def test_a_damaged_good_one_gets_a_verdict(data: st.DataObject) -> None:
    body = deepcopy(good())
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(body["timeline"]))
        if isinstance(row, dict) and row:
            row[data.draw(st.sampled_from(sorted(row)))] = data.draw(NUMBERS | JSON)
    assert_judged(body)


@pytest.mark.laws
@given(body=BODIES | JSON, cut=st.integers(0, 200), block_bytes=st.sampled_from([16, 1 << 22]))
def test_any_bytes_get_a_verdict_or_a_clear_error(
    body: Any, cut: int, block_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    before, reading.BLOCK_BYTES = reading.BLOCK_BYTES, block_bytes
    try:
        text = json.dumps(body).encode()
        for name in ("any.json", "any.jsonl", "any.json.gz", "any.parquet"):
            for data in (text, text[:cut], gzip.compress(text)[:cut]):
                path = folder / name
                path.write_bytes(data)
                said: str | None = None
                try:
                    said = verify_file(path).verdict
                except InputError as error:
                    said = str(error).split(":")[0]
                assert said in {"ok", "violated", "inconclusive", str(path)}
    finally:
        reading.BLOCK_BYTES = before
