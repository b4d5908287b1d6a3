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
from kvarts.kv.safe import Below, SafeFirstTree
from kvarts.kv.tree import Path

from builders.pages import evicted_names, page_name

pytestmark = pytest.mark.laws

Name = object


@dataclass(eq=False)
class OnePage:
    name: Name | None = None
    refs: int = 1
    holds: int = 0


@dataclass
class PageByPage:
    """Pages one at a time: a count of empty ones, lists of unreferenced ones, the oldest first, and all copies of each
    name, the oldest first. `safe` is the list of those whose eviction loses nothing, where anybody asks for that."""

    num_empty: int
    safe_first: bool = False
    lru: list[OnePage] = field(default_factory=list)
    safe: list[OnePage] = field(default_factory=list)
    copies: dict[Name, list[OnePage]] = field(default_factory=dict)
    evicted: list[Name] = field(default_factory=list)
    stored: set[Name] = field(default_factory=set)

    def is_unsafe(self, page: OnePage) -> bool:
        """It is not stored below, or something resident after it is not."""
        assert isinstance(page.name, tuple)
        salt, tokens = page.name
        return not self.safe_first or any(
            name not in self.stored
            for name in self.copies
            if name[0] == salt and name[1][: len(tokens)] == tokens  # type: ignore[index]
        )

    def settle(self) -> None:
        newly_safe = [page for page in self.lru if not self.is_unsafe(page)]
        newly_unsafe = [page for page in self.safe if self.is_unsafe(page)]
        self.lru = newly_unsafe + [page for page in self.lru if page not in newly_safe]
        self.safe = [page for page in self.safe if page not in newly_unsafe] + newly_safe

    def cached(self) -> list[OnePage]:
        return [page for page in self.safe + self.lru if not page.holds]

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
        oldest = self.cached()[0]
        (self.safe if oldest in self.safe else self.lru).remove(oldest)
        self.copies[oldest.name].remove(oldest)
        if not self.copies[oldest.name]:
            del self.copies[oldest.name]
            self.evicted.append(oldest.name)
            self.stored.discard(oldest.name)  # whoever computes it next has to ask anew
        self.settle()
        return OnePage()

    def pin(self, page: OnePage) -> None:
        if page.refs == 0:
            (self.safe if page in self.safe else self.lru).remove(page)
        page.refs += 1

    def publish(self, page: OnePage, name: Name) -> None:
        if page.name is None:
            page.name = name
            copies = self.copies.setdefault(name, [])
            page.holds = copies[0].holds if copies else 0  # all copies of a page are held, or none
            copies.append(page)
            self.settle()

    def release(self, pages: list[OnePage]) -> None:
        for page in reversed(pages):
            page.refs -= 1
            if page.refs == 0 and page.name is None:
                self.num_empty += 1
            elif page.refs == 0:
                (self.lru if self.is_unsafe(page) else self.safe).append(page)


@dataclass
class Holder:
    content: Content
    holding: Holding
    pages: list[OnePage]
    num_published: int


@dataclass
class Transfer:
    content: Content
    path: Path
    pages: list[OnePage]


class CacheMachine(RuleBasedStateMachine):
    with_page_ids = False
    safe_first = False

    @initialize(num_pages=st.integers(1, 10) | st.integers(1, 30), page_size=st.sampled_from([1, 2, 3]))
    def build(self, num_pages: int, page_size: int) -> None:
        self.events: list[Event] = []
        self.cache = PageCache(
            num_pages, with_page_ids=self.with_page_ids, events=self.events, safe_first=self.safe_first
        )
        self.model = PageByPage(num_pages, self.safe_first)
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

    def contents(self) -> list[Content]:
        return self.closed + [holder.content for holder in self.holders]

    @precondition(lambda self: self.closed or self.holders)
    @rule(data=st.data(), limit=st.integers(0, 12))
    def hold(self, data: st.DataObject, limit: int) -> None:
        content = data.draw(st.sampled_from(self.contents()))
        pages = self.model.lookup(self.names(content, limit))
        match = self.cache.match(content, limit)
        tree = self.cache.tree
        if isinstance(tree, SafeFirstTree) and match.nodes and data.draw(st.booleans()):
            last = match.nodes[-1]
            one = data.draw(st.sampled_from(last.twins or [last]))
            path = self.cache.hold_path(tree.path_to(one, match.num_pages))
        else:
            path = self.cache.hold(match)
        for page in pages:
            for copy in self.model.copies[page.name]:
                copy.holds += 1
        self.transfers.append(Transfer(content, path, pages))

    @precondition(lambda self: self.safe_first and self.transfers)
    @rule(data=st.data(), times=st.integers(1, 4))
    def mark(self, data: st.DataObject, times: int) -> None:
        """Several marks may come before what they move is moved."""
        tree = self.cache.tree
        assert isinstance(tree, SafeFirstTree)
        for _ in range(times):
            transfer = data.draw(st.sampled_from(self.transfers))
            below = data.draw(st.sampled_from([Below.NOT, Below.STORED, Below.STORED]))
            start, end = sorted(data.draw(st.integers(0, len(transfer.pages))) for _ in range(2))
            tree.mark(transfer.path, start, end, below)
            for page in transfer.pages[start:end]:
                (self.model.stored.add if below else self.model.stored.discard)(page.name)
        tree.regroup()
        self.model.settle()

    @precondition(lambda self: self.safe_first and self.closed)
    @rule(data=st.data(), limit=st.integers(1, 12))
    def store_at_once(self, data: st.DataObject, limit: int) -> None:
        content = data.draw(st.sampled_from(self.closed))
        tree = self.cache.tree
        assert isinstance(tree, SafeFirstTree)
        tree.mark_match(self.cache.match(content, limit), 0, Below.STORED)
        tree.regroup()
        self.model.stored.update(page.name for page in self.model.lookup(self.names(content, limit)))
        self.model.settle()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        transfer = self.transfers.pop(data.draw(st.integers(0, len(self.transfers) - 1)))
        self.cache.unhold(transfer.path)
        for page in transfer.pages:
            for copy in self.model.copies[page.name]:
                copy.holds -= 1

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache, model = self.cache, self.model
        cache.check(
            [(holder.holding, len(holder.pages)) for holder in self.holders],
            [transfer.path for transfer in self.transfers],
        )
        assert cache.pool.num_empty == model.num_empty
        assert cache.num_cached == len(model.cached())
        if isinstance(cache.tree, SafeFirstTree):
            assert cache.tree.num_safe == sum(1 for page in model.safe if not page.holds)
        assert cache.num_used + cache.num_free == self.num_pages
        in_order = [
            page_name(node.content, page)
            for node in cache.tree.lru_nodes()
            for page in range(node.end - 1, node.start - 1, -1)
        ]
        assert in_order == [page.name for page in model.safe + model.lru]
        assert evicted_names(self.events) == model.evicted


class IdCacheMachine(CacheMachine):
    with_page_ids = True


class SafeFirstMachine(CacheMachine):
    safe_first = True


TestCountedPages = CacheMachine.TestCase
TestPagesWithIds = IdCacheMachine.TestCase
TestSafePagesFirst = SafeFirstMachine.TestCase
for case in (TestCountedPages, TestPagesWithIds, TestSafePagesFirst):
    case.settings = settings(stateful_step_count=40)
del case


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


def test_a_run_that_is_split_while_it_waits_to_move_moves_with_all_its_parts() -> None:
    cache = PageCache(16, with_page_ids=False, safe_first=True)
    tree = cache.tree
    assert isinstance(tree, SafeFirstTree)
    content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
    holding = cache.open(cache.match(content, 3))
    cache.grow(holding, 3)
    cache.close(holding, content, 3, 3)
    tree.mark_match(cache.match(content, 3), 0, Below.STORED)
    tree.regroup()
    path = cache.hold(cache.match(content, 3))
    tree.mark(path, 2, 3, Below.NOT)
    tree.mark(path, 0, 1, Below.NOT)
    tree.regroup()
    cache.check([], [path])
    assert [(node.start, node.end) for node in tree.unsafe_nodes()] == [(2, 3), (1, 2), (0, 1)]


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
