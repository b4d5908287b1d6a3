"""Laws L1, L2 and L4 of a radix cache of whole runs, next to a tree that keeps the tokens of its nodes."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.config import BatchRules
from kvarts.core.content import Content
from kvarts.core.kv.cache import BlockTable, Match
from kvarts.core.kv.pool import CountPool, PageError
from kvarts.core.kv.radix import RADIX_ORDERS, RadixCache, RadixTree, make_radix_order

from oracles.naive_sglang import NaiveRadixTree, length_of

pytestmark = pytest.mark.laws
NUM_PAGES = 40


class Op(NamedTuple):
    """One operation: what, of which tokens, and a number whose meaning depends on it."""

    kind: str
    tokens: list[int]
    number: int


OPS = st.lists(
    st.builds(
        Op,
        st.sampled_from(["begin", "begin", "insert", "end", "end", "room", "touch"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=16),
        st.integers(0, 30),
    ),
    max_size=60,
)


class Held(NamedTuple):
    """A request in both: its block table, and its node with the tokens that the tree has and all that it has."""

    table: BlockTable
    tokens: list[int]
    node: list[object]
    num_shared: list[int]
    num_inserted: list[int]

    @property
    def priority(self) -> int:
        """A priority that only depends on its tokens."""
        return len(self.tokens) % 4


def check(cache: RadixCache, tree: NaiveRadixTree, held: list[Held], page_size: int) -> None:
    """Assert that both have the same memory, and the laws of the cache."""
    assert (cache.num_free - cache.num_cached) * page_size == tree.num_free
    assert cache.num_cached * page_size == tree.evictable
    cache.check([(each.table, each.table.num_pages) for each in held])


CONFIGS = {"slru": {"protected_threshold": 3}, "tlru": {"threshold": 7, "next_prompt_estimate": 2}}


@pytest.mark.parametrize("eviction", RADIX_ORDERS)
@given(OPS, st.sampled_from([1, 2, 4]))
def test_a_radix_cache_hits_and_evicts_as_the_naive_tree(eviction: str, ops: list[Op], page_size: int) -> None:
    numbers = CONFIGS.get(eviction, {})
    rules = BatchRules(eviction=eviction, eviction_config=numbers)  # type: ignore[arg-type]
    cache = RadixCache(CountPool(NUM_PAGES), RadixTree(order=make_radix_order(rules, page_size)))
    tree = NaiveRadixTree(NUM_PAGES * page_size, page_size, eviction, numbers)
    held: list[Held] = []
    found: list[tuple[Match, int]] = []
    for number, (kind, tokens, argument) in enumerate(ops):
        if kind in ("begin", "touch"):
            content = Content.from_tokens(tokens, page_size=page_size, owner=number)
            content.num_prompt_tokens = argument % (len(tokens) + 1)
            match = cache.match(content, len(tokens) // page_size)
            cache.radix.visit(match)
            found.append((Match(content, list(match.nodes), match.num_pages, 0), argument))
            node = tree.match(tokens)
            assert match.num_pages * page_size == length_of(node)
            num_pages = -(-len(tokens) // page_size)
            if kind == "touch" or num_pages - match.num_shared > cache.num_free:
                continue
            table = cache.open(match)
            tree.lock(node, 1)
            cache.extend(table, len(tokens), is_end=True)
            cache.take_asked((num_pages - match.num_pages) * page_size, page_size)
            tree.make_room((num_pages - match.num_pages) * page_size)
            tree.num_free -= (num_pages - match.num_pages) * page_size
            held.append(Held(table, tokens, [node], [match.num_pages * page_size], [0]))
        elif kind == "room":
            cache.make_room(argument)
            tree.make_room(argument * page_size)
        elif held:
            each = held[argument % len(held)]
            if kind == "insert":
                cache.insert(each.table, len(each.tokens) // page_size, each.priority)
                prompt = each.tokens[: each.table.content.num_prompt_tokens // page_size * page_size]
                node = tree.insert(each.tokens, each.num_shared[0], each.num_inserted[0], each.priority)
                each.num_inserted[0] = len(tree.whole(each.tokens))
                if 0 < len(prompt) < len(tree.whole(each.tokens)):
                    tree.insert(prompt, len(prompt), len(prompt), each.priority + 1)
                tree.lock(each.node[0], -1)  # type: ignore[arg-type]
                tree.lock(node, 1)
                each.node[0], each.num_shared[0] = node, len(tree.whole(each.tokens))
            else:
                held.remove(each)
                cache.close(each.table, each.table.num_named, each.table.num_pages)
                tree.num_free += -(-len(each.tokens) // page_size) * page_size - each.num_shared[0]
                tree.lock(each.node[0], -1)  # type: ignore[arg-type]
        check(cache, tree, held, page_size)
        for before, limit in found:
            fresh = cache.match(before.content, limit)
            if cache.radix.is_longest(before, limit):
                assert before.nodes == fresh.nodes
                assert (before.num_pages, before.num_shared) == (fresh.num_pages, fresh.num_shared)
    listed = list(cache.radix.touches)
    cache.evict(cache.num_cached)
    assert not list(cache.radix.touches) and len(listed) == len(set(map(id, listed)))


def test_what_a_request_found_is_found_again_unless_it_was_evicted_or_split_or_goes_on() -> None:
    cache = RadixCache(CountPool(20), RadixTree())
    tree = cache.radix

    def put(tokens: list[int]) -> None:
        content = Content.from_tokens(tokens, page_size=1, owner=0)
        table = cache.open(cache.match(content, len(tokens)))
        cache.extend(table, len(tokens), is_end=True)
        cache.take_asked(len(tokens) - table.num_pages, 1)
        cache.insert(table, len(tokens))
        cache.close(table, table.num_named, table.num_pages)

    put([1, 2, 3, 4])
    content = Content.from_tokens([1, 2, 3, 4, 5, 6], page_size=1, owner=1)
    before = tree.match(content, 6)
    assert tree.is_longest(before, 6) and (before.num_pages, before.num_shared) == (4, 0)
    assert not tree.is_longest(before, 3)
    put([1, 2, 3, 4, 5])
    assert not tree.is_longest(before, 6) and tree.is_longest(before, 4)
    put([1, 2, 7])
    assert not tree.is_longest(before, 4), "it was split"
    before = tree.match(content, 6)
    assert tree.is_longest(before, 6)
    cache.evict(cache.num_cached)
    assert not tree.is_longest(before, 6)


def test_a_call_that_cannot_be_done_changes_nothing() -> None:
    cache = RadixCache(CountPool(4), RadixTree())
    content = Content.from_tokens(range(4), page_size=1, owner=0)
    table = cache.open(cache.match(content, 4))
    with pytest.raises(PageError):
        cache.take(5)
    assert cache.num_free == 4
    cache.extend(table, 4, is_end=True)
    cache.take_asked(4, 1)
    cache.insert(table, 4)
    cache.close(table, 4, 4)
    with pytest.raises(PageError):
        cache.insert(table, 4)
    assert (cache.num_free, cache.num_cached) == (4, 4)
    cache.make_room(1)
    assert (cache.num_free, cache.num_cached, cache.num_evicted) == (4, 0, 4)  # the whole run
