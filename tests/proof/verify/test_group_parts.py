"""The rule of KV groups: parts of all groups add up to blocks, in every form of a timeline."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts.base.errors import InputError
from kvarts.proof.evidence import timelines_of
from kvarts.proof.verify.rule import RuleResult
from kvarts.proof.verify.verifier import Verdict, verify, verify_file

BODY: dict[str, Any] = {
    "version": 1,
    "block_size_tokens": 4,
    "total_blocks": 20,
    "block_bytes": 1,
    "kv_groups": [
        {"kind": "full", "layers": 1, "part_blocks": 2},
        {"kind": "window", "layers": 1, "tokens": 6, "part_blocks": 3},
    ],
    "peak_used_pct": 0.6,
    "preemption_count": 0,
    "timeline": [
        {
            "step": step, "t_ms": float(step), "used_blocks": used, "free_blocks": 20 - used, "used_pct": used / 20,
            "active_seqs": 1, "preempted_seqs": 0, "cached_blocks": 5, "group_used_parts": parts,
            "group_cached_parts": [1, 1],
        }
        for step, (used, parts) in enumerate([(5, [1, 1]), (12, [3, 2]), (8, [4, 0])])
    ],
}  # fmt: skip


def result(verdict: Verdict) -> RuleResult:
    return next(rule for rule in verdict.rules if rule.rule == "group_parts")


def changed(row: int, **fields: Any) -> dict[str, Any]:
    body = deepcopy(BODY)
    body["timeline"][row].update(fields)
    return body


def test_parts_that_add_up_are_ok() -> None:
    verdict = verify(BODY)
    assert verdict.verdict == "ok", verdict.to_text()
    assert result(verdict).status == "ok"
    whole = {name: value for name, value in BODY.items() if name != "kv_groups"}
    assert all(rule.rule != "group_parts" for rule in verify(whole).rules)


def test_blocks_that_are_reserved_may_be_no_parts() -> None:
    row = {"used_blocks": 14, "free_blocks": 6, "used_pct": 0.7}
    assert result(verify(changed(2, reserved_blocks=6, **row))).status == "ok"
    found = verify(changed(2, reserved_blocks=5, **row)).violations
    assert [each.what for each in found if each.rule == "group_parts"] == [
        "used: parts of all groups are 8 blocks, and 14 are counted, 5 of them reserved"
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (changed(1, group_used_parts=[3, 1]), "used: parts of all groups are 9 blocks, and 12 are counted"),
        (changed(2, group_cached_parts=[1, 2]), "cached: parts of all groups are 8 blocks, and 5 are counted"),
        (changed(0, group_used_parts=[1]), "used: 1 groups, not 2"),
        ({**BODY, "kv_groups": [{"kind": "full"}, {}]}, "kv_groups: group 0 must have part_blocks"),
        ({**BODY, "kv_groups": 3}, "kv_groups must be an array, is 3"),
        ({**BODY, "kv_groups": None}, "kv_groups must be an array, is "),
        (
            changed(2, used_blocks=12, free_blocks=8, used_pct=0.6, allocated=0, freed=0, group_used_parts=[6, 0]),
            "used: parts of 6 blocks were added and of 6 taken away, with 0 allocated and 0 freed",
        ),
        (changed(1, group_used_parts=[3, 1 << 53]), f"parts of all groups are {6 + 3 * (1 << 53)} blocks"),
    ],
)
def test_parts_that_do_not_add_up_are_a_violation(body: dict[str, Any], says: str) -> None:
    for verdict in (verify(body), verify(msgspec.json.encode(body))):
        assert verdict.verdict == "violated"
        (violation,) = [violation for violation in verdict.violations if violation.rule == "group_parts"]
        assert says in violation.what


@pytest.mark.parametrize("parts", [[1, -1], [1, "2"], 5, [1, 2.5]])
def test_parts_that_are_no_counts_are_malformed(parts: Any) -> None:
    verdict = verify(changed(1, group_used_parts=parts))
    assert [violation.rule for violation in verdict.violations][:1] == ["schema"]
    assert "group_used_parts" in verdict.violations[0].what


def test_rows_without_parts_leave_the_rule_open() -> None:
    body = deepcopy(BODY)
    for row in body["timeline"]:
        del row["group_used_parts"], row["group_cached_parts"]
    assert result(verify(body)).status == "not_run"


def test_a_field_that_a_row_has_twice_is_found() -> None:
    text = msgspec.json.encode(BODY).replace(
        b'"group_used_parts":[1,1]', b'"group_used_parts":[9,9],"group_used_parts":[1,1]'
    )
    verdict = verify(text)
    assert "group_used_parts is given twice" in verdict.violations[0].what


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".jsonl.gz", ".parquet"])
def test_every_form_that_kvarts_writes_is_judged(tmp_path: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    from kvarts.core.kv.groups import PartGroup
    from kvarts.sim.replaying import replay

    from builders.case import Case, Row
    from builders.grouped import FULL, WINDOW

    rows = [Row(index * 5, [1, 2, 3, index], 16, 20, None, 0, None) for index in range(4)]
    case = Case(rows, 4, 4, 16, 64, 8, "default", 1)
    report = replay(case.trace(), case.config(kv_groups="all", groups=(PartGroup(FULL, 2), WINDOW)))
    (timeline,) = timelines_of(report)
    path = tmp_path / f"timeline{suffix}"
    timeline.write(path)
    verdict = verify_file(path)
    assert (verdict.verdict, result(verdict).status) == ("ok", "ok"), verdict.to_text()


def test_a_body_that_is_none_is_an_input_error() -> None:
    with pytest.raises(InputError):
        verify("[]")
