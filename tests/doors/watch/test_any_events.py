"""Whatever an engine publishes, a watch takes it and ends with a verdict."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.doors.watch.journal import StreamJournal
from kvarts.doors.watch.metrics import EngineSample
from kvarts.doors.watch.sockets import Followed
from kvarts.doors.watch.watched import Watched, WatchVerdict

HASHES = st.one_of(st.integers(0, 6), st.binary(max_size=9), st.integers(-(1 << 63), (1 << 64) - 1))
COUNTS = st.one_of(st.sampled_from([-1, 0, 1, 2, 16]), st.integers(-(1 << 63), (1 << 63) - 1))
KINDS = st.sampled_from(["full_attention", "sliding_window", "chunked_local_attention", "mamba", "", "mla_attention"])
EVENTS = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("BlockStored"),
            "block_hashes": st.lists(HASHES, max_size=5),
            "parent_block_hash": st.none() | HASHES,
            "token_ids": st.lists(st.integers(0, 3), max_size=8),
            "block_size": COUNTS,
        },
        optional={
            "medium": st.sampled_from([None, "GPU", "CPU", ""]),
            "group_idx": st.none() | st.sampled_from([0, 1, 2]) | COUNTS,
            "kv_cache_spec_kind": KINDS | st.none() | COUNTS,
            "kv_cache_spec_sliding_window": COUNTS | st.none() | KINDS,
            "extra_keys": st.lists(st.none() | st.lists(KINDS, max_size=2), max_size=3),
            "locality": st.sampled_from([None, "LOCAL", "REMOTE"]),
            "ownership": st.sampled_from([None, "a"]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("BlockRemoved"), "block_hashes": st.lists(HASHES, max_size=5)},
        optional={"medium": st.sampled_from([None, "GPU", "CPU"]), "group_idx": st.none() | COUNTS},
    ),
    st.just({"type": "AllBlocksCleared"}),
    st.just({"type": "else"}),
)
BATCHES = st.lists(st.lists(EVENTS, max_size=4), max_size=6)


def judged(batches: list[list[Any]]) -> WatchVerdict:
    file = io.BytesIO()
    journal = StreamJournal(file.write, total_blocks=4)
    watched = Watched(total_blocks=4, journal=journal)
    watched.begin(is_complete=True)
    for seq, events in enumerate(batches):
        watched.apply(seq, msgspec.msgpack.encode([float(seq), events, 0]))
    journal.close()
    for line in file.getvalue().splitlines():
        msgspec.json.decode(line)
    sample = EngineSample(num_queried_tokens=10, num_hit_tokens=4)
    verdict = watched.verdict(Followed(), [], sample=sample)
    assert verdict.to_text() and msgspec.json.decode(msgspec.json.encode(verdict))
    return verdict


def event(hashes: list[int], size: int, **more: Any) -> dict[str, Any]:
    tokens = [1] * len(hashes)
    return {"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "block_size": size, **more}


@pytest.mark.parametrize(
    "events",
    [
        [event([], 1)],
        [event([], 0, parent_block_hash=3)],
        [event([1], 0), event([1], 0, group_idx=1, kv_cache_spec_kind="sliding_window")],
        [event([1], 1), event([1], 1, group_idx=1 << 62)],
    ],
    ids=["no block", "no block after a block", "blocks without tokens", "a group far away"],
)
def test_odd_events_are_judged(events: list[Any]) -> None:
    assert judged([events]).counts.num_events == len(events)


@pytest.mark.laws
@given(BATCHES)
def test_any_events_are_judged(batches: list[list[Any]]) -> None:
    judged(batches)
