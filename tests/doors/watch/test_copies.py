"""Copies of blocks and reports of their reuse, as vLLM publishes both: what is told apart, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarts.doors.watch.sockets import Followed
from kvarts.doors.watch.watched import Watched, WatchVerdict

from builders.streams import CLEARED, removed, stored

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded").joinpath("vllm-0.32.json").read_text())
"""Bytes of vLLM 0.32's own scheduler, cache and encoder; record_vllm.py made them."""


def watching(*batches: Any, **settings: Any) -> Watched:
    watched = Watched(**settings)
    watched.begin(is_complete=True)
    for seq, events in enumerate(batches):
        watched.apply(seq, msgspec.msgpack.encode([float(seq), events, 0]))
    return watched


def judged(*batches: Any, **settings: Any) -> WatchVerdict:
    return watching(*batches, **settings).verdict(Followed(), [])


def broken(verdict: WatchVerdict, status: str = "violated") -> list[str]:
    return [result.rule for result in verdict.rules if result.status == status]


@pytest.mark.parametrize("name", RECORDED["streams"])
def test_streams_of_vllm_are_ok_with_as_many_hashes_as_it_can_find(name: str) -> None:
    stream = RECORDED["streams"][name]
    watched = Watched(total_blocks=stream["total_blocks"])
    watched.begin(is_complete=True)
    for seq, (batch, num_found) in enumerate(zip(stream["batches"], stream["num_found"], strict=True)):
        watched.apply(seq, bytes.fromhex(batch))
        assert watched.blocks().get("GPU", 0) == num_found
    verdict = watched.verdict(Followed(), [])
    assert (verdict.verdict, broken(verdict)) == ("ok", [])
    assert verdict.most_blocks <= stream["total_blocks"]
    copies = {"repeats": (2, 0), "one_block": (0, 3), "reports": (1, 51), "aborts": (8, 0)}[name]
    assert (verdict.num_copies, verdict.num_possible_copies) == copies
    assert f"{copies[0]:,} copies, {copies[1]:,} copies or reports" in verdict.to_text()


@pytest.mark.parametrize("name", RECORDED["streams"])
def test_copies_are_a_violation_where_they_are_forbidden(name: str) -> None:
    watched = Watched(allows_copies=False)
    watched.begin(is_complete=True)
    for seq, batch in enumerate(RECORDED["streams"][name]["batches"]):
        watched.apply(seq, bytes.fromhex(batch))
    assert "stored_twice" in broken(watched.verdict(Followed(), []))


def test_a_block_goes_with_its_last_copy() -> None:
    twice = [stored([1, 2]), stored([2], 1), removed([2])]
    assert (judged(twice).verdict, judged(twice).blocks) == ("ok", {"GPU": 2})
    assert judged([*twice, removed([2])]).blocks == {"GPU": 1}
    assert broken(judged([*twice, removed([2]), removed([2])])) == ["never_stored"]
    assert broken(judged([stored([1, 2]), stored([2], 1), CLEARED, removed([2])])) == ["never_stored"]


def test_a_copy_has_the_parent_and_the_tokens_of_its_block() -> None:
    assert broken(judged([stored([1, 2]), stored([2], 1, token_ids=[8, 9])])) == ["content"]
    assert broken(judged([stored([1, 2]), stored([2])])) == ["content"]


def test_a_prompt_of_one_block_has_copies_while_no_reports_are_seen() -> None:
    """vLLM stores the only block of such a prompt again when the prompt repeats."""
    copied = [stored([1]), stored([1]), removed([1]), stored([2], 1)]
    assert (judged(copied).verdict, judged(copied).blocks) == ("ok", {"GPU": 2})
    assert judged([*copied, removed([1])]).blocks == {"GPU": 1}
    assert broken(judged([*copied, removed([1]), removed([1])])) == ["never_stored"]


def test_what_holds_only_if_a_report_was_a_copy_is_inconclusive_and_named() -> None:
    reported = [stored([1, 2, 3]), stored([1, 2]), removed([2])]
    assert (judged(reported).verdict, judged(reported).blocks) == ("ok", {"GPU": 2})
    twice = judged([*reported, removed([2])])
    assert (twice.verdict, broken(twice, "inconclusive")) == ("inconclusive", ["never_stored"])
    assert "kv_cache_report_mode full" in (twice.why or "")
    followed = judged([*reported, stored([4], 2)])
    assert (followed.verdict, broken(followed, "inconclusive")) == ("inconclusive", ["parent_unknown"])
    thrice = judged([*reported, removed([2]), removed([2])])
    assert (thrice.verdict, broken(thrice)) == ("violated", ["never_stored"])


def test_a_report_that_begins_with_a_block_that_may_be_gone_is_no_copy_of_the_rest() -> None:
    """Block 1 is reported or stored anew: only in the second case has block 2 a copy that outlasts its removal."""
    watched = watching([stored([1, 2]), stored([1, 2]), removed([1]), stored([1, 2]), removed([2])])
    assert watched.blocks() == {"GPU": 1}
    assert watched.claims.copies.is_possible((("GPU", 0), 2))


def test_the_pool_is_judged_by_distinct_hashes() -> None:
    full = [stored([1, 2, 3]), *[stored([1, 2, 3])] * 20]
    assert judged(full, total_blocks=3).verdict == "ok"
    assert broken(judged([*full, stored([4], 3)], total_blocks=3)) == ["pool"]
    replaced = [*full, removed([3]), stored([5], 2), removed([5]), stored([6], 2)]
    assert judged(replaced, total_blocks=3).verdict == "ok"
    assert judged(replaced, total_blocks=3).most_blocks == 3


def test_of_many_blocks_with_possible_copies_the_oldest_are_not_judged() -> None:
    events = [event for name in range(9) for event in (stored([name, 100 + name]), stored([name, 100 + name]))]
    gone = [removed([name, 100 + name]) for name in range(9)]
    late = judged([event for pair in zip(events[::2], events[1::2], gone, strict=True) for event in pair],
                  [removed([0])], max_blocks=4)  # fmt: skip
    assert (late.verdict, broken(late, "inconclusive")) == ("inconclusive", ["never_stored"])


class Engine:
    """A naive engine: the blocks of a prompt, each with its copies, and what vLLM publishes about them."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.told: list[Any] = []

    def run(self, prompt: int, num_blocks: int, *, reports: bool, reads: bool) -> None:
        """Compute a prompt of whole blocks: the last one in any case, and all unless the request `reads`."""
        names = [100 * prompt + place for place in range(num_blocks)]
        num_found = next((at for at, name in enumerate(names) if name not in self.copies), num_blocks)
        num_found = min(num_found, num_blocks - 1) if reads else 0
        if reports and num_found:
            self.told.append(stored(names[:num_found]))
        self.told.append(stored(names[num_found:], names[num_found - 1] if num_found else None))
        for name in names[num_found:]:
            self.copies[name] = self.copies.get(name, 0) + 1

    def evict(self, place: int) -> None:
        """Remove one copy of a block."""
        if self.copies:
            name = sorted(self.copies)[place % len(self.copies)]
            self.copies[name] -= 1
            if not self.copies[name]:
                del self.copies[name]
            self.told.append(removed([name]))


steps = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(0, 5).map(bool)),
        st.integers(0, 11),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(steps)
def test_an_engine_with_copies_and_reports_is_never_violated(done: list[Any]) -> None:
    engine = Engine()
    watched = Watched(total_blocks=12)
    watched.begin(is_complete=True)
    for seq, step in enumerate(done):
        if isinstance(step, int):
            engine.evict(step)
        else:
            engine.run(step[0], step[1], reports=step[2], reads=step[3])
        watched.apply(seq, msgspec.msgpack.encode([float(seq), engine.told, 0]))
        engine.told.clear()
        there, copies = set(watched.claims.media.get(("GPU", 0), {})), watched.claims.copies
        assert all(name in there or copies.is_possible((("GPU", 0), name)) for name in engine.copies)
        assert len(there) - copies.num_uncertain["GPU", 0] <= len(engine.copies)
        if not copies.num_possible:
            assert there == set(engine.copies)
    assert not watched.claims.violations["never_stored"] and not watched.claims.violations["pool"]
    assert not watched.verdict(Followed(), []).violations
