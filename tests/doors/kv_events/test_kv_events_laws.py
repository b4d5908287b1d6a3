"""A consumer that has the events alone holds what the caches hold, after any sequence of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts import OffloadConfig
from kvarts.core.content import Content
from kvarts.core.event_log import EventReader
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.core.keys import Adapter, BlockKey, BlockKeys, salt_of_adapter
from kvarts.core.tiers.config import TierConfig
from kvarts.doors.kv_events.batches import Batch, BlocksCleared, BlocksRemoved, BlocksStored, EventGroup, Wire
from kvarts.doors.kv_events.reader import KvEventReader

from builders.case import Case, Row, cases
from builders.kv_events import run_consumed
from builders.reader_contract import EventReaderContract
from builders.tiered import Tiered, tiered
from oracles.naive_kv_events import NaiveConsumer, chain

forms = st.sampled_from([("map", False), ("map", True), ("array", False)])


@pytest.mark.laws
@given(cases(), forms, st.booleans(), st.booleans())
def test_a_consumer_holds_what_the_cache_holds(case: Case, form: Any, clears: bool, slowly: bool) -> None:
    consumed = run_consumed(case, form=form[0], hash_bytes=form[1], clears=clears, step_by_step=slowly)
    for each in consumed:
        each.compare()


@pytest.mark.laws
@given(tiered(lists=True), forms)
def test_a_consumer_holds_what_all_tiers_hold(of: Tiered, form: Any) -> None:
    for each in run_consumed(of.case, form=form[0], hash_bytes=form[1], offload=of.offload):
        each.compare()


def small(rows: Sequence[tuple[int, int, str | None]], **settings: Any) -> Case:
    """Rows of a number of prompt tokens, output tokens, and a tenant, one at a time."""
    made = [Row(0, [0] * -(-num // 2), num, output, None, 0, tenant, None, None) for num, output, tenant in rows]
    given = {"unit_tokens": 2, "page_size": 2, "max_num_batched_tokens": 4, "max_num_seqs": 1, "replicas": 1}
    return Case(made, **given, profile="default", long_prefill_token_threshold=0, watermark=0.0, **settings)


def test_a_full_state_stores_the_block_before_first_in_whichever_tier_it_is() -> None:
    """A tier of another name comes after files, which here have what follows its blocks."""
    tiers = [
        TierConfig(name="host", kind="memory", pages=3, read=50_000, write=1_000_000, latency_us=0.0),
        TierConfig(name="cxl", kind="memory", pages=3, read=50_000, write=50_000, latency_us=0.0),
        TierConfig(name="disk", kind="files", pages=2, read=50_000, write=50_000, latency_us=100.0),
    ]
    offload = OffloadConfig(
        tiers=tuple(tiers), policy="lazy", target_free=1, kv_bytes_per_token=1000, store_within_ms=0.0,
        preemption_mode="swap",
    )  # fmt: skip
    (consumed,) = run_consumed(
        small([(num, 1, None) for num in (12, 4, 4, 3, 4, 4, 4, 16)], num_pages=7), offload=offload
    )
    consumed.compare()


def test_a_block_that_arrives_after_the_one_before_it_has_left_is_told_once_that_is_back() -> None:
    """Stores fail in turn, so that host memory has a page and, until its next store ends, not the one before."""
    case = small([(20, 2, None), (16, 1, "a")], num_pages=8)
    case.page_size = 3
    offload = OffloadConfig(
        host_pages=3, h2d=50_000, d2h=50_000, latency_us=0.0, kv_bytes_per_token=1000, disk_pages=2, disk_read=50_000,
        disk_write=50_000, disk_latency_us=100.0, store_within_ms=500.0, preemption_mode="swap", fail_every=2,
    )  # fmt: skip
    (consumed,) = run_consumed(case, offload=offload)
    consumed.compare()


class Kept:
    """A sink that keeps what was told, flat: in how many batches it came is not looked at."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.reader = KvEventReader(self)

    def put(self, batch: Batch) -> None:
        self.told += batch.told

    def pace(self) -> None:
        pass

    wants_details = True

    def observe(self, events: list[Event]) -> None:
        self.reader.observe(events)


class TestContract(EventReaderContract):
    def make(self, path: Path) -> EventReader:
        return Kept()  # type: ignore[return-value]

    def outcome(self, reader: EventReader, path: Path) -> object:
        assert isinstance(reader, Kept)
        consumer = NaiveConsumer()
        for told in reader.told:
            consumer.apply(Wire("map").encode([told], 0.0))
        return consumer.content(), reader.reader.snapshot().told


class OneBatch:
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def put(self, batch: Batch) -> None:
        self.batches.append(batch)

    def pace(self) -> None:
        pass


def content(*tokens: int, owner: int = 0, salt: str | None = None) -> Content:
    return Content.from_tokens(tokens, page_size=2, owner=owner, salt=salt)


def test_names_are_those_of_vllm_from_its_root_on() -> None:
    """By a CBOR written by hand; and a tenant's name is in the names of all its blocks."""
    tokens = [0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1]
    for salt in (None, "tenant"):
        assert list(BlockKeys(content(*tokens, salt=salt), algorithm="sha256_cbor")) == chain(tokens, 2, salt)
    assert chain([1, 2, 3, 4], 2, "a")[1] != chain([1, 2, 3, 4], 2)[1]


def test_a_sequence_that_goes_on_is_told_with_its_parent() -> None:
    sink = OneBatch()
    reader = KvEventReader(sink)
    first, second = content(1, 2, 3, 4, 5), content(1, 2, 3, 4, 9, 9, owner=1, salt=None)
    reader.observe([PagesStored(first, 0, 2, None)])
    reader.observe([PagesStored(second, 2, 3, first)])
    names = chain([1, 2, 3, 4, 9, 9], 2)
    (stored,) = sink.batches[1].told
    assert isinstance(stored, BlocksStored)
    assert (stored.parent, list(stored.keys), sink.batches[1].seq) == (names[1], names[2:], 1)


def test_events_that_say_nothing_of_blocks_make_no_batch_and_no_number() -> None:
    sink = OneBatch()
    reader = KvEventReader(sink)
    reader.observe([])
    reader.observe([PagesStored(content(1), 0, 1, None), PagesRemoved(content(1), 0, 1)])
    assert (sink.batches, reader.num_batches, reader.num_unnamed_pages) == ([], 0, 1)


@pytest.mark.parametrize("clears", [True, False])
def test_the_last_block_that_goes_clears_everything_where_one_rank_is_all_there_is(clears: bool) -> None:
    sink = OneBatch()
    reader = KvEventReader(sink, clears=clears)
    of = content(1, 2, 3, 4)
    reader.observe([PagesStored(of, 0, 2, None), PagesStored(of, 0, 1, None, "host"), PagesRemoved(of, 0, 2)])
    reader.observe([PagesRemoved(of, 0, 1, "host")])
    names = [BlockKey(name) for name in chain([1, 2, 3, 4], 2)]
    assert sink.batches[0].told[2] == BlocksRemoved((names[1], names[0]), "GPU")
    assert sink.batches[1].told == [BlocksCleared() if clears else BlocksRemoved((names[0],), "CPU")]
    assert reader.snapshot().told == [BlocksCleared()]


def test_full_state_names_parents_first_whatever_order_they_came_in() -> None:
    """A page of host memory may follow one that only the device has, and come to host memory before it."""
    sink = OneBatch()
    reader = KvEventReader(sink)
    of = content(1, 2, 3, 4, 5, 6)
    reader.observe(
        [PagesStored(of, 0, 3, None), PagesStored(of, 1, 3, of, "host"), PagesStored(of, 0, 1, None, "host")]
    )
    reader.observe([PagesRemoved(of, 0, 3)])
    consumer = NaiveConsumer()
    consumer.apply(Wire("map").encode(reader.snapshot().told, 0.0))
    assert {medium: len(blocks) for medium, blocks in consumer.content().items()} == {"CPU": 3}


def test_any_number_of_blocks_may_wait_for_the_one_before_them() -> None:
    """Host memory receives a long sequence from its end to its start, a page at a time, once the device has lost it."""
    sink, num_pages = OneBatch(), 3000
    reader = KvEventReader(sink)
    of = content(*range(2 * num_pages))
    reader.observe([PagesStored(of, page, page + 1, of, "host") for page in reversed(range(1, num_pages))])
    assert not sink.batches
    reader.observe([PagesRemoved(of, 2000, 2001, "host")])
    reader.observe([PagesStored(of, 0, 1, None, "host")])
    (batch,) = sink.batches
    stored = [told for told in batch.told if isinstance(told, BlocksStored)]
    names = [BlockKey(name) for name in chain(list(range(2 * num_pages)), 2)]
    assert [key for told in stored for key in told.keys] == names[:2000]
    assert [told.parent for told in stored] == [None, *names[:1999]]
    reader.observe([PagesStored(of, 2000, 2001, of, "host")])
    assert [key for told in sink.batches[1].told for key in told.keys] == names[2000:]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("salt", "name", "extra_keys"),
    [
        (None, None, [None, None]),
        ("tenant-a", None, [["tenant-a"], None]),
        (salt_of_adapter(Adapter("sql", "/adapters/sql"), None), "sql", [["sql"], ["sql"]]),
        (salt_of_adapter(Adapter("sql", "/adapters/sql"), "tenant-a"), "sql", [["sql", "tenant-a"], ["sql"]]),
    ],
)
def test_events_name_adapters_and_salts_as_those_of_vllm(salt: str | None, name: str | None, extra_keys: Any) -> None:
    """The values that vLLM 0.32's `to_event_extra_keys` returns for the extra keys of its hashes."""
    of = Content.from_tokens(range(100, 108), page_size=4, owner=0, salt=salt)
    told = BlocksStored(of, 0, list(BlockKeys(of, algorithm="sha256_cbor")), None, "GPU", 0)
    groups = [EventGroup("full")]
    (event,) = msgspec.msgpack.decode(Wire("map", groups=groups).encode([told], 0.0))[1]
    assert (event["lora_name"], event["extra_keys"]) == (name, extra_keys)
    (row,) = msgspec.msgpack.decode(Wire("array", groups=groups).encode([told], 0.0))[1]
    assert (row[7], row[8]) == (name, extra_keys)
