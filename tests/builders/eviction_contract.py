"""What every eviction order promises, through the tree and the cache that ask it. A subclass brings the order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved
from kvarts.core.kv.cache import BlockTable
from kvarts.core.kv.eviction import EvictionOrder, PinnedPages
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool
from kvarts.core.kv.tree import PrefixTree

from builders.table import hold_found

__all__ = ["EvictionOrderContract", "drive", "leave", "pages_in_order"]


def leave(cache: PageCache, tokens: list[int], owner: int) -> Content:
    """Compute a prompt and let its request go."""
    content = Content.from_tokens(tokens, page_size=1, owner=owner)
    table = cache.open(cache.match(content, len(tokens)))
    cache.grow(table, len(tokens))
    cache.close(table, len(tokens), len(tokens))
    return content


def pages_in_order(order: EvictionOrder) -> list[tuple[Content, int]]:
    """Return the listed pages as they would be evicted if none followed another: run by run, from the tail."""
    return [(node.content, page) for node in order for page in range(node.end - 1, node.start - 1, -1)]


def drive(
    cache: PageCache,
    seed: int,
    num_turns: int,
    *,
    after: Callable[[PageCache], object] = lambda cache: None,
    transfers: Callable[[], Iterable[PinnedPages]] = list,
) -> None:
    """Open, grow, close, hold and let go at random, in a cache of some 24 pages; check laws L1 to L3 after each turn.

    `after` does something between turns, for which `transfers` hold paths.
    """
    dice = random.Random(seed)
    open_now: list[tuple[BlockTable, Content]] = []
    held: list[PinnedPages] = []
    for turn in range(num_turns):
        what = dice.random()
        if what < 0.5:
            tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
            content = Content.from_tokens(tokens, page_size=1, owner=turn)
            match = cache.match(content, len(tokens))
            if len(tokens) - match.num_shared <= cache.num_free:
                table = cache.open(match)
                cache.grow(table, len(tokens))
                open_now.append((table, content))
        elif what < 0.9 and open_now:
            table, content = open_now.pop(dice.randrange(len(open_now)))
            num_findable = table.path[-1].end if table.path else 0
            cache.close(table, dice.randint(num_findable, table.num_pages), table.num_pages)
        elif what < 0.95 and open_now:
            tokens = [dice.randrange(2) for _ in range(4)]
            held.append(hold_found(cache, cache.match(Content.from_tokens(tokens, page_size=1, owner=turn), 4)))
        elif held:
            cache.unhold(held.pop(dice.randrange(len(held))))
        after(cache)
        cache.check([(table, table.num_pages) for table, _ in open_now], [*held, *transfers()])
    for path in held:
        cache.unhold(path)
    for table, content in open_now:
        cache.close(table, content.num_known_pages, table.num_pages)
    cache.check([], transfers())


class EvictionOrderContract:
    """Run these by a subclass that makes a tree with the order."""

    def make_tree(self) -> PrefixTree:
        """Return an empty tree."""
        raise NotImplementedError

    def make_cache(self, num_pages: int = 24) -> PageCache:
        """Return an empty cache, whose pages have ids."""
        return PageCache(IdPool(num_pages), self.make_tree())

    def test_each_run_that_nothing_references_is_listed_once(self) -> None:
        cache = self.make_cache()
        leave(cache, [1, 2, 3], 0)
        leave(cache, [1, 2, 4, 5], 1)
        other = leave(cache, [7, 8], 2)
        order = cache.tree.order
        listed = [(node.content.owner, node.start, node.end) for node in order]
        assert len(listed) == len(set(listed)) == 4
        assert sum(end - start for _, start, end in listed) == cache.num_cached == 7
        table = cache.open(cache.match(other, 2))
        assert all(node.content is not other for node in order)
        cache.close(table, 2, 2)
        assert len(list(order)) == 4

    def test_asking_changes_nothing(self) -> None:
        cache = self.make_cache()
        for owner, tokens in enumerate(([1, 2, 3], [1, 2, 4], [5, 6])):
            leave(cache, tokens, owner)
        order = cache.tree.order
        before = list(order)
        assert order.next_run() is order.next_run() is before[0]
        assert list(order) == before

    def test_runs_that_a_transfer_holds_are_passed_by_and_keep_their_place(self) -> None:
        cache = self.make_cache(9)
        for owner, tokens in enumerate(([1, 2, 3], [4, 5, 6], [7, 8, 9])):
            leave(cache, tokens, owner)
        order = cache.tree.order
        before = list(order)
        first = before[0]
        path = hold_found(cache, cache.match(first.content, 3))
        assert list(order) == before
        assert order.next_run() is before[1]
        cache.evict(3)
        assert list(order) == [first, before[2]]
        cache.unhold(path)
        assert order.next_run() is first

    def test_what_was_held_while_it_was_referenced_is_passed_by_when_it_is_released(self) -> None:
        cache = self.make_cache(6)
        content = Content.from_tokens([1, 2, 3], page_size=1, owner=0)
        table = cache.open(cache.match(content, 0))
        cache.grow(table, 3)
        cache.publish_pages(table, 3)
        path = hold_found(cache, cache.match(content, 3))
        cache.close(table, 3, 3)
        other = leave(cache, [4, 5, 6], 1)
        assert cache.tree.order.next_run().content is other
        cache.unhold(path)
        cache.check([])
        cache.evict(6)
        assert list(cache.tree.order) == []

    def test_a_split_moves_no_page(self) -> None:
        cache = self.make_cache()
        contents = [leave(cache, tokens, owner) for owner, tokens in enumerate(([1, 2, 3, 4], [5, 6, 7], [8, 9]))]
        before = pages_in_order(cache.tree.order)
        tree = cache.tree
        tree.isolate(tree.cut(cache.match(contents[0], 4)), 1, 3)
        tree.isolate(tree.cut(cache.match(contents[1], 3)), 1, 2)
        assert pages_in_order(tree.order) == before
        assert len(list(tree.order)) == 7
        cache.check([])

    def test_a_run_is_eaten_from_its_tail_and_no_further_than_needed(self) -> None:
        cache = self.make_cache(6)
        content = leave(cache, [1, 2, 3, 4], 0)
        held = hold_found(cache, cache.match(content, 4))
        ids = cache.page_ids(held)
        cache.unhold(held)
        cache.take(2)
        assert cache.take(3) == list(reversed(ids[1:]))
        assert cache.match(content, 4).num_pages == 1

    def test_what_follows_a_run_goes_before_it(self) -> None:
        """L3, whatever is hit how often."""
        cache = self.make_cache(8)
        root, one, two = leave(cache, [1, 2], 0), leave(cache, [1, 2, 3], 1), leave(cache, [1, 2, 4, 5], 2)
        for _ in range(3):
            table = cache.open(cache.match(two, 4))
            cache.close(table, 4, 4)
        found = []
        while cache.num_cached:
            cache.evict(1)
            cache.check([])
            found.append([cache.match(content, 4).num_pages for content in (root, one, two)])
        assert all(min(first, 2) == min(second, 2) == min(third, 2) for first, second, third in found)
        assert found[-1] == [0, 0, 0]

    @pytest.mark.parametrize("seed", range(6))
    def test_the_laws_hold_after_everything(self, seed: int) -> None:
        """L1 to L3 at random, with a page for every id at the end."""
        cache = self.make_cache()
        drive(cache, seed, 300)
        cache.evict(cache.num_cached)
        cache.check([])
        assert list(cache.tree.order) == [] == list(cache.tree.nodes())
        assert cache.num_evicted > 24

    @pytest.mark.parametrize("seed", range(3))
    def test_the_same_calls_have_the_same_victims(self, seed: int) -> None:
        victims = []
        for _ in range(2):
            events: list[Event] = []
            cache = self.make_cache()
            cache.tree.emit = events.append
            drive(cache, seed, 200)
            victims.append(
                [
                    (event.content.owner, event.start_page, event.end_page)
                    for event in events
                    if isinstance(event, PagesRemoved)
                ]
            )
        assert victims[0] == victims[1] != []
