"""What a page cache, its pools and a ledger refuse, and that a refusal changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvarts import ConfigError, KvartsError
from kvarts.core.content import Content
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool, IdPool, PageError
from kvarts.core.kv.tree import PrefixTree
from kvarts.policies import LruOrder


def content(*tokens: int, owner: int = 0) -> Content:
    return Content.from_tokens(list(tokens), page_size=1, owner=owner)


def state(cache: PageCache) -> tuple[Any, ...]:
    runs = [(each.owner, start, end, refs) for _, each, start, end, refs in cache.runs()]
    counts = cache.num_used, cache.num_cached, cache.num_free, cache.num_released, cache.num_evicted
    return (*counts, cache.pool.num_empty, cache.pool.num_taken, runs)


@pytest.mark.parametrize("kind", [CountPool, IdPool])
@pytest.mark.parametrize("total", [-1, 1.5, True, "4", math.nan, None, 2**63])
def test_a_pool_of_a_number_that_cannot_be_is_refused(kind: Callable[..., Any], total: Any) -> None:
    with pytest.raises(ConfigError):
        kind(total)


@pytest.mark.parametrize("kind", [CountPool, IdPool])
def test_what_cannot_be_is_refused_and_nothing_has_changed(kind: Callable[[int], Any]) -> None:
    cache = PageCache(kind(4), PrefixTree(LruOrder()))
    text, other = content(1, 2, 3), content(7, 8, owner=1)
    table = cache.open(cache.match(text, 3))
    cache.grow(table, 3)
    second = cache.open(cache.match(other, 2))
    cache.publish_pages(table, 2)
    calls: list[Callable[[], object]] = [
        lambda: cache.grow(second, 2),
        lambda: cache.grow(table, 10**9),
        lambda: cache.shrink(table, 1),
        lambda: cache.shrink(table, -1),
        lambda: cache.take(2),
        lambda: cache.take(-1),
        lambda: cache.close(table, 3, 2),
        lambda: cache.close(table, 4, 3),
        lambda: cache.close(table, 0, -5),
        lambda: cache.close(table, 3, 10**9),
        lambda: cache.pool.give(4, None),
        lambda: cache.pool.take(2),
        lambda: cache.pool.take(-1),
    ]
    before = state(cache)
    for call in calls:
        with pytest.raises(PageError):
            call()
        assert state(cache) == before
        cache.check([(table, 3), (second, 0)])
    cache.close(table, 3, 3)
    before = state(cache)
    for call in (
        lambda: cache.close(table, 3, 3),
        lambda: cache.grow(table, 4),
        lambda: cache.publish_pages(table, 3),
        lambda: cache.shrink(table, -1),
    ):
        with pytest.raises(PageError, match="closed"):
            call()
        assert state(cache) == before
    cache.close(second, 0, 0)
    cache.check([])
    assert issubclass(PageError, KvartsError)
