"""Every eviction policy on every trace: how much of the gap from LRU to the optimum it closes, and a replay.

    python benchmarks/league.py DATA [--replays]

DATA: a folder with mooncake/conversation_trace.jsonl, mooncake/synthetic_trace.jsonl and kv-cache-tester/. What `auto`
chooses from was made on the first half of the conversation trace, on the synthetic one, and on every second session of
the coding agents, begun within 30 minutes. The others were looked at once, afterwards. `--replays`: with llama-3.1-8b
on an H100 as well, where requests wait for each other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvarts.plan.cache import CachePlan
from kvarts.plan.league import ALL_POLICIES, League
from kvarts.sim.config import make_config
from kvarts.traffic.editing import merged, sliced, spread
from kvarts.traffic.formats import load_trace
from kvarts.traffic.trace import Trace

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


def show(name: str, trace: Trace, page_size: int, sizes: tuple[int, ...]) -> CachePlan:
    plan = CachePlan(trace, page_size)
    rows = League(plan, ALL_POLICIES, command=lambda *_: "", replay_command=lambda *_: "").to_builtins(sizes)
    print(f"\n{name}: % of the gap closed", *(f"{size:>16,}" for size in sizes), sep="")
    points = [plan.point(size) for size in sizes]
    hits = "".join(f"{point['hit_ratio']:>8.1%}{point['optimum_hit_ratio']:>8.1%}" for point in points)
    print(f"{'hits of LRU, and of the optimum':<32}{hits}")
    for policy in ALL_POLICIES:
        closed = [row["gap_closed"] for row in rows if row["policy"] == policy]
        print(f"{policy:<32}" + "".join("       -" if gap is None else f"{100 * gap:>16.1f}" for gap in closed))
    sys.stdout.flush()
    return plan


def show_replays(name: str, plan: CachePlan) -> None:
    values = {"model": "llama-3.1-8b", "device": "h100-80gb", "slo": {"ttft_ms": 5000.0}, **REPLAYED[name]}
    config = make_config(values)
    league = League(plan, ALL_POLICIES, config=config, command=lambda *_: "", replay_command=lambda *_: "")
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
    conversation = load_trace(arguments.data / "mooncake" / "conversation_trace.jsonl")
    synthetic = load_trace(arguments.data / "mooncake" / "synthetic_trace.jsonl")
    folder = arguments.data / "kv-cache-tester"
    show("conversation, first half", sliced(conversation, count=HALF), 512, MOONCAKE_PAGES)
    show("agents, every second", agents(folder, 0, 2, 30), 64, AGENTS_PAGES[:3])
    show("conversation, second half", sliced(conversation, first=HALF), 512, MOONCAKE_PAGES)
    show("agents, the others", agents(folder, 1, 2, 30), 64, AGENTS_PAGES[:3])
    plans = {
        "synthetic": show("synthetic", synthetic, 512, MOONCAKE_PAGES),
        "conversation": show("conversation, all", conversation, 512, MOONCAKE_PAGES),
        "coding agents": show("agents, all 90 within an hour", agents(folder, 0, 1, 60), 64, AGENTS_PAGES),
    }
    if arguments.replays:
        for name, plan in plans.items():
            show_replays(name, plan)


if __name__ == "__main__":
    main()
