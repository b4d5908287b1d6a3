"""What events claim is judged by what they claimed before: each rule is broken once, and what is right is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.doors.watch.decoding import MalformedError, Stored, decode_batch
from kvarts.doors.watch.sockets import Followed
from kvarts.doors.watch.watched import Watched, WatchVerdict

from builders.streams import CLEARED, removed, stored


def judged(*batches: Any, is_complete: bool = True, **settings: Any) -> WatchVerdict:
    watched = Watched(**settings)
    watched.begin(is_complete=is_complete)
    for seq, events in enumerate(batches):
        watched.apply(seq, msgspec.msgpack.encode([float(seq), events, 0]) if isinstance(events, list) else events)
    return watched.verdict(Followed(), [])


def broken(verdict: WatchVerdict) -> dict[str, int]:
    return {result.rule: result.num_violations for result in verdict.rules if result.status == "violated"}


def test_what_is_right_is_ok() -> None:
    verdict = judged(
        [stored([1, 2]), stored([3], 2), stored([1], medium="CPU")],
        [removed([3, 2]), removed([1])],
        [stored([1]), CLEARED],
        [stored([1, 2], group_idx=0, extra_keys=[None, None], kv_cache_spec_kind="full_attention", new_field=7)],
        total_blocks=3,
    )
    assert (verdict.verdict, broken(verdict), verdict.exit_code) == ("ok", {}, 0)
    assert verdict.counts.num_stored_blocks == 7
    assert (verdict.blocks, verdict.most_blocks) == ({"GPU": 2}, 3)


@pytest.mark.parametrize(
    ("rule", "batches"),
    [
        ("stored_twice", [[stored([1])], [stored([1])]]),
        ("never_stored", [[stored([1])], [removed([2])]]),
        ("never_stored", [[stored([1], medium="CPU")], [removed([1])]]),
        ("never_stored", [[stored([1]), CLEARED, removed([1])]]),
        ("parent_unknown", [[stored([1], 7)]]),
        ("parent_unknown", [[stored([1]), removed([1]), stored([2], 1)]]),
        ("tokens", [[stored([1], token_ids=[1])]]),
        ("tokens", [[stored([1], size=2), stored([2], size=4)]]),
        ("tokens", [[stored([1], size=0)]]),
        ("content", [[stored([1], token_ids=[5, 5]), stored([1], token_ids=[6, 6], medium="CPU")]]),
        ("pool", [[stored([1, 2, 3])]]),
        ("schema", [b"\xc1"]),
        ("schema", [[{"type": "BlockStored", "block_hashes": [1]}]]),
    ],
)
def test_each_rule_can_be_broken_and_says_where(rule: str, batches: list[Any]) -> None:
    verdict = judged(*batches, total_blocks=2, allows_copies=False)
    assert broken(verdict) == {rule: 1}
    assert (verdict.verdict, verdict.exit_code) == ("violated", 5)
    (violation,) = verdict.violations
    assert (violation.rule, violation.seq) == (rule, len(batches) - 1)
    assert violation.what in verdict.to_text()


def test_batches_that_are_lost_are_a_violation_and_what_follows_is_not_judged_by_them() -> None:
    watched = Watched()
    watched.begin(is_complete=True)
    watched.apply(0, msgspec.msgpack.encode([0.0, [stored([1])], 0]))
    watched.lose(1, 3)
    watched.begin(is_complete=False)
    watched.apply(4, msgspec.msgpack.encode([0.0, [removed([2]), stored([3], 2)], 0]))
    verdict = watched.verdict(Followed(), [])
    assert broken(verdict) == {"sequence": 1}
    assert {result.rule for result in verdict.rules if result.status == "inconclusive"} == {
        "never_stored",
        "parent_unknown",
    }


def test_what_may_have_been_there_before_is_inconclusive_until_all_is_cleared() -> None:
    late = judged([removed([1])], [stored([3], 2)], is_complete=False)
    assert (late.verdict, late.exit_code, broken(late)) == ("inconclusive", 6, {})
    assert "not known" in (late.why or "")
    cleared = judged([CLEARED], [removed([1])], is_complete=False)
    assert broken(cleared) == {"never_stored": 1}


def test_nothing_is_inconclusive() -> None:
    assert (judged().verdict, judged().why) == ("inconclusive", "no event came")


def test_groups_of_layers_have_blocks_of_their_own() -> None:
    both = [stored([1], group_idx=0), stored([1], group_idx=1), removed([1], group_idx=1)]
    verdict = judged(both)
    assert (broken(verdict), verdict.blocks) == ({}, {"GPU": 1})


def test_blocks_that_are_stored_again_say_how_many_more_would_have_kept_them() -> None:
    """1 went right before it came again, 2 with three others after it."""
    verdict = judged(
        [stored([1]), stored([2]), stored([3]), stored([4]), stored([5])],
        [removed([2]), removed([3]), removed([4]), removed([5]), removed([1])],
        [stored([1])],
        [stored([2])],
        [removed([1]), CLEARED, stored([1])],
    )
    assert verdict.num_stored_again == 2
    assert [(point.extra_blocks, point.kept_blocks) for point in verdict.curve] == [(1, 1), (8, 2)]


ARRAY = ["BlockStored", [1, 2], None, [1, 1, 2, 2], 2, None, "GPU"]


@pytest.mark.parametrize(
    "event",
    [
        stored([1, 2], medium=None),
        ARRAY,
        ARRAY[:5],
        [*ARRAY, None, [None, None], 0, "full_attention", "something new"],
    ],
)
def test_maps_and_arrays_old_and_new_say_the_same(event: Any) -> None:
    (told,) = decode_batch(msgspec.msgpack.encode([1.5, [event], 0])).told
    (expected,) = decode_batch(msgspec.msgpack.encode([1, [stored([1, 2])]])).told
    assert isinstance(told, Stored) and msgspec.structs.replace(told, kind=None) == expected


def test_secondary_tiers_and_other_machines_have_blocks_of_their_own() -> None:
    def kept(**fields: Any) -> list[dict[str, Any]]:
        return [stored([1]) | fields, removed([1]) | fields]

    array = ["BlockStored", [1], None, [1, 1], 2, None, "CPU", None, None, 0, None, None, "LOCAL", "slow", "a session"]
    places = [kept(), kept(medium="CPU"), kept(medium="CPU", ownership="disk"), kept(medium="CPU", locality="REMOTE")]
    verdict = judged(*([one] for one, _ in places), [array], *([gone] for _, gone in places))
    assert not verdict.violations and verdict.blocks == {"CPU/slow": 1}
    gone = ["BlockRemoved", [1], "CPU", 0, None, "slow"]
    assert judged([CLEARED], [array], [gone]).verdict == "ok"
    assert judged([CLEARED], [array], [removed([1], medium="CPU")]).verdict == "violated"


def test_what_has_another_type_is_counted_and_noted() -> None:
    verdict = judged([{"type": "BlockMoved", "block_hashes": 7}, ["Later", 1], stored([1])])
    assert (verdict.verdict, verdict.counts.num_unknown_events) == ("ok", 2)
    assert "2 events" in verdict.notes[0]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner),
    max_leaves=8,
)
fields = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]) | values},
    optional={
        "block_hashes": values | st.lists(st.integers(0, 3)),
        "parent_block_hash": values,
        "token_ids": values | st.lists(st.integers(0, 9)),
        "block_size": values | st.integers(-1, 4),
        "medium": values,
        "group_idx": values,
    },
)


@pytest.mark.laws
@given(st.lists(st.binary(max_size=40) | st.tuples(values, st.lists(values | fields), values).map(list), max_size=4))
def test_whatever_comes_there_is_a_verdict(bodies: list[Any]) -> None:
    watched = Watched(total_blocks=2)
    for seq, body in enumerate(bodies):
        watched.apply(seq, body if isinstance(body, bytes) else msgspec.msgpack.encode(body))
    verdict = watched.verdict(Followed(), [])
    assert verdict.to_text()
    msgspec.json.encode(verdict)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x01", b"\x90", b"\x91\x01", b"\x93\x01\x90\x01\x01", b"\xff" * 9])
def test_bytes_that_are_no_batch_are_malformed(body: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_batch(body)
