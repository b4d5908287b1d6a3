"""What the control plane of a host tier costs for one request of 128 pages, in microseconds.

    python benchmarks/offload_cost.py

Pages have ids on both sides, as with a real executor. Each operation is timed over many different requests that share
nothing; the median of rounds. The right column is vLLM's simple offload scheduler for the same work on a machine like
those this was developed on, as measured by others.
"""

from __future__ import annotations

import statistics
from time import perf_counter

from kvarts.core.content import Content
from kvarts.core.kv.eviction import LruOrder
from kvarts.core.kv.page_cache import PageCache
from kvarts.core.kv.pool import IdPool
from kvarts.core.kv.transfer import TransferReport
from kvarts.core.kv.tree import PrefixTree
from kvarts.core.tiers.config import OffloadConfig
from kvarts.core.tiers.opening import open_offloader

NUM_PAGES, PAGE_SIZE, NUM_REQUESTS, ROUNDS = 128, 16, 200, 7
VLLM_US = {"plan a store": 148, "complete it": 132, "look up": 121, "plan a load": 41, "complete the load": 38}


def one_round() -> dict[str, float]:
    num_device = NUM_PAGES * (NUM_REQUESTS + 2)
    cache = PageCache(IdPool(num_device), PrefixTree(LruOrder()))
    offloader = open_offloader(
        OffloadConfig(host_pages=NUM_PAGES * NUM_REQUESTS),
        cache,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=8192,
        with_page_ids=True,
    )
    spent = dict.fromkeys(VLLM_US, 0.0)
    contents = []
    for index in range(NUM_REQUESTS):
        first = index * NUM_PAGES * PAGE_SIZE
        tokens = range(first, first + NUM_PAGES * PAGE_SIZE)
        content = Content.from_tokens(tokens, page_size=PAGE_SIZE, owner=index)
        contents.append(content)
        table = cache.open(cache.match(content, NUM_PAGES))
        cache.grow(table, NUM_PAGES)
        cache.publish_pages(table, NUM_PAGES)
        start = perf_counter()
        offloader.confirm(content, NUM_PAGES, table)
        offloader.plan_stores(0)
        (transfer,) = offloader.take_planned()
        planned = perf_counter()
        offloader.report([TransferReport(transfer.transfer_id)], 0)
        spent["plan a store"] += planned - start
        spent["complete it"] += perf_counter() - planned
        cache.close(table, NUM_PAGES, NUM_PAGES)
    cache.take(cache.num_free)  # the device forgets all of them
    cache.pool.give(num_device, list(range(num_device)))  # type: ignore[arg-type]
    cache.num_free = num_device
    for index, content in enumerate(contents):
        start = perf_counter()
        offer = offloader.lookup(index, content, 0, NUM_PAGES - 1)
        looked_up = perf_counter()
        assert offer is not None
        assert offer.num_pages == NUM_PAGES - 1
        table = cache.open(cache.match(content, 0))
        cache.grow(table, NUM_PAGES)
        ready = perf_counter()
        offloader.start_load(index, content, 0, offer.num_pages, table)
        (transfer,) = offloader.take_planned()
        planned = perf_counter()
        offloader.report([TransferReport(transfer.transfer_id)], 0)
        offloader.take_loaded()
        spent["look up"] += looked_up - start
        spent["plan a load"] += planned - ready
        spent["complete the load"] += perf_counter() - planned
    return {name: seconds / NUM_REQUESTS * 1e6 for name, seconds in spent.items()}


def main() -> None:
    rounds = [one_round() for _ in range(ROUNDS)]
    print("| for 128 pages | us | vLLM us | times |\n|---|---:|---:|---:|")
    for name, vllm_us in VLLM_US.items():
        spent_us = statistics.median(round_[name] for round_ in rounds)
        print(f"| {name} | {spent_us:.1f} | {vllm_us} | {vllm_us / spent_us:.0f} |")


if __name__ == "__main__":
    main()
