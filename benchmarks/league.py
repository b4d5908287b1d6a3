"""Every eviction policy on every trace: how much of the gap from LRU to the optimum it closes, and a replay.

    python benchmarks/league.py DATA [--replays]

DATA: a folder with mooncake/conversation_trace.jsonl, mooncake/synthetic_trace.jsonl and kv-cache-tester/. Printed is a
table in Markdown, one row per trace and pool. Besides the policies of kvarts it has those of
docs/examples, and one that looks ahead: LRU that evicts first what is never requested again. What
`auto` chooses from was made on the first half of the conversation trace, the synthetic one and every second session of
the coding agents, begun within 30 minutes; the other rows are of traces that it was not made on. `--replays`: with
llama-3.1-8b on an H100 as well, where requests wait for each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kvarts.core.kv.eviction import EvictionOrder, Run
from kvarts.plan.cache import CachePlan, serial_hits
from kvarts.plan.league import League
from kvarts.sim.config import make_config
from kvarts.sim.eviction import ALL_POLICIES, order_maker
from kvarts.sim.orders import Rank, RankedOrder
from kvarts.sim.traffic.editing import merged, sliced, spread
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SHOWN = ("auto", "session-aware")
PUBLISHED = {
    "S3-FIFO": "queue_orders:S3FifoOrder",
    "ARC": "queue_orders:ArcOrder",
    "LPC": "published_orders:LpcOrder",
    "SAECache": "published_orders:SaeOrder",
    "workload-aware": "published_orders:WorkloadAwareOrder",
    "tail-optimised": "published_orders:TailOptimisedOrder",
    "TTL by tool": "published_orders:ToolTtlOrder",
    "W-TinyLFU": "queue_orders:TinyLfuOrder",
}
HALF = 6015
MINUTE_NS = 60 * 10**9
MOONCAKE_PAGES = (2000, 4000, 8000, 16000)
AGENTS_PAGES = (15_625, 31_250, 62_500, 125_000)
"""1, 2, 4 and 8 million tokens."""
REPLAYED = {
    "conversation": {"replicas": 4, "router": "prefix", "page_size": 512},
    "synthetic": {"replicas": 2, "router": "prefix", "page_size": 512},
    "coding agents": {"replicas": 4, "router": "prefix", "page_size": 64},
}


def agents(folder: Path, first: int, step: int, minutes: int) -> Trace:
    paths = sorted(folder.glob("trace_*.json"))[first::step]
    return spread(merged([load_trace(path) for path in paths]), minutes * MINUTE_NS)


class KnowsReturns(RankedOrder):
    """LRU, but runs whose pages no later request has are evicted first. `depths`: of each release, the pages before."""

    def __init__(self, depths: list[int]) -> None:
        super().__init__()
        self._depths = depths

    def rank(self, node: Run, hits: int, born: int) -> Rank:
        return (node.start < self._depths[self.now - 1], self.now)


def depths_that_return(plan: CachePlan) -> list[int]:
    """Return, for each request with a full page, how many of its first pages a later request has."""
    depths, seen = [], set[int]()
    trace = plan.trace
    for owner, request in reversed(list(enumerate(trace))):
        content = trace.content(request, page_size=plan.page_size, owner=owner)
        computed = (request.num_prompt_tokens + request.num_output_tokens - 1) // plan.page_size
        num_pages = min(content.num_known_pages, computed)
        names, name = [], hash(content.salt)
        for page in range(num_pages):
            name = hash((name, content.key(page)))
            names.append(name)
        if names:
            depths.append(sum(each in seen for each in names))
        seen.update(names)
    return depths[::-1]


def orders_of(plan: CachePlan) -> dict[str, Callable[[], EvictionOrder]]:
    depths = depths_that_return(plan)
    return {
        **{name: order_maker(name, plan.trace) for name in SHOWN},
        **{name: order_maker(order, None) for name, order in PUBLISHED.items()},
        "knows what returns": lambda: KnowsReturns(depths),
    }


def show(name: str, trace: Trace, page_size: int, sizes: tuple[int, ...]) -> CachePlan:
    plan = CachePlan(trace, page_size)
    orders = orders_of(plan)
    for size in sizes:
        lru, most = plan.curve.hit_pages(size), plan.optimum.hit_pages(size)
        cells = []
        for make in orders.values():
            hits = serial_hits(trace, page_size, size, make)
            cells.append(f"{100 * (hits - lru) / (most - lru):.0f}" if most > lru else "-")
        ratios = (f"{100 * hits * page_size / plan.num_prompt_tokens:.1f} %" for hits in (lru, most))
        print("|", " | ".join([name, f"{size:,}", *ratios, *cells]), "|", flush=True)
        name = ""
    return plan


def show_replays(name: str, plan: CachePlan) -> None:
    values = {"model": "llama-3.1-8b", "device": "h100-80gb", "slo": {"ttft_ms": 5000.0}, **REPLAYED[name]}
    config = make_config(values)
    league = League(
        plan, (*ALL_POLICIES, PUBLISHED["ARC"]), config=config, command=lambda *_: "", replay_command=lambda *_: ""
    )
    print(f"\n{name}, replayed: {values}")
    print(f"{'':<18}{'hits':>8}{'TTFT mean, ms':>16}{'p99, ms':>12}{'goodput, 1/s':>14}")
    for row in league.to_builtins([config.num_pages]):
        if "replayed" not in row:
            continue
        ttft = row["ttft_ms"]
        print(
            f"{row['policy']:<18}{row['hit_ratio']:>8.1%}{ttft['mean']:>16,.0f}{ttft['p99']:>12,.0f}"
            f"{row['goodput_per_s']:>14.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--replays", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    conversation = load_trace(arguments.data / "mooncake" / "conversation_trace.jsonl")
    synthetic = load_trace(arguments.data / "mooncake" / "synthetic_trace.jsonl")
    folder = arguments.data / "kv-cache-tester"
    bundled = spread(load_trace("sample:agents"), 30 * MINUTE_NS)
    names = ("trace", "pages", "LRU finds", "the optimum", *SHOWN, *PUBLISHED, "knows what returns")
    print("|", " | ".join(names), "|")
    print("|" + "---|" * len(names))
    show("conversation, first half", sliced(conversation, count=HALF), 512, MOONCAKE_PAGES)
    show("conversation, second half", sliced(conversation, first=HALF), 512, MOONCAKE_PAGES)
    plans = {"synthetic": show("synthetic", synthetic, 512, MOONCAKE_PAGES)}
    show("45 coding agents", agents(folder, 0, 2, 30), 64, AGENTS_PAGES[:3])
    show("45 other coding agents", agents(folder, 1, 2, 30), 64, AGENTS_PAGES[:3])
    plans["coding agents"] = show("all 90, within an hour", agents(folder, 0, 1, 60), 64, AGENTS_PAGES)
    show("12 bundled agents", bundled, 64, (3_000, 5_000, 8_000))
    if arguments.replays:
        plans["conversation"] = CachePlan(conversation, 512)
        for name, plan in plans.items():
            show_replays(name, plan)


if __name__ == "__main__":
    main()
