"""KV events in SGLang's form: names, runs and removals. Equality with SGLang's own events: the row `events` of L17."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from struct import pack
from typing import Any

import msgspec
import pytest

from equal.sglang import draw_load
from equal.sglang_ours import kvarts_steps
from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.events import CacheCleared, PagesRemoved, PagesStored
from kvarts.core.keys import Adapter, salt_of_adapter
from kvarts.doors.kv_events.batches import Batch, KvEventsConfig
from kvarts.doors.kv_events.sglang import SglangReader, SglangWire


class Consumer:
    """Holds the blocks of published batches: each by its hash, with its parent, its tokens and its salt."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], str | None]] = {}
        self.events: list[dict[str, Any]] = []
        self.wire = SglangWire()

    def put(self, batch: Batch) -> None:
        events = msgspec.msgpack.decode(self.wire.encode(batch.told, batch.time_s))[1]
        self.events += events
        self.apply(events)

    def pace(self) -> None:
        pass

    def apply(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.blocks[name]
            else:
                parent, size = event["parent_block_hash"], event["block_size"]
                assert parent is None or parent in self.blocks
                for place, name in enumerate(event["block_hashes"]):
                    assert name not in self.blocks
                    tokens = tuple(event["token_ids"][place * size : (place + 1) * size])
                    self.blocks[name] = parent, tokens, event.get("cache_salt")
                    parent = name


def naive_names(tokens: tuple[int, ...], page_size: int, salt: str | None) -> Iterator[int]:
    """Yield the names of whole pages."""
    digest = b"" if salt is None else sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest()
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        page = tokens[start : start + page_size]
        form = f"<{page_size}I" if max(page) < 1 << 32 else f"<{page_size}Q"
        digest = sha256(digest + (b"" if form[-1] == "I" else b"\xff") + pack(form, *page)).digest()
        yield int.from_bytes(digest[:8], "big", signed=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_consumer_holds_as_many_tokens_as_the_pool_lacks_or_could_evict(seed: int) -> None:
    """Blocks have the names of their tokens; what they hold is evictable once all requests have ended."""
    load = draw_load("events", 3000 + seed)
    load.asks = load.asks[:20]
    consumer, kinds = Consumer(), Counter[str]()
    known: dict[int, tuple[int, ...]] = {}
    for step in kvarts_steps(load):
        kinds.update(event["type"] for event in step.events)
        consumer.apply(step.events)
        for name, (parent, tokens, salt) in consumer.blocks.items():
            if name not in known:
                known[name] = (*(() if parent is None else known[parent]), *tokens)
                assert list(naive_names(known[name], load.page_size, salt))[-1] == name
    assert kinds["BlockStored"] and len(consumer.blocks) * load.page_size == step.evictable
    names = set(known)
    assert min(names) < 0 < max(names)


@pytest.mark.parametrize(
    ("third", "salt", "names"),
    [
        (4, None, [-3488128144981237669, 5674439469042975057]),
        (1 << 33, None, [-6724542844809093882, 3656535295924077332]),
        (4, "a", [7720172050927801512, -3736048991043000424]),
        (1 << 33, "a", [-2532816039341509095, 4216524221067465472]),
    ],
)
def test_names_are_those_that_sglang_publishes(third: int, salt: str | None, names: list[int]) -> None:
    consumer = Consumer()
    content = Content.from_tokens([1, 2, 3, third, 5, 6, 7, 8], page_size=4, owner=0, salt=salt)
    stored(SglangReader(consumer), content, 0, 2)
    assert consumer.events[-1]["block_hashes"] == names == list(naive_names((1, 2, 3, third, 5, 6, 7, 8), 4, salt))


def stored(reader: SglangReader, content: Content, start: int, end: int) -> None:
    reader.observe([PagesStored(content, start, end, content if start else None)])


def test_runs_that_follow_each_other_in_a_step_are_one_event() -> None:
    consumer = Consumer()
    reader = SglangReader(consumer)
    one = Content.from_tokens([1, 2, 3, 4, 5, 6], page_size=2, owner=0)
    other = Content.from_tokens([1, 2, 3, 4, 7, 8], page_size=2, owner=1)
    reader.observe([PagesStored(one, 0, 1, None), PagesStored(one, 1, 3, one), PagesStored(other, 2, 3, one)])
    assert [event.get("token_ids") for event in consumer.events] == [None, [1, 2, 3, 4, 5, 6], [7, 8]]
    assert consumer.events[0] == {"type": "AllBlocksCleared"}
    reader.observe([PagesRemoved(one, 2, 3, "device"), PagesRemoved(one, 0, 2, "device")])
    names = list(naive_names((1, 2, 3, 4, 5, 6), 2, None))
    assert consumer.events[-1] == {
        "type": "BlockRemoved",
        "block_hashes": [names[2], names[0], names[1]],
        "medium": "GPU",
    }
    assert reader.num_batches == 3


def test_evictions_remove_the_last_blocks_and_a_flush_clears_all() -> None:
    consumer = Consumer()
    reader = SglangReader(consumer)
    content = Content.from_tokens([1, 2], page_size=1, owner=0)
    for flushed in ([], [CacheCleared()]):
        stored(reader, content, 0, 2)
        reader.observe([*flushed, PagesRemoved(content, 0, 2, "device")])
    kinds = [event["type"] for event in consumer.events]
    assert kinds == ["AllBlocksCleared", "BlockStored", "BlockRemoved", "BlockStored", "AllBlocksCleared"]
    reader.observe([CacheCleared()])
    assert consumer.events[5:] == [{"type": "AllBlocksCleared"}]


def test_names_under_adapters_differ_and_wide_tokens_have_names() -> None:
    found = []
    for salt in (
        None,
        "a",
        salt_of_adapter(Adapter("sql", "/one"), None),
        salt_of_adapter(Adapter("sql", "/two"), "a"),
    ):
        consumer = Consumer()
        stored(SglangReader(consumer), Content.from_tokens([1, 1 << 33, 3], page_size=1, owner=0, salt=salt), 0, 3)
        found.append(consumer.events[-1])
    assert len({tuple(event["block_hashes"]) for event in found}) == 4
    assert [event.get("lora_name") for event in found] == [None, None, "sql", "sql"]
    assert [event.get("cache_salt") for event in found] == [None, "a", None, "a"]
    assert found[1]["block_hashes"] == list(naive_names((1, 1 << 33, 3), 1, "a"))


def test_what_the_form_does_not_have_is_refused() -> None:
    for more in ({"extent": "copies"}, {"hash_bytes": True}):
        with pytest.raises(ConfigError, match="in SGLang's form"):
            KvEventsConfig(endpoint="tcp://127.0.0.1:0", form="sglang", **more)
    config = KvEventsConfig(endpoint="tcp://127.0.0.1:0")
    assert config.for_form("sglang").form == "sglang"
    for given in ({"form": "map"}, {"extent": "copies"}):
        config = KvEventsConfig(endpoint="tcp://127.0.0.1:0", **given)  # type: ignore[arg-type]
        assert config.for_form("sglang") == config


def test_runs_that_follow_each_other_in_two_media_are_two_events() -> None:
    """A copy to host memory ends in the step that makes the next pages findable on the device."""
    consumer, content = Consumer(), Content.from_tokens(list(range(12)), page_size=2, owner=0, salt=None)
    reader = SglangReader(consumer)
    reader.observe([PagesStored(content, 0, 2, None)])
    consumer.blocks.clear()  # the consumer keeps one medium
    stored = [PagesStored(content, 0, 2, None, "host"), PagesStored(content, 2, 4, content)]
    reader.observe([*stored, PagesStored(content, 4, 6, content), PagesRemoved(content, 0, 2, "host")])
    told = [(event["type"], event.get("medium"), len(event.get("block_hashes", ()))) for event in consumer.events[2:]]
    assert told[:2] == [("BlockStored", "CPU_PINNED", 2), ("BlockStored", "GPU", 4)]
    assert {each[:2] for each in told[2:]} == {("BlockRemoved", "CPU_PINNED")}
