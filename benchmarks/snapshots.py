"""Hits of models with states: where snapshots are made, and which go first, on recorded traces.

    python benchmarks/snapshots.py DATA

DATA: a folder with mooncake/conversation_trace.jsonl, mooncake/synthetic_trace.jsonl and kv-cache-tester/. Printed is a
table in Markdown: the hits of requests that come one after the other, with snapshots at the ends of prompts and also
where prompts leave others (`--set snapshots`), evicted by LRU and by the order of Marconi
(docs/examples/published_orders.py) with a fixed weight; and the hits of whole pages, as if no layer had a state.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvarts.plan.cache import CachePlan, GroupHits
from kvarts.sim.config import ReplayConfig, make_config
from kvarts.traffic.editing import merged, spread
from kvarts.traffic.formats import load_trace
from kvarts.traffic.trace import Trace

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
MODELS = ("granite-4.0-h-tiny", "qwen3.5-27b")
PAGE_SIZES = {"conversation": 512, "synthetic": 512, "90 coding agents": 64}
"""The tokens of a hash id: the next turn has the ids of all full pages of a prompt, and another for the rest."""
GIB = 2**30
SIZES_GIB = (16, 64, 256)
ALPHAS = (0.5,)
MINUTE_NS = 60 * 10**9


def traces_of(folder: Path) -> dict[str, Trace]:
    agents = [load_trace(path) for path in sorted((folder / "kv-cache-tester").glob("trace_*.json"))]
    return {
        "conversation": load_trace(folder / "mooncake" / "conversation_trace.jsonl"),
        "synthetic": load_trace(folder / "mooncake" / "synthetic_trace.jsonl"),
        "90 coding agents": spread(merged(agents), 60 * MINUTE_NS),
    }


def marconi(config: ReplayConfig, alpha: float) -> Any:
    """Return the class of Marconi's order for a model, with a weight of savings."""
    from published_orders import MarconiOrder

    state_bytes = sum(group.part_bytes for group in config.groups if group.is_state)
    page_bytes = sum(group.part_bytes for group in config.groups if not group.is_state)
    tokens = state_bytes * config.page_size / page_bytes
    return type("Marconi", (MarconiOrder,), {"ALPHA": alpha, "STATE_TOKENS": tokens})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    columns = ["ends", "branches", *(f"branches, Marconi {alpha:g}" for alpha in ALPHAS), "without states"]
    print("| model | trace | memory | " + " | ".join(columns) + " |")
    print("|---" * (3 + len(columns)) + "|")
    for name, trace in traces_of(arguments.data).items():
        page_size = PAGE_SIZES[name]
        whole = CachePlan(trace, page_size)
        for model in MODELS:
            given = {"model": model, "device": "h200-141gb", "kv_groups": "all", "page_size": page_size}
            config = make_config(given)
            for size_gib in SIZES_GIB:
                num_pages = size_gib * GIB // config.memory.page_bytes
                branches = replace(config, snapshots="branches")
                tried = [config, branches, *(replace(branches, eviction=marconi(config, alpha)) for alpha in ALPHAS)]
                found = [GroupHits(trace, replace(each, num_pages=num_pages)).hit_ratio(num_pages) for each in tried]
                found.append(whole.curve.hit_pages(num_pages) * page_size / whole.num_prompt_tokens)
                cells = " | ".join(f"{ratio:.1%}" for ratio in found)
                print(f"| {model} | {name} | {size_gib} GiB | {cells} |", flush=True)


if __name__ == "__main__":
    main()
