"""What an order evicts does not depend on how many pages are asked for at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.core.content import Content
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.sim.eviction import order_maker
from kvarts.sim.traffic.trace import Trace

pytestmark = pytest.mark.laws

PROMPTS = [[*range(first, first + shared), *range(100 * first, 100 * first + rest)]
           for first in (1, 20) for shared, rest in ((4, 0), (4, 3), (2, 5), (6, 1))]  # fmt: skip
NUM_PAGES = 16


def used(cache: PageCache, prompt: list[int]) -> int:
    """Let a request use `prompt` and end; return the pages that it found."""
    content = Content.from_tokens(prompt, page_size=1, owner=0)
    match = cache.match(content, len(prompt))
    table = cache.open(match)
    cache.extend(table, len(prompt), is_end=True)
    cache.close(table, len(prompt), len(prompt))
    return match.num_pages


@pytest.mark.parametrize("name", ["lru", "queue_orders:S3FifoOrder", "queue_orders:ArcOrder", "auto"])
@given(uses=st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 5)), max_size=30))
def test_pages_are_evicted_at_once_as_one_by_one(name: str, uses: list[tuple[int, int]]) -> None:
    """L5: a leap takes the pages of many steps at once."""
    make = order_maker(name, Trace([]))
    at_once, by_one = (PageCache(CountPool(NUM_PAGES), PrefixTree(make())) for _ in range(2))
    for prompt, num_shed in uses:
        assert used(at_once, PROMPTS[prompt]) == used(by_one, PROMPTS[prompt])
        count = min(num_shed, at_once.num_cached)
        at_once.evict(count)
        for _ in range(count):
            by_one.evict(1)
