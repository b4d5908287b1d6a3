"""What to keep of windows: hits of three ways to count one model's KV in equal bytes, on recorded traces.

    python benchmarks/group_retention.py TRACE... --model gemma-3-27b --memory 320GB,1280GB --page-size 512

One request at a time, as in the curves of `kvarts plan`. *every layer*: all layers keep all tokens. *all*: layers with
windows give back what no later token sees, and it stays in the list, as in vLLM. *tails*: only what can be hit at the
ends of prompts and of whole requests stays. Full groups are first, so of one request they are evicted first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from kvarts.hardware.fit import local_kv_groups
from kvarts.hardware.kv_groups import KvLayer
from kvarts.hardware.model_config import load_geometry
from kvarts.kv.groups import GroupMemory, PartGroup, Retention
from kvarts.kv.run_cache import RunCache
from kvarts.kv.runs import RunHolding
from kvarts.traffic.mooncake import load_mooncake
from kvarts.traffic.trace import Trace
from kvarts.units import parse_bytes


def advance(cache: RunCache, holding: RunHolding, num_new: int, *, is_end: bool = False) -> None:
    """Compute the next tokens of a sequence."""
    cache.settle(holding, holding.num_tokens)
    if cache.missing_bytes(holding, num_new) > cache.free_bytes:
        raise SystemExit(f"{holding.num_tokens + num_new} tokens do not fit")
    cache.extend(holding, holding.num_tokens + num_new, is_end=is_end)


def hit_tokens(trace: Trace, cache: RunCache, step_tokens: int) -> tuple[int, int]:
    """Return the prompt tokens that were found, and all of them."""
    found = asked = 0
    page_size = cache.page_size
    for row in trace.requests or ():
        content = trace.content(row, page_size=page_size, owner=row.row)
        match = cache.match(content, (row.num_prompt_tokens - 1) // page_size)
        num_known = match.num_pages * page_size
        found, asked = found + num_known, asked + row.num_prompt_tokens
        holding = cache.begin(content, match)
        while holding.num_tokens < row.num_prompt_tokens:
            num_new = min(step_tokens, row.num_prompt_tokens - holding.num_tokens)
            is_end = holding.num_tokens + num_new == row.num_prompt_tokens
            advance(cache, holding, num_new, is_end=is_end)
        end = row.num_prompt_tokens + row.num_output_tokens - 1  # the last token is not computed
        while holding.num_tokens < end:
            num_new = min(page_size - holding.num_tokens % page_size, end - holding.num_tokens)
            advance(cache, holding, num_new)
        cache.close(holding, holding.num_tokens // page_size)
    return found, asked


def main() -> None:
    """Print a table: a row for each trace and memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--model", default="gemma-3-27b")
    parser.add_argument("--memory", default="160GB,320GB,1280GB")
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--step-tokens", type=int, default=8192)
    args = parser.parse_args()
    geometry = load_geometry(args.model)
    local = local_kv_groups(geometry, page_size=args.page_size)
    groups = [PartGroup(group.layer, group.page_bytes) for group in local if group.page_bytes]
    groups.sort(key=lambda group: group.layer.kind != "full")
    every = [PartGroup(KvLayer(kind="full", num_heads=1, head_numbers=1), sum(group.part_bytes for group in groups))]
    ways: list[tuple[str, list[PartGroup], Retention]] = [
        ("every layer", every, "all"),
        ("all", groups, "all"),
        ("tails", groups, "tails"),
    ]
    print(f"{args.model}, pages of {args.page_size} tokens, steps of {args.step_tokens}; prompt tokens that were found")
    for path in args.traces:
        trace = load_mooncake(path)
        for memory in args.memory.split(","):
            shares = []
            start = time.perf_counter()
            for name, of_way, keeps in ways:
                parts = GroupMemory(tuple(of_way), keeps)
                cache = RunCache(parts, page_size=args.page_size, total_bytes=parse_bytes(memory))
                found, asked = hit_tokens(trace, cache, args.step_tokens)
                shares.append(f"{name} {100 * found / asked:.2f} %")
            took = time.perf_counter() - start
            print(f"{path.name} {memory:>6}: {', '.join(shares)} ({took:.1f} s)")


if __name__ == "__main__":
    main()
