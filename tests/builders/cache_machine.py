"""A state machine that drives a page cache with any eviction order, against a model that does it page by page."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarts.core.content import Content
from kvarts.core.events import Event
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.eviction import EvictionOrder, LruOrder, PinnedPages
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool, IdPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.testing import hold_found

from builders.pages import evicted_names, page_name
from oracles.page_by_page import Name, OnePage, PageByPage

__all__ = ["CacheMachine", "Holder", "Transfer"]


@dataclass
class Holder:
    content: Content
    table: BlockTable
    pages: list[OnePage]
    num_published: int


@dataclass
class Transfer:
    content: Content
    held: PinnedPages
    pages: list[OnePage]


class CacheMachine(RuleBasedStateMachine):
    """A cache with an order, against its pages one by one. A subclass says which order, and what the pages do."""

    with_page_ids = False

    def make_order(self) -> EvictionOrder:
        return LruOrder()

    def make_model(self, num_pages: int) -> PageByPage:
        return PageByPage(num_pages)

    def make_tree(self) -> PrefixTree:
        return PrefixTree(self.make_order(), self.events.append)

    def hold_match(self, match: Match, start: int, data: st.DataObject) -> PinnedPages:
        return hold_found(self.cache, match, start)

    @initialize(num_pages=st.integers(1, 10) | st.integers(1, 30), page_size=st.sampled_from([1, 2, 3]))
    def build(self, num_pages: int, page_size: int) -> None:
        self.events: list[Event] = []
        pool = IdPool(num_pages) if self.with_page_ids else CountPool(num_pages)
        self.cache = PageCache(pool, self.make_tree())
        self.model = self.make_model(num_pages)
        self.transfers: list[Transfer] = []
        self.num_pages, self.page_size = num_pages, page_size
        self.holders: list[Holder] = []
        self.closed: list[Content] = []
        self.num_owners = 0

    def names(self, content: Content, num_pages: int) -> list[Name]:
        return [page_name(content, page) for page in range(num_pages)]

    def free(self) -> int:
        return self.model.num_empty + len(self.model.cached())

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
        assert match.num_shared == sum(1 for page in found if page.refs or page.holds)
        table = self.cache.open(match)
        for page in found:
            self.model.pin(page)
        self.holders.append(Holder(content, table, found, len(found)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        count = min(count, self.free())
        self.cache.grow(holder.table, len(holder.pages) + count)
        holder.pages += [self.model.take() for _ in range(count)]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_pages=st.integers(0, 12))
    def shrink(self, data: st.DataObject, num_pages: int) -> None:
        """As after a draft: pages that were never findable go back, the last ones first."""
        holder = data.draw(st.sampled_from(self.holders))
        num_pages = max(num_pages, holder.num_published)
        self.cache.shrink(holder.table, num_pages)
        self.model.release(holder.pages[num_pages:])
        del holder.pages[num_pages:]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        upto = data.draw(st.integers(holder.num_published, len(holder.pages)))
        self.cache.publish_pages(holder.table, upto)
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
        self.cache.close(holder.table, full, len(holder.pages))
        self.publish_in_model(holder, full)
        self.model.release(holder.pages)
        self.closed.append(holder.content)

    def contents(self) -> list[Content]:
        return self.closed + [holder.content for holder in self.holders]

    @precondition(lambda self: self.closed or self.holders)
    @rule(data=st.data(), limit=st.integers(0, 12), start=st.integers(0, 12))
    def hold(self, data: st.DataObject, limit: int, start: int) -> None:
        content = data.draw(st.sampled_from(self.contents()))
        pages = self.model.lookup(self.names(content, limit))
        match = self.cache.match(content, limit)
        start = min(start, len(pages))
        held = self.hold_match(match, start, data)
        for page in pages[start:]:
            assert page.name is not None
            for copy in self.model.copies[page.name]:
                copy.holds += 1
        self.transfers.append(Transfer(content, held, pages[start:]))

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        transfer = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        self.cache.unhold(transfer.held)
        for page in transfer.pages:
            self.model.unhold(page)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        cache.check(
            [(holder.table, len(holder.pages)) for holder in self.holders],
            [transfer.held for transfer in self.transfers],
        )
        assert cache.pool.num_empty == model.num_empty
        assert cache.num_cached == len(model.cached())
        assert cache.num_used + cache.num_free == self.num_pages
        in_order = [
            page_name(node.content, page)
            for node in cache.tree.order
            for page in range(node.end - 1, node.start - 1, -1)
        ]
        assert in_order == [page.name for page in model.in_order()]
        assert evicted_names(self.events) == model.evicted
        for content in self.contents():
            for limit in (content.num_known_pages, content.num_known_pages + 3):
                assert cache.tree.num_found(content, limit) == len(model.lookup(self.names(content, limit)))
