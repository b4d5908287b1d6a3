"""Stories and the hit ledger of runs with KV groups: what windows gave back, and which group ended a hit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.base.errors import InputError
from kvarts.core.kv.groups import PartGroup
from kvarts.core.kv.layers import KvLayer
from kvarts.proof.explain.hits import KINDS, NOT_KEPT, hit_ledger
from kvarts.proof.explain.reading import Journal, load_journal
from kvarts.proof.explain.story import story_of_block, story_of_request
from kvarts.proof.explain.sums import overview_of
from kvarts.proof.journal import AdmittedLine, GivenBackLine, RemovedLine, StoredLine

from builders.case import Case, Row, cases
from builders.grouped import FULL, WINDOW, naive_settings, part_groups
from builders.written import journals_of
from oracles.naive import polynomial_ns, run_naive
from oracles.naive_group_hits import RememberingGroupEngine

GROUPS = (PartGroup(FULL, 2), WINDOW)


def loaded(text: bytes, folder: Path) -> Journal:
    path = folder / "events.jsonl"
    path.write_bytes(text)
    return load_journal(path)


@pytest.mark.laws
@given(case=cases(max_requests=16), groups=part_groups(), keeps=st.sampled_from(["all", "tails"]))
def test_every_prompt_token_has_the_fate_that_a_token_by_token_engine_gives_it(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """L7, with KV groups: counted once, and for the right reason."""
    case.profile = "default"
    requests = case.naive_requests()
    engines = [
        RememberingGroupEngine(**naive_settings(case, groups, keeps), cost=polynomial_ns) for _ in range(case.replicas)
    ]
    run_naive(requests, engines)
    folder = tmp_path_factory.mktemp("journal")
    for engine, text in zip(engines, journals_of(case, kv_groups=keeps, groups=groups), strict=True):
        journal = loaded(text, folder)
        ledger = hit_ledger(journal)
        for seq, counted in engine.num_by_fate().items():
            account = ledger.by_request[seq]
            assert {kind: account.get(kind, 0) for kind in (*KINDS, NOT_KEPT)} == {
                kind: counted.get(kind, 0) for kind in (*KINDS, NOT_KEPT)
            }
            assert sum(account.values()) == journal.arrivals[seq].prompt_tokens
        assert ledger.by_request.keys() == engine.num_by_fate().keys()
        assert sum(ledger.tokens.values()) == ledger.prompt_tokens
        assert (ledger.evicted_ago_ms is not None) >= (ledger.tokens["evicted"] > 0)
        for seq in ledger.by_request:
            assert story_of_request(journal, str(seq))[-1]
        for line in journal.lines:
            if isinstance(line, RemovedLine) and not line.is_copy:
                story = story_of_block(journal, f"{journal.names[line.request]}:{line.end_page - 1}")
                assert any(f"step {line.step} " in said for said in story)
        assert overview_of([journal]).prompt_tokens == ledger.prompt_tokens


# A run told by hand ---------------------------------------------------------------------------------------

PROMPT = list(range(1, 17))
ROWS = [
    Row(0, PROMPT, 16, 9, None, 0, None),
    Row(100, [*PROMPT, 50, 51, 52, 53], 20, 1, None, 0, None),
    Row(200, [*PROMPT[:8], 60, 61, 62], 11, 1, None, 0, None),
]


def told(tmp_path: Path, keeps: str, groups: tuple[PartGroup, ...] = GROUPS, **changes: Any) -> Journal:
    case = Case(ROWS, 1, 4, 40, 64, 8, "default", 1)
    return loaded(journals_of(case, kv_groups=keeps, groups=groups, **changes)[0], tmp_path)


def said(story: list[str]) -> list[str]:
    """What is told, without step and time."""
    return [line[29:].strip() for line in story]


def test_the_story_of_a_request_names_what_its_window_gave_back_and_what_ended_its_hit(tmp_path: Path) -> None:
    journal = told(tmp_path, "tails")
    assert journal.name_of_group(1) == "window 6"
    lines = said(story_of_request(journal, "0"))
    assert lines[1] == "admitted after 0.0 ms: found nothing in the cache"
    assert "of its sequence, 4 pages between 0 and 3 of window 6 given back, until step 5" in lines
    assert "of its sequence, page 0 of window 6 not kept" in lines  # the same prompt needs page 1
    assert lines[-1].startswith("finished: 9 tokens made")
    # Nothing is short, yet the beginning of a prompt that no other had cannot be gone on from: no tail was kept there.
    shorter = said(story_of_request(journal, "2"))
    assert "found nothing in the cache, as window 6 had no more; others could go on from 2 pages" in shorter[1]


def test_all_that_is_kept_can_be_hit(tmp_path: Path) -> None:
    journal = told(tmp_path, "all")
    assert "hit 8 tokens (2 pages, last touched by 1)" in said(story_of_request(journal, "2"))[1]
    assert hit_ledger(journal).tokens[NOT_KEPT] == 0
    ledger = hit_ledger(told(tmp_path, "tails"))
    assert ledger.tokens[NOT_KEPT] == 8
    assert ledger.to_builtins()["ended_by"] == {"window 6": {"hits": 1, "tokens": 8}}
    assert "hits ended by window 6: 1, with 8 tokens that others could have gone on from" in ledger.to_text()
    assert "ended_by" not in hit_ledger(journal).to_builtins()


def test_the_story_of_a_block_is_told_by_group(tmp_path: Path) -> None:
    lines = said(story_of_block(told(tmp_path, "tails"), "0:0")[1:])
    assert lines[:4] == [
        "stored in full: 0 filled it",
        "stored in window 6: 0 filled it",
        "given back by 0 in window 6; 1 hold it",
        "not kept in window 6",
    ]
    assert lines[7:9] == ["computed by 2 as well: a copy", "stored in window 6: 2 filled it"]
    end = story_of_block(told(tmp_path, "tails"), "1:4")[-1]
    assert end == "in the end it is cached in full and window 6, and nothing holds it"


def test_a_snapshot_of_a_state_is_told(tmp_path: Path) -> None:
    groups = (PartGroup(FULL, 2), PartGroup(KvLayer(kind="state", state_bytes=1), 2))
    journal = told(tmp_path, "all", groups)
    assert "its state at the end of page 3 is kept, as a snapshot" in said(story_of_request(journal, "0"))
    assert "stored in state: 0 left a snapshot at its end" in said(story_of_block(journal, "0:3"))
    assert "as state had no more; others could go on from 2 pages" in said(story_of_request(journal, "2"))[1]


def test_a_journal_with_groups_is_read_with_care(tmp_path: Path) -> None:
    case = Case(ROWS, 1, 4, 40, 64, 8, "default", 1)
    text = journals_of(case, kv_groups="all", groups=GROUPS)[0]
    journal = loaded(text, tmp_path)
    kinds = {type(line) for line in journal.lines}
    assert {StoredLine, GivenBackLine, AdmittedLine} <= kinds
    assert [str(group) for group in journal.groups] == ["full", "window 6"]
    for damage, says in (
        ((b'"group":1', b'"group":2'), "group: is 2, and there are 2 KV groups"),
        ((b',"group":0', b""), "group: is None"),
        ((b'"reach":[', b'"reach":[0,'), "reach: is of 3 KV groups"),
        ((b'"tokens":6', b'"tokens":0'), "must be at least 1"),
    ):
        with pytest.raises(InputError, match=says):
            loaded(text.replace(*damage), tmp_path)
    whole = journals_of(case)[0]
    assert b"group" not in whole and b"reach" not in whole, "of whole pages a journal says what it always said"


def test_a_window_that_begins_where_its_sink_ends_gives_back_nothing(tmp_path: Path) -> None:
    """An empty run of pages in a journal cannot be read."""
    window = PartGroup(KvLayer(kind="window", num_heads=1, head_numbers=2, span=2, sink=1), 1)
    case = Case([Row(0, [0] * 5, 10, 1, None, 0, None), Row(0, [0], 2, 1, None, 0, None)], 2, 2, 5, 4, 1, "default", 1)
    for text in journals_of(case, kv_groups="all", groups=(window,)):
        given = [line for line in loaded(text, tmp_path).lines if isinstance(line, GivenBackLine)]
        assert [(line.start_page, line.end_page) for line in given] == [(1, 3)]
