"""L1 to L4 for the page cache: against a list of pages and a dictionary, whatever is done in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.content import Content
from kvarts.events import Event
from kvarts.kv.cache import Holding, PageCache

from models import evicted_names, page_name

pytestmark = pytest.mark.laws

Name = object


@dataclass(eq=False)
class OnePage:
    name: Name | None = None
    refs: int = 1


@dataclass
class PageByPage:
    """Pages one at a time: a count of empty ones, an LRU list, and all copies of each name, the oldest first."""

    num_empty: int
    lru: list[OnePage] = field(default_factory=list)
    copies: dict[Name, list[OnePage]] = field(default_factory=dict)
    evicted: list[Name] = field(default_factory=list)

    def lookup(self, names: list[Name]) -> list[OnePage]:
        found = []
        for name in names:
            if name not in self.copies:
                break
            found.append(self.copies[name][0])
        return found

    def take(self) -> OnePage:
        if self.num_empty:
            self.num_empty -= 1
            return OnePage()
        oldest = self.lru.pop(0)
        self.copies[oldest.name].remove(oldest)
        if not self.copies[oldest.name]:
            del self.copies[oldest.name]
            self.evicted.append(oldest.name)
        return OnePage()

    def pin(self, page: OnePage) -> None:
        if page.refs == 0:
            self.lru.remove(page)
        page.refs += 1

    def publish(self, page: OnePage, name: Name) -> None:
        if page.name is None:
            page.name = name
            self.copies.setdefault(name, []).append(page)

    def release(self, pages: list[OnePage]) -> None:
        for page in reversed(pages):
            page.refs -= 1
            if page.refs == 0 and page.name is None:
                self.num_empty += 1
            elif page.refs == 0:
                self.lru.append(page)


@dataclass
class Holder:
    content: Content
    holding: Holding
    pages: list[OnePage]
    num_published: int


class CacheMachine(RuleBasedStateMachine):
    with_page_ids = False

    @initialize(num_pages=st.integers(1, 30), page_size=st.sampled_from([1, 2, 3]))
    def build(self, num_pages: int, page_size: int) -> None:
        self.events: list[Event] = []
        self.cache = PageCache(num_pages, with_page_ids=self.with_page_ids, events=self.events)
        self.model = PageByPage(num_pages)
        self.num_pages, self.page_size = num_pages, page_size
        self.holders: list[Holder] = []
        self.closed: list[Content] = []
        self.num_owners = 0

    def names(self, content: Content, num_pages: int) -> list[Name]:
        return [page_name(content, page) for page in range(num_pages)]

    def free(self) -> int:
        return self.model.num_empty + len(self.model.lru)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), tenant=st.sampled_from([None, None, "a"]))
    def open_new(self, tokens: list[int], tenant: str | None) -> None:
        self.num_owners += 1
        content = Content.from_tokens(tokens, page_size=self.page_size, owner=self.num_owners, salt=tenant)
        self.open(content, len(tokens) // self.page_size)

    @precondition(lambda self: self.closed)
    @rule(data=st.data(), more=st.integers(0, 3))
    def open_again(self, data: st.DataObject, more: int) -> None:
        """As after a preemption: the same sequence, private pages included."""
        content = data.draw(st.sampled_from(self.closed))
        if all(holder.content is not content for holder in self.holders):
            self.open(content, content.num_known_pages + more)

    def open(self, content: Content, limit: int) -> None:
        found = self.model.lookup(self.names(content, limit))
        match = self.cache.match(content, limit)
        assert match.num_pages == len(found)
        assert match.num_shared == sum(1 for page in found if page.refs)
        holding = self.cache.open(match)
        for page in found:
            self.model.pin(page)
        self.holders.append(Holder(content, holding, found, len(found)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        count = min(count, self.free())
        self.cache.grow(holder.holding, len(holder.pages) + count)
        holder.pages += [self.model.take() for _ in range(count)]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        upto = data.draw(st.integers(holder.num_published, len(holder.pages)))
        self.cache.publish(holder.holding, holder.content, upto)
        self.publish_in_model(holder, upto)

    def publish_in_model(self, holder: Holder, upto: int) -> None:
        for index in range(holder.num_published, upto):
            self.model.publish(holder.pages[index], page_name(holder.content, index))
        holder.num_published = max(holder.num_published, upto)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        full = data.draw(st.integers(holder.num_published, len(holder.pages)))
        self.cache.close(holder.holding, holder.content, full, len(holder.pages))
        self.publish_in_model(holder, full)
        self.model.release(holder.pages)
        self.closed.append(holder.content)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        cache.check([(holder.holding, len(holder.pages)) for holder in self.holders])
        assert cache.pool.num_empty == model.num_empty
        assert cache.num_cached == len(model.lru)
        assert cache.num_used + cache.num_free == self.num_pages
        in_order = [
            page_name(node.content, page)
            for node in cache.tree.lru_nodes()
            for page in range(node.end - 1, node.start - 1, -1)
        ]
        assert in_order == [page.name for page in model.lru]
        assert evicted_names(self.events) == model.evicted


class IdCacheMachine(CacheMachine):
    with_page_ids = True


TestCountedPages = CacheMachine.TestCase
TestPagesWithIds = IdCacheMachine.TestCase
for case in (TestCountedPages, TestPagesWithIds):
    case.settings = settings(stateful_step_count=40)


def test_a_hit_inside_a_run_splits_it_and_the_tail_keeps_its_place() -> None:
    cache = PageCache(16, with_page_ids=False)

    def run(tokens: list[int], owner: int) -> None:
        content = Content.from_tokens(tokens, page_size=1, owner=owner)
        holding = cache.open(cache.match(content, len(tokens)))
        cache.grow(holding, len(tokens))
        cache.close(holding, content, len(tokens), len(tokens))

    run([1, 2, 3, 4, 5, 6], 0)
    run([9], 1)
    run([1, 2, 3], 2)
    assert [(node.start, node.end) for node in cache.tree.lru_nodes()] == [(3, 6), (0, 1), (0, 3)]


def test_what_no_holder_accounts_for_is_found() -> None:
    """The audit bites: a page taken by nobody, and a holding forgotten."""
    cache = PageCache(8, with_page_ids=False)
    cache.take(1)
    with pytest.raises(AssertionError, match="L1"):
        cache.check([])
    cache = PageCache(8, with_page_ids=False)
    content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
    holding = cache.open(cache.match(content, 3))
    cache.grow(holding, 3)
    cache.publish(holding, content, 3)
    cache.check([(holding, 3)])
    with pytest.raises(AssertionError, match="L2"):
        cache.check([])
