"""Engines with a consumer of their KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvarts.core.content import Content
from kvarts.core.event_log import EventReader
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.core.kv.groups import PartGroup
from kvarts.cost.simulated import SimExecutor
from kvarts.doors.kv_events.batches import Batch, EventGroup, Form, Wire
from kvarts.doors.kv_events.reader import KvEventReader
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.router import RoundRobin
from kvarts.sim.traffic.source import OpenLoop

from builders.case import Case
from builders.engines import make_replica
from oracles.naive_kv_events import NaiveConsumer, chain

__all__ = ["MEDIA", "Consumed", "GroupConsumer", "Names", "cached_blocks", "named", "run_consumed"]

MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
Blocks = dict[str, dict[Any, tuple[Any, tuple[int, ...]]]]


class Names:
    """The names of the pages of contents, worked out once for each."""

    def __init__(self, *, hash_bytes: bool = False) -> None:
        self._known: dict[tuple[int, int], list[bytes]] = {}
        self._contents: list[Content] = []
        self._hash_bytes = hash_bytes

    def of(self, content: Content) -> list[Any]:
        known = self._known.get((id(content), content.num_known_pages))
        if known is None:
            self._contents.append(content)  # so that no other gets its id
            tokens = content.tokens(0, content.num_known_pages * content.page_size).tolist()
            known = self._known[id(content), content.num_known_pages] = chain(tokens, content.page_size, content.salt)
        return known if self._hash_bytes else [int.from_bytes(name[24:], "big") for name in known]


def cached_blocks(engine: Any, names: Names) -> Blocks:
    """What the caches of an engine hold, asked of the caches: pages with known tokens, by tier."""
    found: Blocks = {}
    for medium, content, start, end in _runs(engine):
        known = names.of(content)
        size = content.page_size
        for page in range(start, min(end, len(known))):
            tokens = tuple(content.tokens(page * size, (page + 1) * size))
            found.setdefault(medium, {})[known[page]] = known[page - 1] if page else None, tokens
    return found


def findable(blocks: Blocks) -> Blocks:
    """The blocks that a request could find: all before them are there, in any tier."""
    parents = {name: parent for there in blocks.values() for name, (parent, _) in there.items()}

    def is_whole(name: Any) -> bool:
        while name is not None and name in parents:
            name = parents[name]
        return name is None

    found = {medium: {name: of for name, of in there.items() if is_whole(name)} for medium, there in blocks.items()}
    return {medium: there for medium, there in found.items() if there}


def _runs(engine: Any) -> Iterator[tuple[str, Content, int, int]]:
    for _, content, start, end, _ in engine.scheduler.cache.runs():
        yield "GPU", content, start, end
    for tier in () if engine.tiers is None else engine.tiers.tiers:
        for run in tier.index.runs():
            if run.state.name == "STORED":
                yield MEDIA.get(tier.name) or tier.name.upper(), run.content, run.start, run.end


class Consumed:
    """A reader of events: what its consumer holds equals what the caches hold, whenever events are handed out."""

    def __init__(self, form: Form = "map", *, hash_bytes: bool = False, clears: bool = True) -> None:
        self.consumer = NaiveConsumer()
        self.names = Names(hash_bytes=hash_bytes)
        self.wire = Wire(form, hash_bytes=hash_bytes)
        self.reader = KvEventReader(self, clears=clears)
        self.engine: Any = None
        self.num_compared = 0

    def put(self, batch: Batch) -> None:
        self.consumer.take(batch.seq, self.wire.encode(batch.told, batch.time_s))

    def pace(self) -> None:
        pass

    def observe(self, events: Sequence[Event]) -> None:
        self.reader.observe(events)
        self.compare()

    def compare(self) -> None:
        there = findable(cached_blocks(self.engine, self.names))
        assert findable(self.consumer.content()) == there
        late = NaiveConsumer()
        state = self.reader.snapshot()
        late.apply(self.wire.encode(state.told, state.time_s))
        assert findable(late.content()) == there
        self.num_compared += bool(there)


def run_consumed(
    case: Case,
    *,
    form: Form = "map",
    hash_bytes: bool = False,
    clears: bool = True,
    step_by_step: bool = False,
    more: Callable[[int], Sequence[EventReader]] = lambda _: (),
    **settings: Any,
) -> list[Consumed]:
    """Replay `case` with a consumer on each engine, compared whenever events are handed out, and `more` readers."""
    consumed = [Consumed(form, hash_bytes=hash_bytes, clears=clears) for _ in range(case.replicas)]
    config = case.config()
    replicas = [
        make_replica(
            config,
            SimExecutor(config.cost_model),
            readers=[each, *more(index)],
            step_by_step=step_by_step,
            **settings,
        )
        for index, each in enumerate(consumed)
    ]
    for each, replica in zip(consumed, replicas, strict=True):
        each.engine = replica.engine
    trace = case.trace()
    log = RequestLog(largest_hit_counts=config.profile == "mocker")
    Driver([Arrivals(trace, OpenLoop(trace), RoundRobin(len(replicas)), replicas, log)], replicas).run()
    return consumed


FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}  # fmt: skip


def named(event: Any) -> dict[str, Any]:
    """An event by the names of its fields, in whichever form it came."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(FIELDS.get(kind, ()), values, strict=False))}


class GroupConsumer:
    """Reads the same events twice: as they are, and as bytes. Arrays name no group where there are no groups."""

    wants_details = True

    def __init__(self, groups: Sequence[PartGroup], form: Any) -> None:
        told = [EventGroup(group.layer.kind, group.layer.span) for group in groups]  # type: ignore[arg-type]
        self.wire = Wire(form, groups=told)
        self.reader = KvEventReader(self)
        self.names = Names()
        self.here: set[tuple[str, int, Any]] = set()
        """What events of the engine say: media, groups, and names of blocks."""
        self.decoded: set[tuple[str, int, Any]] = set()

    def put(self, batch: Batch) -> None:
        self.apply(self.decoded, self.wire.encode(batch.told, batch.time_s))

    def pace(self) -> None:
        pass

    def apply(self, there: set[tuple[str, int, Any]], payload: bytes) -> None:
        for event in map(named, msgspec.msgpack.decode(payload)[1]):
            if event["type"] == "AllBlocksCleared":
                there.clear()
                continue
            blocks = {(event["medium"], event.get("group_idx", 0), name) for name in event["block_hashes"]}
            if event["type"] == "BlockStored":
                assert not there & blocks, "stored twice"
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                there |= blocks
            else:
                assert there >= blocks, "removed, and was not there"
                there -= blocks

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, PagesStored | PagesRemoved):
                assert event.group is not None
                known = self.names.of(event.content)[event.start_page : event.end_page]
                blocks = {(MEDIA[event.medium], event.group, name) for name in known}
                self.here = self.here | blocks if isinstance(event, PagesStored) else self.here - blocks
        self.reader.observe(events)
        assert self.decoded == self.here
        late: set[tuple[str, int, Any]] = set()
        state = self.reader.snapshot()
        self.apply(late, self.wire.encode(state.told, state.time_s))
        assert late == self.here
