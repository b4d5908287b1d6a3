"""The worked examples at the heads of files are true: the numbers that they draw, computed by the files."""

from __future__ import annotations

from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import CountPool
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.index import NodeState, TierIndex
from kvarts.core.tiers.opening import open_offloader
from kvarts.core.tiers.safe_first import STORED, SafeFirst

NS_PER_MS = 1_000_000

SMALL_STEPS = EngineConfig(page_size=1, max_num_batched_tokens=8, max_num_seqs=8)


def content_of(*tokens: int, owner: int = 0) -> Content:
    return Content.from_tokens(tokens, page_size=1, owner=owner)


def leave(cache: PageCache, content: Content) -> None:
    """Compute a prompt whose request is then gone."""
    num_pages = content.num_known_tokens
    table = cache.open(cache.match(content, num_pages))
    cache.grow(table, num_pages)
    cache.close(table, num_pages, num_pages)


def test_the_index_of_a_tier() -> None:
    index = TierIndex(4, with_slots=False)

    def store(content: Content, start: int, end: int) -> None:
        placement = index.place(content, start, end)
        assert placement is not None
        index.settle(placement, is_stored=True)

    def order() -> list[int]:
        """Pages by their tokens, the next to be evicted first."""
        return [token for run in index.recency() for token in reversed(run.content.tokens(run.start, run.end))]

    a, b, c = content_of(0, 1, 2), content_of(0, 1, 12), content_of(20, 21)
    store(a, 0, 3)
    store(b, 2, 3)
    assert order() == [2, 12, 1, 0]
    store(c, 1, 2)
    assert order() == [12, 1, 0, 21]
    assert [(run.start, run.end) for run in index.runs() if run.state is NodeState.HOLE] == [(0, 1)]
    assert (index.find(c, 0, 2), index.find(c, 1, 2)) == (0, 1)


def evictions(safe_first: SafeFirst | None) -> list[tuple[int, int]]:
    """Return the owner and the page of each eviction."""
    events: list[Event] = []
    tree = PrefixTree(safe_first or LruOrder(), events.append, watcher=safe_first)
    cache = PageCache(CountPool(5), tree)
    a, b = content_of(0, 1, 2), content_of(10, 11, owner=1)
    leave(cache, a)
    leave(cache, b)
    if safe_first is not None:
        for content, start, end in ((a, 1, 2), (b, 0, 2)):
            path = tree.cut(tree.match(content, content.num_known_tokens))
            safe_first.mark(tree.isolate(path, start, end), STORED)
            safe_first.regroup()
        assert safe_first.num_safe == 2
    for _ in range(3):
        cache.take(1)
    if safe_first is not None:
        assert safe_first.num_safe == 1, "a1 is safe when a2 is evicted"
    cache.take(2)
    return [
        (event.content.owner, page)
        for event in events
        if isinstance(event, PagesRemoved)
        for page in range(event.end_page - 1, event.start_page - 1, -1)
    ]


def test_safe_first() -> None:
    assert evictions(SafeFirst()) == [(1, 1), (1, 0), (0, 2), (0, 1), (0, 0)]
    assert evictions(None) == [(0, 2), (0, 1), (0, 0), (1, 1), (1, 0)]


def test_the_offloader() -> None:
    cache = PageCache(CountPool(3), PrefixTree(LruOrder()))
    config = OffloadConfig(host_pages=4, kv_bytes_per_token=1000, d2h=1_000_000, h2d=2_000_000, latency_us=0.0)
    offloader = open_offloader(config, cache, SMALL_STEPS)
    prompt = content_of(0, 1, 2)
    table = cache.open(cache.match(prompt, 3))
    cache.grow(table, 3)
    cache.publish(table, 3)
    offloader.confirm(prompt, 3, table)
    cache.close(table, 3, 3)
    assert cache.num_used == 0
    offloader.begin_step(1 * NS_PER_MS)
    offloader.plan_stores(1 * NS_PER_MS)
    assert (offloader.next_ns, cache.num_used, offloader.num_pages()) == (4 * NS_PER_MS, 3, (3, 0))
    offloader.advance_to(4 * NS_PER_MS)
    assert (cache.num_used, cache.num_cached, offloader.num_pages()) == (0, 3, (0, 3))
    leave(cache, content_of(7, 8, 9, owner=1))
    assert cache.match(prompt, 3).num_pages == 0
    offloader.begin_step(10 * NS_PER_MS)
    offer = offloader.lookup(1, prompt, 0, 3)
    assert offer is not None
    assert (offer.num_pages, offloader.num_pages()) == (3, (3, 0))
    found = cache.match(prompt, 3)
    loading = cache.incoming.open_to_load(found, 3, found)
    assert offloader.start_load(1, prompt, 0, 3, loading) == 11_500_000
    offloader.advance_to(11_500_000)
    (loaded,) = offloader.take_loaded()
    assert (loaded.num_pages, offloader.num_pages()) == (3, (0, 3))
