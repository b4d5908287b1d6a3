"""A cache with KV groups against a model that looks at every token, whatever is done in whatever order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.base.errors import ConfigError
from kvarts.core.content import Content
from kvarts.core.kv.layers import KvKind, KvLayer
from kvarts.core.kv.pool import PageError

from builders.grouped import layers
from oracles.grouped_cache import GroupedCache, GroupedTable, PartGroup, Retention
from oracles.naive_grouped import NaiveGroups, NaiveSequence
from oracles.parts import Part

pytestmark = pytest.mark.laws


@st.composite
def part_groups(draw: st.DrawFn) -> PartGroup:
    kinds: list[KvKind] = ["full", "window", "window", "chunk", "latent", "state"]
    layer = draw(layers(draw(st.sampled_from(kinds)), st.integers(1, 9), [0, 0, 1, 3], by_page=True))
    return PartGroup(layer, part_bytes=draw(st.sampled_from([1, 1, 2, 5])))


@dataclass
class Holder:
    content: Content
    table: GroupedTable
    sequence: NaiveSequence


class GroupedMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.lists(part_groups(), min_size=1, max_size=3),
        page_size=st.integers(1, 4),
        total_bytes=st.integers(0, 40),
        keeps=st.sampled_from(["all", "tails"]),
    )
    def build(self, groups: list[PartGroup], page_size: int, total_bytes: int, keeps: Retention) -> None:
        self.cache = GroupedCache(groups, page_size=page_size, total_bytes=total_bytes, keeps=keeps)
        self.model = NaiveGroups(
            [(group.layer, group.part_bytes) for group in groups], page_size, total_bytes, keeps_all=keeps == "all"
        )
        self.holders: list[Holder] = []
        self.num_owners = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16),
        tenant=st.sampled_from([None, None, "a"]),
        num_new=st.integers(1, 16),
        is_end=st.booleans(),
    )
    def open(self, tokens: list[int], tenant: str | None, num_new: int, is_end: bool) -> None:
        self.num_owners += 1
        page_size = self.cache.page_size
        content = Content.from_tokens(tokens, page_size=page_size, owner=self.num_owners, salt=tenant)
        limit = (len(tokens) - 1) // page_size
        match = self.cache.match(content, limit)
        length = self.model.hit(tokens, tenant, limit)
        assert match.num_pages == length
        num_new = min(num_new, len(tokens) - length * page_size)
        sequence = self.model.open(tokens, tenant, length, num_new, is_end=is_end)
        table = self.cache.open(content, match, num_new, is_end=is_end)
        assert (table is None) == (sequence is None)
        if table is not None and sequence is not None:
            self.holders.append(Holder(content, table, sequence))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_new=st.integers(1, 8), is_end=st.booleans())
    def advance(self, data: st.DataObject, num_new: int, is_end: bool) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        tokens = holder.sequence.tokens
        while len(tokens) < holder.sequence.num_tokens + num_new:
            token = data.draw(st.integers(0, 1))
            tokens.append(token)
            holder.content.append(token.to_bytes(8, "little"))
        fits = self.model.advance(holder.sequence, num_new, is_end=is_end)
        assert self.cache.advance(holder.table, num_new, is_end=is_end) == fits

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.cache.close(holder.table)
        self.model.close(holder.sequence)
        with pytest.raises(PageError, match="closed"):
            self.cache.close(holder.table)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        cache.check(holder.table for holder in self.holders)
        assert cache.empty_bytes == model.empty_bytes
        assert cache.free_bytes == model.free_bytes()
        assert [self.named(part) for part in cache._released] == [(part.group, part.name) for part in model.released]
        held = {id(part): part for holder in self.holders for parts in holder.sequence.parts for part in parts.values()}
        held |= {id(part): part for holder in self.holders for part in holder.sequence.states.values()}
        for group in range(len(cache.groups)):
            assert cache.num_used[group] == sum(part.group == group for part in held.values())
            assert cache.num_evicted[group] == sum(index == group for index, _ in model.evicted)
        for holder in self.holders:
            assert [list(parts) for parts in holder.table.parts] == [sorted(parts) for parts in holder.sequence.parts]

    def named(self, part: Part) -> tuple[int, object]:
        """Return what the model calls a part that can be found."""
        keys = []
        name = part.name
        assert name is not None
        while name.parent is not None:
            keys.append(name.key)
            name = name.parent
        salt = next(salt for salt, root in self.cache._names._roots.items() if root is name)
        units = b"".join(key for key in reversed(keys) if isinstance(key, bytes))
        tokens = tuple(int.from_bytes(units[first : first + 8], "little") for first in range(0, len(units), 8))
        return part.group, (salt, tokens)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for holder in self.holders:
            self.cache.close(holder.table)
        self.cache.check([])
        assert self.cache.used_bytes == 0
        if self.cache.cached_bytes:
            self.cache.evict(self.cache.total_bytes)
        assert self.cache._names.num_names() == 0, "a name outlives everything that needs it"


TestGroups = GroupedMachine.TestCase
TestGroups.settings = settings(stateful_step_count=30)


FULL = KvLayer(kind="full", num_heads=1, head_numbers=2)


def window(span: int) -> KvLayer:
    return KvLayer(kind="window", num_heads=1, head_numbers=2, span=span)


def content_of(num_tokens: int, *, page_size: int = 4, first: int = 0) -> Content:
    return Content.from_tokens(range(first, first + num_tokens), page_size=page_size, owner=first)


def test_a_decode_in_a_full_window_takes_a_part_and_gives_one_back() -> None:
    cache = GroupedCache([PartGroup(FULL, 1), PartGroup(window(8), 1)], page_size=4, total_bytes=40)
    content = content_of(40)
    table = cache.open(content, cache.match(content, 0), 16)
    assert table is not None
    used = []
    for _ in range(9):
        assert cache.advance(table, 1)
        used.append(tuple(cache.num_used))
    # While token 16 is computed, tokens 9 to 16 are needed: pages 2, 3 and 4. At token 19, those of 12 to 19.
    assert used == [(5, 3), (5, 3), (5, 3), (5, 2), (6, 3), (6, 3), (6, 3), (6, 2), (7, 3)]


def test_a_part_that_goes_one_token_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model looks at tokens, and does not ask a layer for its first one."""
    first_seen = KvLayer.first_seen
    monkeypatch.setattr(KvLayer, "first_seen", lambda layer, position: first_seen(layer, position + 1))
    cache = GroupedCache([PartGroup(window(8), 1)], page_size=4, total_bytes=40)
    model = NaiveGroups([(window(8), 1)], 4, 40)
    content = content_of(40)
    table, sequence = cache.open(content, cache.match(content, 0), 8), model.open(list(range(40)), None, 0, 8)
    assert table is not None and sequence is not None
    differing = []
    for step in range(8, 20):
        assert cache.advance(table, 1) and model.advance(sequence, 1)
        if list(table.parts[0]) != sorted(sequence.parts[0]):
            differing.append(step)
    assert differing == [10, 14, 18], "the token before last of a page still sees the page before its window"


def test_a_hit_needs_the_last_window_only() -> None:
    cache = GroupedCache([PartGroup(FULL, 1), PartGroup(window(5), 1)], page_size=4, total_bytes=10)
    content = content_of(17)
    table = cache.open(content, cache.match(content, 4), 17)
    assert table is not None
    cache.close(table)
    assert cache.match(content, 4).num_pages == 4
    other = content_of(5, first=100)
    table = cache.open(other, cache.match(other, 0), 5)  # two parts have to go: the deepest of the first group
    assert table is not None
    assert cache.num_evicted == [2, 0]
    assert cache.match(content, 4).num_pages == 2, "the window has all its parts, the full group two"


def test_a_state_is_found_at_its_snapshots_only() -> None:
    state = PartGroup(KvLayer(kind="state", state_bytes=3), 3)
    cache = GroupedCache([PartGroup(FULL, 1), state], page_size=4, total_bytes=30)
    content = content_of(20)
    table = cache.open(content, cache.match(content, 0), 8, is_end=True)
    assert table is not None
    assert cache.advance(table, 8)
    assert cache.advance(table, 3, is_end=True), "no page ends here, so there is no snapshot"
    cache.close(table)
    assert cache.match(content, 4).num_pages == 2
    assert cache.cached_bytes == 4 * 1 + 3


@pytest.mark.parametrize(("keeps", "hits"), [("all", [6, 6, 3, 2]), ("tails", [6, 6, 2, 2])])
def test_tails_keep_the_ends_of_prompts_and_turns(keeps: Retention, hits: list[int]) -> None:
    """A request of 9 prompt tokens that generates 16: pages of 4, and a window of 5."""
    cache = GroupedCache([PartGroup(FULL, 1), PartGroup(window(5), 1)], page_size=4, total_bytes=40, keeps=keeps)
    content = content_of(25)
    table = cache.open(content, cache.match(content, 0), 9, is_end=True)
    assert table is not None
    while table.num_tokens < 25:
        assert cache.advance(table, 1)
    cache.close(table)
    # At the end, before it, in the middle, and after the prompt: a window of 5 needs the page before.
    assert [cache.match(content, limit).num_pages for limit in (6, 7, 3, 2)] == hits
    assert cache.cached_bytes == (12 if keeps == "all" else 8)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps nothing"):
        PartGroup(KvLayer(kind="none"), 1)
    with pytest.raises(ConfigError, match="part_bytes"):
        PartGroup(FULL, 0)
    with pytest.raises(ConfigError, match="groups"):
        GroupedCache([], page_size=1, total_bytes=1)
    with pytest.raises(ConfigError, match="keeps: 'some' is not known"):
        GroupedCache([PartGroup(FULL, 1)], page_size=1, total_bytes=1, keeps="some")  # type: ignore[arg-type]
    cache = GroupedCache([PartGroup(FULL, 1)], page_size=4, total_bytes=1)
    content = content_of(8)
    assert cache.open(content, cache.match(content, 2), 8) is None
    assert cache.free_bytes == 1
    table = cache.open(content, cache.match(content, 2), 4)
    assert table is not None
    with pytest.raises(ConfigError, match="num_new"):
        cache.advance(table, 0)
    assert not cache.advance(table, 1)
    assert cache.used_bytes == 1
