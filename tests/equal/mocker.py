"""Random traces through kvarts and NVIDIA Dynamo 1.6.1: every request must agree.

    PYTHONPATH=src:tests python -m equal.mocker --dynamo-python OTHER_VENV/bin/python --cases 2000

OTHER_VENV: an environment with `pip install ai-dynamo-runtime==1.6.1`; `.ci/run dynamo` makes one. Tiny pools and
shared prefixes, so that everything meets; open and closed loops, sessions, speed-ups, several workers behind round
robin. Prints the cases that differ, and exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kvarts import ReplayConfig, replay
from kvarts.sim.traffic.mooncake import load_mooncake

SCRIPT = Path(__file__).with_name("mocker_peer.py")
TOLERANCE_MS = 2e-3
COLUMNS = (
    *("arrival_ms", "input_tokens", "output_tokens", "first_admitted_ms", "first_token_ms", "last_token_ms"),
    *("cached_tokens", "admissions"),
)


def make_rows(rng: random.Random, block_size: int) -> list[dict[str, Any]]:
    """Return a trace of up to 40 requests whose prompts share blocks."""
    max_blocks, max_output = rng.randrange(1, 8), rng.choice([2, 10, 40])
    prefixes = [[rng.randrange(6) for _ in range(max_blocks)] for _ in range(3)]
    ids: dict[object, int] = {}
    rows: list[dict[str, Any]] = []
    timestamp = 0
    for index in range(rng.randrange(1, 40)):
        timestamp += rng.choice([0, 0, 5, 20, 100])
        length = rng.randrange(1, max_blocks * block_size + 1)
        prefix, num_shared = rng.choice(prefixes), rng.randrange(max_blocks + 1)
        tail = index if rng.random() < 0.5 else rng.randrange(3)
        blocks = [
            (place, prefix[place]) if place < num_shared else (place, "tail", tail)
            for place in range(-(-length // block_size))
        ]
        rows.append(
            {
                "timestamp": timestamp,
                "input_length": length,
                "output_length": rng.randrange(1, max_output + 1),
                "hash_ids": [ids.setdefault(block, len(ids)) for block in blocks],
            }
        )
    return rows


def add_sessions(rng: random.Random, rows: list[dict[str, Any]]) -> None:
    seen = set()
    for row in rows:
        session = row["session_id"] = str(rng.randrange(5))
        if session in seen:
            has = rng.choice(["delay", "timestamp", "both"])
            if has == "delay":
                del row["timestamp"]
            if has != "timestamp":
                row["delay"] = rng.choice([0, 3, 50, 400])
        seen.add(session)


def make_case(seed: int, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    block_size = rng.choice([4, 8])
    page_size = rng.choice([2, 4, block_size, 3 * block_size // 2])
    rows = make_rows(rng, block_size)
    most = max(-(-(row["input_length"] + row["output_length"]) // page_size) for row in rows)
    has_sessions = rng.random() < 0.4
    if has_sessions:
        add_sessions(rng, rows)
    trace = folder / f"{seed}.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    concurrency = rng.choice([None, None, 1, 3, 7])
    return {
        "seed": seed,
        "has_sessions": has_sessions,
        "trace": str(trace),
        "trace_block_size": block_size,
        "page_size": page_size,
        "pages": most + rng.choice([0, 1, 5, 30, 100]),
        "replicas": rng.choice([1, 1, 2, 3]),
        "max_batched_tokens": rng.choice([16, 64, 8192]),
        "max_seqs": rng.choice([2, 8, 16]),
        "concurrency": concurrency,
        "speedup": 1.0 if concurrency else rng.choice([1.0, 2.0]),
    }


def our_rows(case: dict[str, Any]) -> list[list[float]]:
    config = ReplayConfig(
        num_pages=case["pages"],
        page_size=case["page_size"],
        replicas=case["replicas"],
        max_num_batched_tokens=case["max_batched_tokens"],
        max_num_seqs=case["max_seqs"],
        concurrency=case["concurrency"],
        speedup=case["speedup"],
        profile="mocker",
    )
    requests = replay(
        load_mooncake(case["trace"], trace_block_size=case["trace_block_size"], session_turns="whole"), config
    ).requests
    return [list(map(float, row)) for row in zip(*(requests[name] for name in COLUMNS), strict=True)]


def agree(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    def in_order(rows: list[list[float]]) -> list[list[float]]:
        return sorted(rows, key=lambda row: [round(value, 2) for value in row])

    return len(ours) == len(theirs) and all(
        abs(a - b) <= TOLERANCE_MS
        for mine, peers in zip(in_order(ours), in_order(theirs), strict=True)
        for a, b in zip(mine, peers, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynamo-python", required=True, help="a Python in which dynamo._core can be imported")
    parser.add_argument("--cases", type=int, default=int(os.environ.get("KVARTS_EQUAL", "300")))
    parser.add_argument("--seed", type=int, default=0, help="cases of one seed are not those of another")
    args = parser.parse_args()
    kinds: Counter[str] = Counter()
    num_different = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [make_case(seed, folder) for seed in range(args.seed * args.cases, (args.seed + 1) * args.cases)]
        (folder / "cases.json").write_text(json.dumps(cases))
        command = [args.dynamo_python, str(SCRIPT), str(folder / "cases.json")]
        answers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for case, theirs in zip(cases, answers, strict=True):
            loop = "open loop" if case["concurrency"] is None else "closed loop"
            kinds[f"{loop}{', sessions' if case['has_sessions'] else ''}"] += 1
            if not agree(our_rows(case), theirs):
                num_different += 1
                print(f"differs: {case}")
    counts = "; ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
    print(f"{args.cases} cases of seed {args.seed} ({counts}), {num_different} differ from Dynamo 1.6.1")
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
