"""Copies of blocks and reports of their reuse, published as vLLM 0.32's own scheduler, cache and encoder do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvarts import LinearCost, ReplayConfig, Trace, TraceRequest, replay
from kvarts.core.content import pack_units
from kvarts.core.events import Event
from kvarts.doors.kv_events.batches import Batch, Extent, Wire
from kvarts.doors.kv_events.publisher import READERS
from kvarts.doors.watch.sockets import Followed
from kvarts.doors.watch.watched import Watched

RECORDED = json.loads((Path(__file__).parents[1] / "watch" / "recorded" / "vllm-0.32.json").read_text())["streams"]
SIZE = 16


class Published:
    """A reader of events: the payloads that are published of them."""

    wants_details = True

    def __init__(self, extent: Extent) -> None:
        self.payloads: list[bytes] = []
        self.wire = Wire("map")
        self.reader = READERS[extent](self, clears=False)

    def put(self, batch: Batch) -> None:
        self.payloads.append(self.wire.encode(batch.told, batch.time_s))

    def pace(self) -> None:
        pass

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            self.reader.observe([event])


def published(extent: Extent, requests: Sequence[tuple[int, int, int, int]], num_blocks: int) -> Published:
    """What is published of requests, each a time in ms, a name, tokens of its prompt, and of its answer."""
    rows = [
        TraceRequest(
            row, ms * 1_000_000, pack_units([name] * num_tokens), num_tokens, num_output, pack_units([7] * num_output)
        )
        for row, (ms, name, num_tokens, num_output) in enumerate(requests)
    ]
    config = ReplayConfig(
        num_pages=num_blocks, page_size=SIZE, max_num_seqs=8, cost=LinearCost(step_ms=1.0), step_by_step=True
    )
    found = Published(extent)
    replay(Trace(rows, has_output_tokens=True), config, observers_of=lambda replica: [found])
    return found


def told(payloads: Sequence[bytes]) -> list[Any]:
    """Each event, as what it stores after which parent, or as single removals."""
    found: list[Any] = []
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                found.append((event["block_hashes"], event["parent_block_hash"], event["token_ids"]))
            else:
                found += [(name,) for name in event["block_hashes"]]
    return found


def theirs(name: str) -> list[Any]:
    return told([bytes.fromhex(batch) for batch in RECORDED[name]["batches"]])


ALONE = 1000
REPEATS = [(1, 48, 1), (1, 48, 1), (1, 48, 1), (2, 128, 1), (1, 52, 1), (3, 128, 1), (4, 128, 1)]
ONE_BLOCK = [(1, 16, 1), (1, 16, 1), (1, 16, 1), (2, 96, 1), (1, 16, 1), (3, 128, 1)]


@pytest.mark.parametrize(("name", "requests"), [("repeats", REPEATS), ("one_block", ONE_BLOCK)])
def test_copies_and_their_removals_are_published_as_by_vllm(name: str, requests: Any) -> None:
    timed = [(place * ALONE, *request) for place, request in enumerate(requests)]
    found = published("copies", timed, RECORDED[name]["total_blocks"])
    assert told(found.payloads) == theirs(name)


def test_reports_are_published_as_by_vllm_also_of_a_request_that_waits() -> None:
    timed = [(0, 1, 64, 1), (ALONE, 1, 64, 1), (2 * ALONE, 2, 104, 12), (2 * ALONE + 1, 1, 128, 1)]
    timed += [((3 + place) * ALONE, name, 160, 1) for place, name in enumerate((3, 4, 1))]
    found = published("reports", timed, RECORDED["reports"]["total_blocks"])
    assert told(found.payloads) == theirs("reports")


@pytest.mark.parametrize("extent", ["copies", "reports"])
def test_a_full_state_has_each_copy_so_that_removals_after_it_are_right(extent: Extent) -> None:
    timed = [(place * ALONE, *request) for place, request in enumerate(REPEATS)]
    cut = published(extent, timed[:4], 12)
    state = cut.wire.encode(cut.reader.snapshot().told, 0.0)
    whole = published(extent, timed, 12)
    assert 0 < len(cut.payloads) < len(whole.payloads)
    watched = Watched(total_blocks=12)
    watched.begin(is_complete=False)
    for seq, payload in enumerate([state, *whole.payloads[len(cut.payloads) :]]):
        watched.apply(seq, payload)
    verdict = watched.verdict(Followed(), [])
    assert (verdict.verdict, verdict.blocks) == ("ok", {"GPU": 12})


def test_only_blocks_are_published_unless_copies_are_asked_for() -> None:
    timed = [(place * ALONE, *request) for place, request in enumerate(REPEATS[:3])]
    assert [len(told(published(extent, timed, 12).payloads)) for extent in READERS] == [1, 3, 5]
