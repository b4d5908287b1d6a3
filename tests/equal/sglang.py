"""Law L17: kvarts' engine `sglang` and SGLang's own scheduler, step by step on random loads: do they decide the same?

    PYTHONPATH=src:tests:SGLANG VENV/bin/python -m equal.sglang --loads 1000

SGLANG, VENV: `pip install --no-deps --target SGLANG sglang==0.5.23 orjson pybase64`, and an environment with torch,
transformers and kvarts' dependencies; `.ci/run sglang` makes both. No model runs. Compared after every step: prefill or
decode, the tokens of each request, the tokens that admissions hit, retractions in order, requests that ended or were
aborted, free and evictable tokens, the length of the queue, KV events in the row of these. `--naive` compares the
restatement in tests/oracles/naive_sglang.py instead of kvarts. Prints the loads that differ, and exits with 1 if there
are any.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from oracles.naive_sglang import Asked, SglangLoad, SglangStep, naive_steps

ROWS = {
    "fcfs": "requests that generate what they ask for, first come first served",
    "ratio": "requests that may end before, so that running ones promise a part of what they ask for",
    "lpm": "the longest prefix first",
    "dfs-weight": "depth first in the tree",
    "priority": "priority scheduling, with and without preemption",
    "eviction": "the radix cache evicts by lfu, slru, tlru or priority",
    "receive": "requests are received after some steps of decodes only",
    "events": "KV events as SGLang's own code publishes them, of tenants with salts",
    "host": "host memory below the tree, written through, written through selectively, or written back",
    "storage": "storage below host memory, with the three policies of prefetches",
    "windows": "a model some of whose layers have sliding windows, whose KV has a pool of its own",
    "states": "a model with states in slots, with the buffers of the overlap schedule, with one, and without any",
}
"""What is compared, and what is special about it."""
RECORDED = Path(__file__).with_name("sglang_steps.json")
"""Steps of SGLang on a few loads, for tests without it."""
NUM_LOADS = int(os.environ.get("KVARTS_EQUAL", "160"))

Steps = Callable[[SglangLoad], Iterator[SglangStep]]


def draw_load(row: str, seed: int) -> SglangLoad:
    """Return a random load of a row: shared prefixes, small pools, requests that go on from others."""
    draw = random.Random(f"{row} {seed}")
    page_size = draw.choice([1, 1, 4, 16, 64])
    unit = max(4, page_size)
    vocabulary = draw.choice([2, 3, 50])

    def some(most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(1, most))]

    stems = [some(24 * unit) for _ in range(draw.randint(3, 9) if row == "storage" else draw.randint(1, 5))]
    most_prompt, most_output = draw.choice([2, 8, 20]) * unit, draw.choice([1, 2, 12, 60, 200])
    asks: list[Asked] = []
    step = 0
    for _ in range(draw.randint(3, 50)):
        step += draw.choice([0, 0, 0, 1, 4, 4, 40])
        stem = draw.choice(stems)
        prompt = stem[: draw.randint(0, len(stem))] + some(most_prompt)
        if asks and draw.random() < (0.6 if row in ("host", "storage") else 0.3):
            before = draw.choice(asks)
            known = before.prompt + before.output
            prompt = known[: draw.randint(1, len(known))] + some(unit)
        asks.append(Asked(step, prompt[: 40 * unit], some(most_output)))
    most = max(-(-(len(ask.prompt) + len(ask.output)) // page_size) + 3 for ask in asks)
    size = (most + draw.choice([0, 1, 3, 8, 20, 60, 200, 1000])) * page_size
    load = SglangLoad(
        page_size=page_size,
        size=size,
        chunk=page_size * draw.choice([1, 2, 4, 16, 64, 512]) if page_size > 1 else draw.choice([7, 16, 64, 512, 8192]),
        max_running=draw.choice([1, 2, 4, 8, 32]),
        asks=asks,
        overlap=draw.random() < 0.5,
    )
    if draw.random() < 0.2:
        load.max_prefill = draw.choice([1, 16, 100])
    if row == "ratio":
        load.ignore_eos = False
        load.conservativeness = draw.choice([1.0, 1.0, 0.3, 0.1, 1.3])
    if row in ("lpm", "dfs-weight"):
        load.policy = row
    if row == "priority":
        load.priorities, load.lower_first = True, draw.random() < 0.3
        load.preempts, load.threshold = draw.random() < 0.8, draw.choice([10, 10, 0, 3])
        load.max_running = draw.choice([1, 2, 4, 8])
        load.ignore_eos = draw.random() < 0.5
        if not load.ignore_eos:
            load.conservativeness = draw.choice([1.0, 0.3, 0.1])
        load.retraction = draw.choice(["length", "priority"])
        for ask in asks:
            ask.priority = draw.choice([0, 0, 5, 20, 100, -30])
    if row == "receive":
        load.recv_interval, load.ignore_eos = draw.choice([2, 3, 8, 30, 100, 1001]), draw.random() < 0.5
        if not load.ignore_eos:
            load.conservativeness = draw.choice([1.0, 0.3, 0.1])
    if row == "events":
        load.has_events, load.ignore_eos = True, draw.random() < 0.5
        if not load.ignore_eos:
            load.conservativeness = draw.choice([1.0, 0.3, 0.1])
        load.eviction = draw.choice(["lru", "lru", "lfu", "slru"])
        salts: list[str | None] = draw.choice([[None], [None, "a"], ["a", "b"]])
        for ask in asks:
            ask.salt = draw.choice(salts)
    if row in ("host", "storage"):
        load.host_ratio = draw.choice([0.3, 0.5, 0.7, 1.0, 2.0] if row == "host" else [0.1, 0.2, 0.3, 0.5, 1.0])
        policies = ["write_through", "write_through_selective", "write_back"]
        load.write_policy = draw.choice(policies if row == "host" else policies[:2])
        load.size = (most + draw.choice([0, 1, 3, 8, 20, 60] if row == "host" else [0, 0, 1, 3, 8, 20])) * page_size
        load.ignore_eos = draw.random() < 0.5
        if not load.ignore_eos:
            load.conservativeness = draw.choice([1.0, 0.3, 0.1])
        load.policy = draw.choice(["fcfs", "fcfs", "lpm"])
        load.d2h_steps, load.h2d_steps = draw.choice([0, 1, 1, 2, 3, 9]), draw.choice([0, 1, 1, 2])
        load.has_events = draw.random() < 0.5
    if row == "storage":
        load.prefetch_policy = draw.choice(["best_effort", "wait_complete", "timeout"])
        load.storage_config = {"prefetch_threshold": draw.choice([1, 1, 4, 2 * unit, 8 * unit])}
        if load.prefetch_policy == "timeout":
            load.storage_config["prefetch_timeout_base"] = draw.choice([0, 0.001, 0.004, 0.02])
            load.storage_config["prefetch_timeout_per_ki_token"] = draw.choice([0, 0.05, 0.25])
        load.retry_interval, load.max_retries = draw.choice([8, 8, 1, 3, 0]), draw.choice([8, 8, 2, 0])
        load.query_steps, load.read_steps = draw.choice([0, 1, 1, 3, 12]), draw.choice([0, 1, 1, 2, 5])
        load.write_steps, load.batch_pages = draw.choice([0, 1, 1, 2, 5]), draw.choice([128, 128, 2, 7])
        share = draw.choice([0.0, 0.2, 0.8])
        load.stored = [index for index in range(len(asks)) if draw.random() < share]
    if row == "windows":
        draw_windows(load, draw)
    if row == "states":
        draw_states(load, draw)
    if row == "eviction":
        load.eviction = draw.choice(["lfu", "slru", "tlru", "priority"])
        load.policy = draw.choice(["fcfs", "fcfs", "lpm", "dfs-weight"])
        if load.eviction == "slru" and draw.random() < 0.5:
            load.eviction_config = {"protected_threshold": draw.choice([1, 3, 5])}
        if load.eviction == "tlru":
            estimate = draw.choice([0, 0, unit])
            load.eviction_config = {
                "threshold": estimate + draw.randint(1, 20 * unit),
                "next_prompt_estimate": estimate,
            }
        for ask in asks:
            ask.priority = draw.choice([0, 0, 1, 5, -3])
    return load


def draw_windows(load: SglangLoad, draw: random.Random) -> None:
    """Give a load layers with sliding windows, and a small pool for these."""
    page_size = load.page_size
    load.window = draw.choice([1, 3, 15, 31, 127, page_size, 2 * page_size - 1])
    load.ignore_eos = draw.random() < 0.5
    if not load.ignore_eos:
        load.conservativeness = draw.choice([1.0, 0.3, 0.1])
    load.policy = draw.choice(["fcfs", "fcfs", "lpm", "dfs-weight"])
    load.has_events = draw.random() < 0.5
    for ask in load.asks:
        if draw.random() < 0.1:
            ask.output = [draw.randrange(3) for _ in range(draw.randint(100, 500))]
    most = max(len(ask.prompt) + len(ask.output) for ask in load.asks) + 3 * page_size
    load.size = max(load.size, -(-most // page_size) * page_size)
    least = 3 * -(-load.window // page_size) + 2 * -(-128 // page_size) + 6
    if draw.random() < 0.8:  # else SGLang may never go on, as what a prompt finds leaves too little for a chunk
        least += min(load.chunk, most) // page_size
    load.size = max(load.size, least * page_size)
    num_pages = int(load.size // page_size * draw.choice([0.1, 0.3, 0.5, 0.8, 1.0]))
    load.window_ratio = min(1.0, (max(num_pages, least) + 0.5) * page_size / load.size)


def draw_states(load: SglangLoad, draw: random.Random) -> None:
    """Give a load a model with states, and slots for these."""
    load.buffers = load.page_size > 1 or load.overlap or draw.random() < 0.3
    load.ignore_eos = draw.random() < 0.5
    if not load.ignore_eos:
        load.conservativeness = draw.choice([1.0, 0.3, 0.1])
    load.policy = draw.choice(["fcfs", "fcfs", "lpm", "dfs-weight"])
    load.has_events = draw.random() < 0.5
    load.state_chunk = draw.choice([1, 2, 8, 64])
    load.track_interval = load.page_size * draw.choice([1, 3, 16, 256])
    if draw.random() < 0.5:
        most = max(-(-(len(ask.prompt) + len(ask.output)) // load.page_size) + 3 for ask in load.asks)
        load.size = min(load.size, (most + draw.choice([0, 1, 3, 8])) * load.page_size)
    num_each = 3 + (2 if load.overlap else 1) * load.buffers
    load.slots = num_each * load.max_running + draw.choice([0, 0, 1, 2, 5, 20, 100])


def first_of(load: SglangLoad, count: int) -> SglangLoad:
    """Return a load with its first requests only."""
    stored = [index for index in load.stored if index < count]
    return msgspec.structs.replace(load, asks=load.asks[:count], stored=stored)


class AskOfTrace:
    """A request of a trace whose hashes name blocks of tokens. Nobody else has the tokens of its answer."""

    priority = 0
    salt = None

    def __init__(self, index: int, row: dict[str, Any], step: int, block: int) -> None:
        self.step = step
        self.output = array(
            "q", range((1 << 39) - (index + 1) * 10**5, (1 << 39) - index * 10**5)[: row["output_length"]]
        )
        self._blocks, self._length, self._block = row["hash_ids"], row["input_length"], block

    @property
    def prompt(self) -> array[int]:
        """Its tokens, made when they are asked for: those of all prompts at once would not fit."""
        block = self._block
        tokens = array("q", (token for each in self._blocks for token in range(each * block, (each + 1) * block)))
        return tokens[: self._length]


def load_of_trace(path: Path, page_size: int, size: int, step_ms: float, block: int) -> SglangLoad:
    """Return the requests of a Mooncake trace, in steps of so many milliseconds."""
    rows = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    asks = [AskOfTrace(index, row, int(row["timestamp"] / step_ms), block) for index, row in enumerate(rows)]
    return SglangLoad(
        page_size=page_size,
        size=size,
        chunk=8192,
        max_running=256,
        asks=asks,  # type: ignore[arg-type]
    )


def first_difference(
    load: SglangLoad, ours: Steps, theirs: Steps, counts: Counter[str]
) -> tuple[int, SglangStep | None, SglangStep | None] | None:
    """Return the number of the first step that differs, and what both did in it; None if all are equal.

    A load ends where SGLang aborts the only running request, which kvarts retracts, where it never goes on, and where
    it loses the rest of a prompt.
    """
    for number, (mine, peers) in enumerate(zip_longest(ours(load), theirs(load))):
        if mine != peers:
            if mine and peers and peers.aborted and mine.retracted == [*peers.retracted, *peers.aborted]:
                counts["loads up to an abort"] += 1
                return None
            if mine and peers and peers.fails:
                counts["loads up to a failure"] += 1
                return None
            return number, mine, peers
        counts["steps"] += 1
        counts["retractions"] += len(mine.retracted)
        counts["tokens hit"] += sum(mine.admitted.values())
        counts["requests"] += len(mine.ended)
        if mine.fails:
            counts["loads up to a failure"] += 1
            return None
        if mine.loaded:
            counts["tokens loaded"] += sum(mine.loaded.values())
            counts["loads"] += len(mine.loaded)
            counts["tokens fetched"] += sum(mine.fetched.values())
        if mine.events:
            counts["events"] += len(mine.events)
    return None


def shrunk(load: SglangLoad, ours: Steps, theirs: Steps) -> SglangLoad:
    """Return a load with fewer requests that differs as well."""
    size = len(load.asks)
    while size:
        for start in range(0, len(load.asks), size):
            kept = [index for index in load.stored if not start <= index < start + size]
            stored = [index - size * (index >= start) for index in kept]
            smaller = msgspec.structs.replace(load, asks=load.asks[:start] + load.asks[start + size :], stored=stored)
            if smaller.asks and first_difference(smaller, ours, theirs, Counter()) is not None:
                load = smaller
                break
        else:
            size //= 2
    return load


def describe(load: SglangLoad, ours: Steps, theirs: Steps) -> str:
    """Return a load and where it differs, in words and numbers."""
    found = first_difference(load, ours, theirs, Counter())
    assert found is not None
    number, mine, peers = found
    lines = [f"  {msgspec.structs.replace(load, asks=[])}"]
    lines += [
        f"  {index}: step {ask.step}, prompt {len(ask.prompt)}, output {len(ask.output)}"
        for index, ask in enumerate(load.asks)
    ]
    return "\n".join([*lines, f"  step {number}", f"  ours   {mine}", f"  SGLang {peers}"])


def record(theirs: Steps) -> None:
    """Write the steps of SGLang on a few small loads to RECORDED; half of them have retractions."""
    cases = []
    for row in ROWS:
        loads: list[SglangLoad] = []
        for seed in range(1000):
            load = first_of(draw_load(row, seed), 12)
            steps = list(naive_steps(load))
            is_wanted = row not in ("ratio", "lpm", "priority") or any(step.retracted for step in steps)
            if row == "windows":
                is_wanted = any(step.retracted for step in steps) or load.has_events
            if row == "states":  # with and without buffers, each with and without events
                wanted = bool(len(loads) % 2), len(loads) < 2
                is_wanted = (load.has_events, load.buffers) == wanted and load.state_chunk < 64 and load.slots < 30
            if row == "host":
                is_wanted = any(step.loaded for step in steps)
            if row == "storage":
                is_wanted = any(step.fetched for step in steps)
            if is_wanted and len(steps) < 200 and any(step.admitted and step.waiting for step in steps):
                loads.append(load)
            if len(loads) == 4:
                break
        cases += [{"load": load, "steps": list(theirs(load))} for load in loads]
    RECORDED.write_bytes(msgspec.json.encode(cases) + b"\n")


def compare_trace(load: SglangLoad, theirs: Steps) -> int:
    """Compare kvarts on a long load, without laws; return 1 if any step differs."""
    from equal.sglang_ours import kvarts_steps

    counts: Counter[str] = Counter()
    found = first_difference(load, partial(kvarts_steps, audit=None), theirs, counts)
    print("equal" if found is None else f"step {found[0]}:\n  ours   {found[1]}\n  SGLang {found[2]}")
    print(", ".join(f"{number:,} {name}" for name, number in counts.items()))
    return int(found is not None)


def main() -> int:
    """Run the command line; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS, action="append", help="kinds of loads; all without")
    parser.add_argument("--loads", type=int, default=NUM_LOADS, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="loads of one seed are not those of another")
    parser.add_argument("--most-shown", type=int, default=3, help="differences that are shrunk and printed, per row")
    parser.add_argument("--naive", action="store_true", help="the restatement instead of kvarts")
    parser.add_argument("--trace", type=Path, help="a Mooncake trace in place of random loads")
    parser.add_argument("--page-size", type=int, default=1, help="of the trace")
    parser.add_argument("--tokens", type=int, default=400_000, help="of memory, for the trace")
    parser.add_argument("--step-ms", type=float, default=20.0, help="the time of a step, for the arrivals of the trace")
    parser.add_argument("--record", action="store_true", help="write the recorded steps again")
    args = parser.parse_args()
    from equal.sglang_peer import sglang_steps

    if args.record:
        record(sglang_steps)
        return 0
    ours: Steps = naive_steps
    if not args.naive:
        from equal.sglang_ours import kvarts_steps

        ours = kvarts_steps
    if args.trace is not None:
        return compare_trace(load_of_trace(args.trace, args.page_size, args.tokens, args.step_ms, 512), sglang_steps)
    rows = args.row or list(ROWS)
    num_each = -(-args.loads // len(rows))
    num_all = 0
    for row in rows:
        counts: Counter[str] = Counter()
        num_differing = 0
        began = time.monotonic()
        for seed in range(args.seed * num_each, (args.seed + 1) * num_each):
            load = draw_load(row, seed)
            if args.naive:  # the restatement has no events
                load.has_events = False
            if first_difference(load, ours, sglang_steps, counts) is None:
                continue
            num_differing += 1
            if num_differing <= args.most_shown:
                print(f"{row}, seed {seed}:\n{describe(shrunk(load, ours, sglang_steps), ours, sglang_steps)}")
        listed = ", ".join(f"{number:,} {name}" for name, number in counts.items())
        seconds = time.monotonic() - began
        print(f"{row} ({ROWS[row]}): {num_each:,} loads, {num_differing} differ; {listed}; {seconds:.0f} s", flush=True)
        num_all += num_differing
    return 1 if num_all else 0


if __name__ == "__main__":
    sys.exit(main())
