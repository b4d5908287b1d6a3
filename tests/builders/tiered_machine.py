"""A device with KV groups, and tiers below it, against a model that looks at every token and part of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.core.content import Content
from kvarts.core.kv.group_pages import GroupPages, GroupsBelow, GroupTable, IncomingParts, PinnedParts
from kvarts.core.kv.groups import GroupMemory, PartGroup, Retention
from kvarts.core.kv.layers import KvKind
from kvarts.core.kv.pool import CountPool, IdPool
from kvarts.core.kv.runs import EvictionSlot, LruEntry, PartRun, RunTable
from kvarts.core.kv.transfer import Direction, TransferReport
from kvarts.core.tiers.channel import Channel
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.layout import ConnectedTier
from kvarts.core.tiers.offloader import Offloader
from kvarts.core.tiers.part_files import PartFiles
from kvarts.core.tiers.part_layout import PartLayout
from kvarts.core.tiers.part_policy import EagerParts
from kvarts.core.tiers.part_tier import PartTier

from builders.grouped import layers
from builders.parts import listed_pages
from oracles.naive_group_tier import NaiveBelow, NaiveTier, NaiveTieredGroups
from oracles.naive_grouped import NaivePart, NaiveSequence

__all__ = ["TieredMachine", "part_groups", "prompts"]

NS_A_BLOCK = 5_000_000
"""So that two are carried in the time in which what nothing uses is held for."""


@st.composite
def part_groups(draw: st.DrawFn, kinds: tuple[KvKind, ...]) -> PartGroup:
    layer = draw(layers(draw(st.sampled_from(kinds)), st.integers(1, 9), [0, 0, 1, 3], by_page=True))
    return PartGroup(layer, part_bytes=draw(st.sampled_from([1, 1, 2, 4])))


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prefixes of a few sequences, and what few of them go on with."""
    base = draw(st.sampled_from([[0] * 14, [1, 0] * 7, [0] * 5 + [1] * 9]))
    return [*base[: draw(st.integers(1, 14))], *draw(st.lists(st.integers(0, 1), max_size=2))]


@dataclass
class Holder:
    content: Content
    table: RunTable
    sequence: NaiveSequence
    num_known: int | None = None
    """How many of its tokens others may have, once it decodes."""


@dataclass
class Load:
    transfer: int
    request: int
    content: Content
    table: GroupTable
    sequence: NaiveSequence
    parts: list[list[NaiveBelow]]
    by_tier: tuple[int, ...]
    front: NaiveSequence | None = None
    """What computes the pages before those that are loaded, up to `front_end`."""
    front_end: int = 0
    num_known: int | None = None
    num_good: int = -1
    """How many of `parts` arrived; -1 before the transfer has ended."""

    @property
    def num_parts(self) -> int:
        return sum(map(len, self.parts))

    def has_front(self, page_size: int) -> bool:
        return self.front is not None and self.front.num_tokens < self.front_end * page_size


class TieredMachine(RuleBasedStateMachine):
    @initialize(
        first=part_groups(("full", "full", "window", "latent", "chunk")),
        others=st.lists(part_groups(("full", "window", "window", "chunk", "state", "state")), max_size=2),
        page_size=st.integers(1, 3),
        num_blocks=st.sampled_from([8, 12, 20, 40]),
        host_blocks=st.sampled_from([3, 10, 40, 100]),
        file_blocks=st.sampled_from([None, None, 3, 10, 40, 100]),
        between_blocks=st.sampled_from([None, None, 3, 10, 40]),
        limit=st.sampled_from([1, 4, 100]),
        keeps=st.sampled_from(["all", "tails"]),
        has_ids=st.booleans(),
        is_files=st.booleans(),
        aligns=st.booleans(),
    )
    def build(
        self,
        first: PartGroup,
        others: list[PartGroup],
        page_size: int,
        num_blocks: int,
        host_blocks: int,
        file_blocks: int | None,
        between_blocks: int | None,
        limit: int,
        keeps: Retention,
        has_ids: bool,
        is_files: bool,
        aligns: bool,
    ) -> None:
        memory = GroupMemory((first, *others), keeps, aligns=aligns)
        self.num_owners = 0
        self.tokens_of: dict[int, list[int]] = {}
        """The tokens of decodes, by owner."""
        self.served: list[list[int]] = []
        sizes = [host_blocks, *(each for each in (between_blocks, file_blocks) if each is not None)]
        self.open_engine(memory, page_size, num_blocks, sizes, limit, has_ids=has_ids, is_files=is_files)

    def open_engine(
        self,
        memory: GroupMemory,
        page_size: int,
        num_blocks: int,
        sizes: list[int],
        limit: int,
        *,
        has_ids: bool = False,
        is_files: bool = False,
        more: tuple[PartTier, NaiveTier] | None = None,
    ) -> None:
        """`more`: a tier below those of `sizes`."""
        self.has_ids = has_ids
        self.block_bytes = memory.block_bytes
        self.cache = GroupPages(
            memory,
            IdPool(num_blocks) if has_ids else CountPool(num_blocks),
            page_size=page_size,
            most_new_tokens=8,
            below=GroupsBelow(len(sizes)),
        )
        self.parts = self.cache.parts
        self.incoming = cast(IncomingParts, self.cache.incoming)
        self.join_device()
        self.tiers = [
            PartTier(name, num_blocks, memory, self.parts.tree, place=place, with_slots=has_ids)
            for place, (name, num_blocks) in enumerate(zip(("host", "disk", "last"), sizes, strict=False))
        ]
        self.files: set[bytes] = set()
        if has_ids and is_files and len(sizes) > 1:
            self.tiers[-1] = PartFiles(self.tiers[-1].name, sizes[-1], memory, self.parts.tree, place=len(sizes) - 1)
        below = [
            NaiveTier(num_blocks * memory.block_bytes, [group.part_bytes for group in memory.groups])
            for num_blocks in sizes
        ]
        if more is not None:
            self.tiers.append(more[0])
            below.append(more[1])
        rate = memory.block_bytes * 10**9 // NS_A_BLOCK
        layout = PartLayout(
            self.cache,
            [
                ConnectedTier(
                    tier,
                    Channel(f"to {tier.name}", latency_us=0.0, bytes_per_s=rate),
                    Channel(f"from {tier.name}", latency_us=0.0, bytes_per_s=rate),
                )
                for tier in self.tiers
            ],
            EagerParts(self.parts),
            store_within_ns=limit * NS_A_BLOCK,
            swaps=bool(sizes),
            with_page_ids=has_ids,
        )
        self.offloader = Offloader(self.cache, layout, OffloadConfig(), with_page_ids=has_ids)
        self.limit = limit
        self.model = self.open_model(
            [(group.layer, group.part_bytes) for group in memory.groups],
            page_size,
            num_blocks * memory.block_bytes,
            keeps_all=memory.keeps == "all",
            below=below,
            swaps_states=not has_ids,
            blocks=(memory.block_bytes, num_blocks // 16, 2),  # two are carried in 10 ms
            swaps=bool(sizes),
            aligns=memory.aligns,
        )
        self.holders: list[Holder] = []
        self.stores: dict[int, list[tuple[NaivePart, NaiveBelow]]] = {}
        self.spills: dict[int, list[tuple[NaiveBelow, NaiveBelow]]] = {}
        self.places: dict[int, int] = {}
        """The tier from which each of these copies."""
        self.loads: list[Load] = []
        self.used: list[Load] = []
        """Loads under way that a step uses."""
        self.preempted: list[Holder] = []
        self.now_ns = 0

    def join_device(self) -> None:
        """Let the cache take its memory from a device that other models share: none does."""

    def open_model(self, *of_groups: Any, **options: Any) -> NaiveTieredGroups:
        """Return the naive model of an engine."""
        return NaiveTieredGroups(*of_groups, **options)

    def content_of(self, tokens: list[int], tenant: str | None) -> Content:
        self.num_owners += 1
        return Content.from_tokens(tokens, page_size=self.cache.page_size, owner=self.num_owners, salt=tenant)

    @rule(
        tokens=prompts(),
        tenant=st.sampled_from([None, None, None, "a"]),
        num_new=st.integers(1, 14),
        is_end=st.sampled_from([True, True, False]),
    )
    def open(self, tokens: list[int], tenant: str | None, num_new: int, is_end: bool) -> None:
        content = self.content_of(tokens, tenant)
        limit = (len(tokens) - 1) // self.cache.page_size
        match = self.parts.match(content, limit)
        length = self.model.hit(tokens, tenant, limit)
        assert match.num_pages == length
        num_new = min(num_new, len(tokens) - length * self.cache.page_size)
        sequence = self.model.open(tokens, tenant, length, num_new, is_end=is_end)
        if sequence is None:
            return
        table = self.parts.begin(content, match)
        self.grow(table, sequence.num_tokens, is_end)
        self.model.note(sequence, is_end=is_end, is_prompt=is_end)
        self.holders.append(Holder(content, table, sequence))

    def grow(self, table: RunTable, num_tokens: int, is_end: bool) -> None:
        """Snapshots are made where the tokens end, and not on the way."""
        self.parts._grow(table, num_tokens, is_end)
        self.cache.count()

    def computing(self) -> list[Holder]:
        return [holder for holder in self.holders if not holder.table.is_decoding]

    def decoding(self) -> list[Holder]:
        decoding = [holder for holder in self.holders if holder.table.is_decoding]
        return sorted(decoding, key=lambda holder: holder.table.admission)

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), num_new=st.integers(1, 6), is_end=st.booleans())
    def advance(self, data: st.DataObject, num_new: int, is_end: bool) -> None:
        holder = data.draw(st.sampled_from(self.computing()))
        tokens = holder.sequence.tokens
        num_new = self.within_page(holder.sequence, num_new)
        while len(tokens) < holder.sequence.num_tokens + num_new:
            token = data.draw(st.integers(0, 1))
            tokens.append(token)
            holder.content.append(token.to_bytes(8, "little"))
        self.parts.free_skipped(holder.table, holder.sequence.num_tokens)
        if self.model.advance(holder.sequence, num_new, is_end=is_end):
            self.grow(holder.table, holder.sequence.num_tokens, is_end)
            self.model.note(holder.sequence, is_end=is_end, is_prompt=is_end)
        self.cache.count()

    def within_page(self, sequence: NaiveSequence, num_new: int) -> int:
        """Where only the last page of a chunk has a state, a chunk that begins inside a page stays there."""
        num_left = -sequence.num_tokens % self.cache.page_size
        return min(num_new, num_left) if num_left and self.cache.memory.aligns else num_new

    def computed(self) -> list[Holder]:
        """Those that have a state where layers keep one: it comes with the first token that is computed."""
        states = {index for index, group in enumerate(self.cache.memory.groups) if group.is_state}
        return [holder for holder in self.computing() if states <= holder.sequence.states.keys()]

    @precondition(lambda self: not self.has_ids and self.computed())
    @rule(data=st.data())
    def start_decoding(self, data: st.DataObject) -> None:
        self.begin_decoding(data.draw(st.sampled_from(self.computed())))

    def begin_decoding(self, holder: Holder) -> None:
        holder.num_known = len(holder.sequence.tokens)
        self.tokens_of[holder.content.owner] = holder.sequence.tokens
        self.model.settle(holder.sequence)
        self.parts.free_skipped(holder.table, holder.sequence.num_tokens)
        self.num_owners += 1
        self.parts.decodes.start(holder.table, self.num_owners)
        self.cache.count()

    @precondition(lambda self: self.decoding())
    @rule(most_steps=st.integers(1, 8))
    def decode(self, most_steps: int) -> None:
        """As many steps at once as that one by one; what is filled of known tokens ends them."""
        self.decode_steps(most_steps)

    def decode_steps(self, most_steps: int) -> None:
        decoding = self.decoding()
        due = sum(self.model.missing(holder.sequence, 1) for holder in decoding)
        if due > self.model.free_bytes():
            return
        done = self.parts.decodes.leap(most_steps, 0)
        for step in range(len(done.taken)):
            has_new = False
            for holder in decoding:
                if len(holder.sequence.tokens) == holder.sequence.num_tokens:
                    self.num_owners += 1
                    holder.sequence.tokens.append(self.model.first_private + self.num_owners)  # nobody else has it
                self.model.grow(holder.sequence, 1, False)
                num_wanted = len(self.model.wanted)
                self.model.note(holder.sequence, is_end=False, num_known=holder.num_known)
                has_new = has_new or len(self.model.wanted) > num_wanted
            assert not has_new or step + 1 == len(done.taken), "it is to be stored in the next step"
            for holder in decoding:
                self.model.settle(holder.sequence)
        self.parts.decodes.end_step()
        self.cache.count()

    @precondition(lambda self: self.decoding())
    @rule(data=st.data(), stores=st.booleans(), is_cleared=st.booleans())
    def preempt(self, data: st.DataObject, stores: bool, is_cleared: bool) -> None:
        """A decode loses its parts, and may look for them again."""
        self.preempt_one(data.draw(st.sampled_from(self.decoding())), stores=stores, is_cleared=is_cleared)

    @precondition(lambda self: not self.has_ids)
    @rule(
        tokens=prompts(),
        num_steps=st.integers(1, 8),
        stores=st.sampled_from([True, True, False]),
        is_cleared=st.booleans(),
        comes_back=st.booleans(),
    )
    def serve_and_preempt(
        self, tokens: list[int], num_steps: int, stores: bool, is_cleared: bool, comes_back: bool
    ) -> None:
        """A whole prompt that decodes, loses its parts, and may look for them again."""
        num_holders = len(self.holders)
        self.open(tokens, None, len(tokens), is_end=True)
        if len(self.holders) > num_holders:
            holder = self.holders[-1]
            self.begin_decoding(holder)
            self.decode_steps(num_steps)
            self.preempt_one(holder, stores=stores, is_cleared=is_cleared)
            if comes_back:
                self.bring_back(holder)

    def preempt_one(self, holder: Holder, *, stores: bool, is_cleared: bool) -> None:
        self.holders.remove(holder)
        assert holder.num_known is not None
        page_size = self.cache.page_size
        self.offloader.begin_step(self.now_ns)  # what was complete before is stored first
        self.offloader.keep_state(holder.content, holder.sequence.num_tokens, GroupTable(holder.table))
        self.close_parts(holder.table, holder.sequence.num_tokens)
        self.offloader.preempted(holder.content, holder.sequence.num_tokens // page_size, GroupTable(holder.table))
        self.model.preempt(holder.sequence, holder.num_known)
        self.preempted.append(holder)
        if stores:
            self.store_now()
        if is_cleared:
            self.forget_device()

    @precondition(lambda self: self.preempted)
    @rule(data=st.data(), is_good=st.sampled_from([True, True, False]))
    def come_back(self, data: st.DataObject, is_good: bool) -> None:
        """Go on with what is left of a preempted request: load all that is below, and end it."""
        holder = data.draw(st.sampled_from(self.preempted))
        self.bring_back(holder, None if is_good else data)

    def bring_back(self, holder: Holder, data: st.DataObject | None = None) -> None:
        """With `data`, not all of a load arrives."""
        self.preempted.remove(holder)
        tokens, tenant, content = holder.sequence.tokens, holder.sequence.salt, holder.content
        limit = holder.sequence.num_tokens // self.cache.page_size  # it knows one more token than it had computed
        on_device = self.model.hit(tokens, tenant, limit)
        self.num_owners += 1
        offer = self.offloader.lookup(self.num_owners, content, on_device, limit)
        depth = len(self.tiers)
        length = self.model.hit_below(tokens, tenant, limit, depth)
        assert (0 if offer is None else offer.num_pages) == length - on_device
        if offer is not None:
            parts = self.model.offer(tokens, tenant, length, depth)
            sequence = self.model.begin_load(tokens, tenant, length)
            if sequence is None:
                self.offloader.forget(self.num_owners)
                self.model.unpin(parts)
            else:
                number = self.offloader.num_transfers
                table = self.incoming.open_offered(content, self.offloader.layout.offered(self.num_owners), 0)
                self.offloader.start_load(self.num_owners, content, on_device, offer.num_pages, table)
                load = Load(number, self.num_owners, content, table, sequence, parts, offer.by_tier)
                load.num_known = holder.num_known
                num_parts = load.num_parts
                self.end_load_as(load, num_parts if data is None else data.draw(st.integers(0, num_parts - 1)))
                self.resume(holder)
                if data is None:
                    self.end(self.holders.pop())
        elif on_device:
            self.go_on(holder, on_device)
        self.offloader.ended(content)
        self.model.end_private(tokens, tenant)

    def go_on(self, holder: Holder, on_device: int) -> None:
        """Compute one token after the pages that the device has."""
        tokens, tenant, content = holder.sequence.tokens, holder.sequence.salt, holder.content
        match = self.parts.match(content, on_device)
        assert match.num_pages == on_device
        if len(tokens) == on_device * self.cache.page_size:
            tokens.append(self.model.first_private + self.num_owners)
        sequence = self.model.open(tokens, tenant, on_device, 1)
        if sequence is not None:
            table = self.parts.begin(content, match)
            self.grow(table, sequence.num_tokens, is_end=False)
            self.model.note(sequence, is_end=False, num_known=holder.num_known)
            self.resume(holder)
            self.offloader.begin_step(self.now_ns)
            self.end(Holder(content, table, sequence, holder.num_known))

    def resume(self, holder: Holder) -> None:
        """A preempted request has begun again: what was kept of its state is dropped."""
        if holder.content.swapped_tokens:
            self.offloader.resumed(holder.content)
            self.model.resume(holder.sequence)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.end(holder)

    def end(self, holder: Holder) -> None:
        self.close_parts(holder.table, holder.sequence.num_tokens)
        self.model.keep_tails(holder.sequence)
        self.model.note(holder.sequence, is_end=True, num_known=holder.num_known)
        self.model.close(holder.sequence)

    def close_parts(self, table: RunTable, num_tokens: int) -> None:
        page_size = self.cache.page_size
        self.parts.close(table, num_tokens // page_size, -(-num_tokens // page_size))
        self.cache.count()

    @rule(tokens=prompts())
    def serve(self, tokens: list[int]) -> None:
        """A whole prompt that ends at once, and is stored."""
        self.served.append(tokens)
        num_holders = len(self.holders)
        self.open(tokens, None, len(tokens), is_end=True)
        if len(self.holders) > num_holders:
            self.store_now()
            self.end(self.holders.pop())
            self.store_now()
            self.store_now()  # what has arrived is spilled

    def store_now(self) -> None:
        self.store()
        for number in sorted(self.stores):
            self.end_store_as(number, is_stored=True)
        for number in sorted(self.spills):
            self.end_spill_as(number, is_stored=True)

    @rule()
    def forget_device(self) -> None:
        """The device evicts all that it can: what comes back comes from below."""
        self.parts.evict(self.parts.free_bytes)
        self.cache.count()
        for part in [part for part in self.model.released if not part.stores]:
            self.model.released.remove(part)
            self.model.lose(part)
            assert part.name is not None
            self.model.evicted.append((part.group, part.name))
            self.model.empty_bytes += self.model.bytes_of(part)

    def has_host(self) -> bool:
        """Whether there is something between the device and the last tier."""
        return len(self.tiers) > 1

    @precondition(lambda self: self.has_host())
    @rule(share=st.sampled_from([1, 2]))
    def forget_host(self, share: int) -> None:
        """Host memory evicts all that it can, or half of it: what comes back comes from files."""
        tier, naive = self.tiers[0], self.model.below[0]
        lost = naive.idle()
        lost = lost[: -(-len(lost) // share)]
        tier.evict(tier.empty_bytes + sum(map(naive.size, lost)))
        for part in lost:
            naive.recent.remove(part)
            del naive.here[part.key]
            naive.num_lost += 1

    @rule()
    def store(self) -> None:
        self.now_ns += 10**9  # the lane is idle
        number = self.offloader.num_transfers
        self.offloader.begin_step(self.now_ns)
        self.offloader.plan_stores(self.now_ns)
        for place in range(len(self.tiers) - 1):
            spilled = self.model.plan_spill(place, self.limit * self.block_bytes)
            if spilled:
                self.spills[number] = spilled
                self.places[number] = place
                number += 1
        chosen = self.model.plan_store(self.limit * self.block_bytes)
        if chosen:
            self.stores[number] = chosen
            number += 1
        assert self.offloader.num_transfers == number
        self.carry_out()

    def carry_out(self) -> None:
        """Delete and write files as an executor does."""
        for transfer in self.offloader.take_planned():
            self.files -= set(transfer.dropped_keys)
            if transfer.direction is Direction.SPILL:
                targets = [key for move in transfer.moves for key in move.target_ids]
                self.files.update(key for key in targets if isinstance(key, bytes))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), is_stored=st.sampled_from([True, True, True, False]))
    def end_store(self, data: st.DataObject, is_stored: bool) -> None:
        self.end_store_as(data.draw(st.sampled_from(sorted(self.stores))), is_stored=is_stored)

    def end_store_as(self, number: int, *, is_stored: bool) -> None:
        self.end_transfer(number, None if is_stored else 0)
        self.model.end_store(self.stores.pop(number), is_stored=is_stored)

    @precondition(lambda self: self.spills)
    @rule(data=st.data(), is_stored=st.sampled_from([True, True, True, False]))
    def end_spill(self, data: st.DataObject, is_stored: bool) -> None:
        self.end_spill_as(data.draw(st.sampled_from(sorted(self.spills))), is_stored=is_stored)

    def end_spill_as(self, number: int, *, is_stored: bool) -> None:
        self.end_transfer(number, None if is_stored else 0)
        self.model.end_spill(self.places[number], self.spills.pop(number), is_stored=is_stored)

    def end_transfer(self, number: int, num_good: int | None) -> None:
        if self.has_ids:
            self.offloader.report([TransferReport(number, num_good_pages=num_good)], self.now_ns)
            return
        under_way = self.offloader._under_way.pop(number)
        if num_good is not None:
            under_way.num_good_pages = num_good
        self.offloader._end(number, under_way)

    @rule(
        data=st.data(),
        tokens=prompts(),
        tenant=st.sampled_from([None, None, None, "a"]),
        is_forgotten=st.sampled_from([False, False, False, True]),
        is_cleared=st.booleans(),
        ends=st.booleans(),
        depths=st.sampled_from([(), (), (1,), (1, 2)]),
        has_front=st.booleans(),
    )
    def load(
        self,
        data: st.DataObject,
        tokens: list[int],
        tenant: str | None,
        is_forgotten: bool,
        is_cleared: bool,
        ends: bool,
        depths: tuple[int, ...],
        has_front: bool,
    ) -> None:
        if self.served and data.draw(st.sampled_from([True, True, False])):
            tokens, tenant = [*data.draw(st.sampled_from(self.served)), 1], None
        if is_cleared:
            self.forget_device()
            if self.has_host() and data.draw(st.booleans()):
                self.forget_host(data.draw(st.sampled_from([1, 2])))
        content = self.content_of(tokens, tenant)
        limit = (len(tokens) - 1) // self.cache.page_size
        on_device = self.model.hit(tokens, tenant, limit)
        offer = self.offloader.lookup(self.num_owners, content, on_device, limit)
        lengths = [
            self.model.hit_below(tokens, tenant, limit, depth) - on_device for depth in range(1, len(self.tiers) + 1)
        ]
        assert (0 if offer is None else offer.num_pages) == lengths[-1]
        if offer is None:
            return
        assert [sum(offer.by_tier[:depth]) for depth in range(1, len(self.tiers) + 1)] == lengths
        depth = len(self.tiers)
        for depth in [depth for depth in depths if depth <= len(self.tiers) and lengths[depth - 1]]:
            self.offloader.layout.offer_up_to(self.num_owners, depth)
        length = on_device + lengths[depth - 1]
        parts = self.model.offer(tokens, tenant, length, depth)
        num_bytes = [0] * len(self.tiers)
        for place, start, end, size in offer.runs[depth - 1]:
            num_bytes[place] += (end - start) * size
        assert num_bytes[:depth] == [
            sum(map(tier.size, of_tier)) for tier, of_tier in zip(self.model.below, parts, strict=False)
        ]
        assert not any(num_bytes[depth:])
        most_front = self.most_front(tokens, tenant, on_device, length, parts)
        assert offer.most_front[depth - 1] == most_front
        if has_front and not is_forgotten and not self.cache.memory.has_states and most_front:
            num_front = data.draw(st.integers(1, most_front))
            by_tier = self.after(num_front, lengths[:depth])
            if self.load_with_front(num_front, content, tokens, tenant, on_device, parts, by_tier):
                return
        sequence = None if is_forgotten else self.model.begin_load(tokens, tenant, length)
        if sequence is None:
            self.offloader.forget(self.num_owners)
            self.model.unpin(parts)
            return
        number = self.offloader.num_transfers
        table = self.incoming.open_offered(content, self.offloader.layout.offered(self.num_owners), 0)
        self.offloader.start_load(self.num_owners, content, on_device, length - on_device, table)
        by_tier = self.after(0, lengths[:depth])
        self.loads.append(Load(number, self.num_owners, content, table, sequence, parts, by_tier))
        if ends:
            self.end_load_as(load := self.loads.pop(), load.num_parts)

    def after(self, num_front: int, lengths: list[int]) -> tuple[int, ...]:
        """The pages that each tier adds to those of faster ones and of a front, if it leads to so many."""
        ends = [max(num_front, length) for length in lengths + lengths[-1:] * (len(self.tiers) - len(lengths))]
        return tuple(end - before for before, end in pairwise([num_front, *ends]))

    def most_front(
        self, tokens: list[int], tenant: str | None, on_device: int, length: int, parts: list[list[NaiveBelow]]
    ) -> int:
        """The pages that the device lacks before the first that it has of a load, and before the last that moves."""
        keys = [key for key in self.model.needs(tokens, tenant, length) if key in self.model.copies]
        pages = [page for page in map(self.model.page_of, keys) if page >= on_device]
        moved = [self.model.page_of(part.key) for of_tier in parts for part in of_tier]
        return min([*pages, max(moved)]) - on_device

    def load_with_front(
        self,
        num_front: int,
        content: Content,
        tokens: list[int],
        tenant: str | None,
        on_device: int,
        parts: list[list[NaiveBelow]],
        by_tier: tuple[int, ...],
    ) -> bool:
        page_size, request = self.cache.page_size, self.num_owners
        found = self.offloader.layout.offered(request)
        length = found.num_pages
        front_end = on_device + num_front
        begun = self.model.begin_front(tokens, tenant, length, parts, on_device, front_end)
        if begun is None:
            return False
        number = self.offloader.num_transfers
        match = self.cache.match(content, (len(tokens) - 1) // page_size)
        assert match.num_pages == on_device
        table = self.incoming.open_with_front(match, found, front_end, 0)
        self.offloader.start_load(request, content, front_end, length - front_end, table, num_front)
        self.loads.append(Load(number, request, content, table, begun[1], parts, by_tier, begun[0], front_end))
        return True

    @precondition(lambda self: any(load.has_front(self.cache.page_size) for load in self.loads))
    @rule(data=st.data(), num_new=st.integers(1, 8))
    def compute_front(self, data: st.DataObject, num_new: int) -> None:
        page_size = self.cache.page_size
        load = data.draw(st.sampled_from([load for load in self.loads if load.has_front(page_size)]))
        front = load.front
        assert front is not None
        start = front.num_tokens
        end = min(load.front_end * page_size, start + self.within_page(front, num_new))
        self.incoming.begin_front(load.table, start, 0)
        fits = self.model.advance(front, end - start)
        if fits:
            self.incoming.extend_front(load.table, end)
            self.model.note(front, is_end=False)
        self.cache.count()
        if not load.has_front(page_size) and load.num_good >= 0:
            self.loads.remove(load)
            self.end_front(load)

    @precondition(lambda self: any(load.num_good >= 0 for load in self.loads))
    @rule(data=st.data())
    def give_front_up(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from([load for load in self.loads if load.num_good >= 0]))
        self.loads.remove(load)
        self.end_front(load, goes_on=False)

    def end_front(self, load: Load, *, goes_on: bool = True) -> None:
        self.incoming.join_front(load.table)
        assert load.front is not None
        self.model.join(load.front, load.sequence)
        holder = Holder(load.content, load.table.parts, load.sequence)
        if goes_on and load.num_good == load.num_parts:
            self.holders.append(holder)
        else:
            self.end(holder)

    @precondition(lambda self: any(load.num_good < 0 for load in self.loads))
    @rule(data=st.data(), is_good=st.sampled_from([True, True, False]))
    def end_load(self, data: st.DataObject, is_good: bool) -> None:
        load = data.draw(st.sampled_from([load for load in self.loads if load.num_good < 0]))
        self.loads.remove(load)
        self.end_load_as(load, load.num_parts if is_good else data.draw(st.integers(0, load.num_parts - 1)))

    def can_be_used(self) -> list[Load]:
        return [load for load in self.loads if load.num_good < 0 and not load.has_front(self.cache.page_size)]

    @precondition(lambda self: self.can_be_used())
    @rule(data=st.data())
    def use_early(self, data: st.DataObject) -> None:
        """A step uses a load under way, which ends before it does."""
        load = data.draw(st.sampled_from(self.can_be_used()))
        self.loads.remove(load)
        self.offloader.use_early(load.transfer)
        self.model.find_loaded(load.sequence, [part for of_tier in load.parts for part in of_tier])
        load.num_good = load.num_parts
        self.used.append(load)
        if load.front is None:
            self.holders.append(Holder(load.content, load.table.parts, load.sequence))
        else:
            self.end_front(load)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def end_used(self, data: st.DataObject) -> None:
        load = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.end_load_as(load, load.num_parts, is_used=True)

    def end_load_as(self, load: Load, num_good: int, *, is_used: bool = False) -> None:
        is_good = num_good == load.num_parts
        sizes = [self.model.below[0].size(part) for of_tier in load.parts for part in of_tier]
        num_blocks = sum(sizes[:num_good]) // self.block_bytes
        self.end_transfer(load.transfer, None if is_good else num_blocks)
        self.model.end_load(load.sequence, load.table.num_pages, load.parts, num_good, is_used=is_used)
        (loaded,) = self.offloader.take_loaded()
        assert loaded.request == load.request
        assert loaded.num_pages == (load.table.num_pages if is_good else 0)
        assert loaded.by_tier == (load.by_tier if is_good else (0,) * len(self.tiers))
        if is_used:
            return
        if load.front is not None:
            load.num_good = num_good
            if load.has_front(self.cache.page_size):
                self.loads.append(load)
            else:
                self.end_front(load)
            return
        holder = Holder(load.content, load.table.parts, load.sequence, load.num_known)
        if is_good:
            self.holders.append(holder)
        else:
            self.end(holder)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.carry_out()
        cache, model = self.parts, self.model
        tables = [holder.table for holder in self.holders] + [load.table.parts for load in self.loads]
        tables += [load.table.tail for load in self.loads if load.table.tail is not None]
        tables += [held.parts for held in self.offloader.holds() if isinstance(held, PinnedParts)]
        cache.check(tables)
        self.offloader.check()
        self.agrees_on_memory()
        assert listed_pages(cache) == [
            (part.group, len(part.name[1]) // self.cache.page_size - 1)
            for part in model.released
            if part.name and not part.stores
        ]
        if self.has_ids:
            assert self.listed(cache.entries()) == [
                (part.group, part.name) for part in model.released if not part.stores
            ]
        if self.files:
            files: Any = self.tiers[-1]
            keys = set(files._keys.values())
            assert keys <= self.files, "a part has no file"
            assert self.files - keys <= set(files.files._dropped), "a file stays for ever"
        for tier, naive in zip(self.tiers, model.below, strict=True):
            account = self.account_of(tier)
            assert self.listed(account.entries()) == [part.key for part in naive.idle()]
            for group in range(len(cache.groups)):
                assert (account.num_used[group], account.num_cached[group]) == naive.num_parts(group)
            assert sum(tier.num_evicted) == naive.num_lost
        assert self.offloader.counts.num_pages_without_room == model.num_refused

    def account_of(self, tier: PartTier) -> PartTier:
        """The tier that has the parts of `tier`."""
        return tier

    def agrees_on_memory(self) -> None:
        cache, model = self.parts, self.model
        assert cache.empty_bytes * self.block_bytes == model.empty_bytes
        assert cache.free_bytes * self.block_bytes == model.free_bytes()

    def listed(self, entries: Iterator[LruEntry]) -> list[tuple[int, Any]]:
        """The parts of runs, the next to be evicted first, with what the model calls their pages."""
        parts: list[tuple[int, Any]] = []
        for run in entries:
            if isinstance(run, EvictionSlot):
                continue
            assert isinstance(run, PartRun) and run.span is not None
            content = run.span.content
            parts += [(run.group, self.name_of(content, page)) for page in range(run.end - 1, run.start - 1, -1)]
        return parts

    def name_of(self, content: Content, page: int) -> Any:
        """What the model calls a page."""
        keys = [content.key(before) for before in range(page + 1)]
        if isinstance(keys[-1], int):
            return content.salt, tuple(self.tokens_of[content.owner][: (page + 1) * self.cache.page_size])
        units = b"".join(key for key in keys if isinstance(key, bytes))
        tokens = tuple(int.from_bytes(units[at : at + 8], "little") for at in range(0, len(units), 8))
        return content.salt, tokens

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for number in sorted([*self.stores, *self.spills, *(load.transfer for load in self.used)]):
            self.end_transfer(number, None)
        while self.loads:
            load = self.loads.pop()
            if load.num_good < 0:
                self.end_transfer(load.transfer, 0)
            self.incoming.join_front(load.table)
            self.close_parts(load.table.parts, load.table.parts.num_tokens)
        for holder in self.holders:
            self.close_parts(holder.table, holder.sequence.num_tokens)
        self.parts.check([])
        self.offloader.check()
        assert self.parts.used_bytes == 0, "L2: something is held at rest"
        assert not any(tier.used_bytes for tier in self.tiers), "L2: something below is held at rest"
        self.offloader.reset()
        self.parts.evict(self.parts.free_bytes)
        assert not any(tier.cached_bytes for tier in self.tiers)
        assert not any(root.children for root in self.parts.tree.roots.values()), (
            "a span outlives everything that needs it"
        )
