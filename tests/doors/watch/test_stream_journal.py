"""A journal of what events told has, for every block, the tokens and the place that events gave it."""

from __future__ import annotations

import io
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given

from kvarts.doors.kv_events.batches import Batch, Wire
from kvarts.doors.kv_events.reader import KvEventReader
from kvarts.doors.watch.journal import StreamJournal
from kvarts.doors.watch.sockets import Followed
from kvarts.doors.watch.watched import Watched
from kvarts.proof.explain.reading import Journal, load_journal
from kvarts.proof.journal import AnyLine, RemovedBelowLine, RemovedLine, StoredBelowLine, StoredLine

from builders.kv_events import run_consumed
from builders.streams import CLEARED, removed, stored
from builders.tiered import Tiered, tiered


def held(journal: Journal) -> dict[str, set[tuple[int, ...]]]:
    """What is stored at the end, by tier: each page by all tokens up to its end."""
    there: dict[str, set[tuple[int, ...]]] = {}
    for line in journal.lines:
        if not isinstance(line, StoredLine | StoredBelowLine | RemovedLine | RemovedBelowLine):
            continue
        tier = line.tier if isinstance(line, StoredBelowLine | RemovedBelowLine) else "device"
        content = journal.contents[line.request]
        for page in range(line.start_page, line.end_page):
            name = tuple(content.tokens(0, (page + 1) * journal.page_size))
            if isinstance(line, StoredLine | StoredBelowLine):
                assert name not in there.setdefault(tier, set())
                there[tier].add(name)
            else:
                there[tier].remove(name)
    return {tier: names for tier, names in there.items() if names}


def watched_to(path: Path, *batches: list[object]) -> Watched:
    with path.open("wb") as file:
        journal = StreamJournal(file.write, total_blocks=9)
        watched = Watched(journal=journal)
        watched.begin(is_complete=True)
        for seq, events in enumerate(batches):
            watched.apply(seq, msgspec.msgpack.encode([float(seq), events, 0]))
        journal.close()
    return watched


@pytest.mark.parametrize("time_s", [1e308, math.inf, math.nan, -1.0, 1e10])
def test_a_time_that_no_reader_takes_is_a_violation_and_no_line(tmp_path: Path, time_s: float) -> None:
    path = tmp_path / "journal.jsonl"
    watched_to(path, [stored([1])])
    expected = path.read_bytes()
    with path.open("wb") as file:
        journal = StreamJournal(file.write, total_blocks=9)
        watched = Watched(journal=journal)
        watched.begin(is_complete=True)
        watched.apply(0, msgspec.msgpack.encode([0.0, [stored([1])], 0]))
        watched.apply(1, msgspec.msgpack.encode([time_s, [stored([2])], 0]))
        watched.apply(1 << 60, msgspec.msgpack.encode([1.0, [stored([3])], 0]))
        journal.close()
    assert path.read_bytes() == expected
    assert [each.seq for each in watched.claims.violations["schema"]] == [1, 1 << 60]
    assert len(load_journal(path).lines) == 3


def test_a_run_that_goes_on_is_one_request_and_a_branch_is_another(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    watched_to(
        path,
        [stored([1, 2])],
        [stored([3], 2), stored([4], 1)],
        [removed([3]), stored([5], 2), stored([2], 1, medium="CPU")],
        [removed([5, 2]), removed([4, 1])],
    )
    journal = load_journal(path)
    assert journal.page_size == 2
    assert {journal.names[number]: content.tokens(0, content.num_known_tokens).tolist()
            for number, content in journal.contents.items()} == {
        "stream-0": [1, 1, 2, 2, 3, 3],
        "stream-1": [1, 1, 4, 4],
        "stream-2": [1, 1, 2, 2, 5, 5],
    }  # fmt: skip
    assert held(journal) == {"host": {(1, 1, 2, 2)}}
    assert [line.t_ms for line in journal.lines][-1] == 3000.0


def test_clearing_removes_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    watched_to(path, [stored([1, 2]), stored([1], medium="CPU")], [CLEARED, stored([7])])
    assert held(load_journal(path)) == {"device": {(7, 7)}}


def test_of_nothing_a_journal_can_be_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    watched_to(path)
    assert load_journal(path).lines == []


class Telling:
    """A sink that watches what it is told, as bytes."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.journal = StreamJournal(self.file.write, total_blocks=0)
        self.watched = Watched(journal=self.journal)
        self.watched.begin(is_complete=True)

    def put(self, batch: Batch) -> None:
        self.watched.apply(batch.seq, Wire("map").encode(batch.told, batch.time_s))

    def pace(self) -> None:
        pass


@pytest.mark.laws
@given(tiered(max_requests=12))
def test_what_engines_tell_is_ok_and_its_journal_holds_what_the_caches_hold(of: Tiered) -> None:
    """kvarts' own events break no rule, whatever the traffic and the tiers."""
    emitting = [Telling() for _ in range(of.case.replicas)]
    consumed = run_consumed(
        of.case, offload=of.offload, more=lambda index: [KvEventReader(emitting[index], clears=index == 0)]
    )
    for each, told in zip(consumed, emitting, strict=True):
        verdict = told.watched.verdict(Followed(), [])
        assert not verdict.violations, verdict.to_text()
        told.journal.close()
        head, *lines = told.file.getvalue().splitlines()
        journal = Journal(
            [msgspec.json.decode(line, type=AnyLine) for line in lines],
            page_size=msgspec.json.decode(head)["block_size_tokens"],
            num_pages=0,
        )
        expected = {
            {"GPU": "device", "CPU": "host", "STORAGE": "disk"}[medium]: len(blocks)
            for medium, blocks in each.consumer.content().items()
        }
        if not any(row.tenant for row in of.case.rows):  # a journal of events does not know tenants
            assert {tier: len(names) for tier, names in held(journal).items()} == expected
