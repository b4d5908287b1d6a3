"""KV events of an engine with KV groups: each tells of the parts in one group, in vLLM's fields for it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.events import PagesRemoved, PagesStored
from kvarts.core.kv.groups import PartGroup
from kvarts.doors.kv_events.batches import Batch, EventGroup, KvEventsConfig, Wire
from kvarts.doors.kv_events.reader import KvEventReader
from kvarts.doors.kv_events.servers import with_groups
from kvarts.sim.replaying import replay

from builders.case import Case, cases
from builders.grouped import part_groups
from builders.kv_events import GroupConsumer
from oracles.naive_kv_events import chain


@pytest.mark.laws
@given(cases(max_requests=16), part_groups(), st.sampled_from(["all", "tails"]), st.sampled_from(["map", "array"]))
def test_a_consumer_holds_in_every_group_what_the_cache_holds(
    case: Case, groups: tuple[PartGroup, ...], keeps: str, form: str
) -> None:
    case.profile = "default"
    config = case.config(kv_groups=keeps, groups=groups)
    consumers = [GroupConsumer(groups, form) for _ in range(case.replicas)]
    replay(case.trace(), config, observers_of=lambda replica: [consumers[replica]])


@pytest.mark.laws
@given(st.data(), st.sampled_from(["map", "array"]))
def test_a_consumer_holds_what_a_tier_below_holds_as_well(data: st.DataObject, form: str) -> None:
    from builders.group_tiers import grouped

    tiers = data.draw(grouped(max_requests=12))
    tiers.replayed(lambda _: [GroupConsumer(tiers.groups, form)])


def test_an_event_names_its_group_and_what_that_keeps() -> None:
    of = Content.from_tokens([1, 2, 3, 4], page_size=2, owner=0)
    names = [int.from_bytes(name[24:], "big") for name in chain([1, 2, 3, 4], 2)]
    batches: list[Batch] = []

    class Sink:
        def put(self, batch: Batch) -> None:
            batches.append(batch)

        def pace(self) -> None:
            pass

    reader = KvEventReader(Sink())
    reader.observe([PagesStored(of, 0, 2, None, group=0), PagesStored(of, 1, 2, of, group=1)])
    reader.observe([PagesRemoved(of, 1, 2, group=1, is_dropped=True)])
    wire = Wire("map", groups=[EventGroup("full"), EventGroup("window", 64)])
    stored, of_window = msgspec.msgpack.decode(wire.encode(batches[0].told, 0.0))[1]
    assert (stored["group_idx"], stored["kv_cache_spec_kind"]) == (0, "full_attention")
    assert "kv_cache_spec_sliding_window" not in stored
    assert of_window["block_hashes"] == names[1:] and of_window["parent_block_hash"] == names[0]
    kept = of_window["group_idx"], of_window["kv_cache_spec_kind"], of_window["kv_cache_spec_sliding_window"]
    assert kept == (1, "sliding_window", 64)
    (removed,) = msgspec.msgpack.decode(wire.encode(batches[1].told, 0.0))[1]
    assert removed == {"type": "BlockRemoved", "block_hashes": names[1:], "medium": "GPU", "group_idx": 1}
    array = Wire("array", groups=[EventGroup("full"), EventGroup("window", 64)])
    told = msgspec.msgpack.decode(array.encode(batches[0].told, 0.0))[1]
    assert told[1][7:] == [None, [None], 1, "sliding_window", 64]
    assert msgspec.msgpack.decode(array.encode(batches[1].told, 0.0))[1] == [["BlockRemoved", names[1:], "GPU", 1]]


def test_an_event_of_a_group_with_longer_blocks_names_each_by_its_last_page() -> None:
    """DeepSeek V4: windows of latent KV, here in blocks of two pages of two tokens."""
    of = Content.from_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9], page_size=2, owner=0)
    names = [int.from_bytes(name[24:], "big") for name in chain([1, 2, 3, 4, 5, 6, 7, 8], 2)]
    config = with_groups(
        KvEventsConfig(endpoint="tcp://127.0.0.1:0"),
        [{"kind": "latent"}, {"kind": "window", "tokens": 8, "block_pages": 2, "is_latent": True}],
    )
    batches: list[Batch] = []

    class Sink:
        def put(self, batch: Batch) -> None:
            batches.append(batch)

        def pace(self) -> None:
            pass

    reader = KvEventReader(Sink(), block_pages=[group.block_pages for group in config.groups], clears=False)
    reader.observe([PagesStored(of, 2, 4, of, group=1)])
    reader.observe([PagesRemoved(of, 2, 4, group=1, is_dropped=True)])
    wire = Wire("map", groups=config.groups)
    (stored,) = msgspec.msgpack.decode(wire.encode(batches[0].told, 0.0))[1]
    assert (stored["block_hashes"], stored["parent_block_hash"]) == ([names[3]], names[1])
    assert (stored["block_size"], stored["token_ids"]) == (4, [5, 6, 7, 8])
    assert (stored["kv_cache_spec_kind"], stored["kv_cache_spec_sliding_window"]) == ("sliding_window_mla", 8)
    (removed,) = msgspec.msgpack.decode(wire.encode(batches[1].told, 0.0))[1]
    assert removed["block_hashes"] == [names[3]]
