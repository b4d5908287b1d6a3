"""What all sizes at once cost, beside one simulation a size: whole processes, in turns, in one run.

    python benchmarks/plan_cost.py TRACE [--libcachesim PYTHON] [--lmcache PYTHON] [--latency] [--million] [--sweep]

TRACE: Mooncake's conversation_trace.jsonl. PYTHON: an interpreter with libcachesim, or with LMCache. The LRU of
libcachesim looks at one size, on the same hash ids as keys, and does not know prefixes; LMCache's sweep is 30 runs of
its simulator in its fast mode, on the full blocks of each prompt. `--latency`: plans with replays, of the bundled
sample and of the trace. `--million`: the trace again and again. `--sweep`: 100 points on one worker and on two.

Times are those of whole processes, from start to end, and of the processors in brackets; of the peers, they are
without start and reading. The load of the machine is said at the beginning and the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fleet_cost import write_repeated
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.trace import spell
from processes import Cost, kvarts_command, median_of, run

RUNS = 5
PEER = """
import sys, time
import libcachesim as lcs
reader = lcs.TraceReader(trace=sys.argv[1], trace_type=lcs.TraceType.ORACLE_GENERAL_TRACE)
began = time.perf_counter()
cache = lcs.LRU(cache_size=int(sys.argv[2]))
miss_ratio, _ = cache.process_trace(reader)
print(time.perf_counter() - began, 1 - miss_ratio)
"""
LMCACHE = """
import json, sys, time
from lmcache.tools.cache_simulator.plot_hit_rate import capacity_range_bytes
from lmcache.tools.cache_simulator.simulator import simulate
events = [
    {"chunk_hashes": [str(each) for each in ids], "seq_len": tokens, "chunk_size": 512}
    for ids, tokens in json.load(open(sys.argv[1]))
]
page_bytes = 512 * 131072
began = time.perf_counter()
found = [simulate(events, size, page_bytes, fast=True) for size in capacity_range_bytes(0.5, 500, 30)]
print(len(found), time.perf_counter() - began)
"""
SWEEP = """
trace = "{trace}"
page_size = 512
cost = "linear:step_ms=5,chunk_token_ms=0.02,decode_ms=0.1,context_token_ms=0"
[grid]
pages = [{pages}]
speedup = [{rates}]
"""


def plan(trace: Path, page_size: int, *more: object) -> list[str]:
    return kvarts_command("plan", trace, "--page-size", page_size, "--json", *more)


def show(name: str, cost: Cost, base: Cost | None = None) -> None:
    ratio = "" if base is None else f"{cost.seconds / base.seconds:8.2f} times the first"
    print(f"{name:<44}{cost.seconds:8.2f} s ({cost.cpu_seconds:.2f} s){cost.mebibytes:8.0f} MiB{ratio}", flush=True)


def show_load() -> None:
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


def beside_a_peer(python: str, trace: Path, folder: Path, base: Cost) -> None:
    requests = folder / "requests.oracleGeneral"
    ids = np.frombuffer(b"".join(spell(row.units) for row in load_mooncake(trace)), np.uint64)
    keys = np.zeros(len(ids), np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]))
    keys["id"], keys["size"], keys["next"] = ids + np.uint64(1), 1, -2
    requests.write_bytes(keys.tobytes())
    script = folder / "peer.py"
    script.write_text(PEER)
    found = []
    for _ in range(RUNS):
        done = subprocess.run(
            [python, str(script), str(requests), "4000"], capture_output=True, text=True, check=True
        ).stdout.split()
        found.append((float(done[-2]), float(done[-1])))
    seconds, hits = sorted(found)[RUNS // 2]
    print(f"libcachesim LRU, one size, without its start {seconds:8.2f} s{hits:14.1%} of blocks")
    print(f"  40 sizes of it beside all sizes here: {40 * seconds / base.seconds:.1f} times")


def beside_lmcache(python: str, trace: Path, folder: Path, base: Cost) -> None:
    rows = [
        (np.frombuffer(spell(row.units), np.uint64)[: row.num_prompt_tokens // 512].tolist(), row.num_prompt_tokens)
        for row in load_mooncake(trace)
    ]
    events = folder / "events.json"
    events.write_text(json.dumps(rows))
    script = folder / "lmcache_sweep.py"
    script.write_text(LMCACHE)
    found = []
    for _ in range(3):
        done = subprocess.run([python, str(script), str(events)], capture_output=True, text=True, check=True)
        found.append(float(done.stdout.split()[-1]))
    seconds = sorted(found)[1]
    print(f"LMCache's sweep, 30 sizes, without its start {seconds:8.2f} s")
    print(f"  beside all sizes here: {seconds / base.seconds:.1f} times")


def latencies(trace: Path) -> None:
    slo = ("--slo-ttft-ms", 3000, "--slo-share", 0.9)
    show("the bundled sample, with its SLO", run(kvarts_command("plan", *slo, "--json")))
    on = ("--page-size", 512, "--model", "llama-3.1-8b", "--device", "h100-80gb", "--json")
    show("the trace, five latency points", run(kvarts_command("plan", trace, *on)))
    slo = ("--slo-ttft-ms", 5000, "--slo-share", 0.95)
    show("the trace, everything about an SLO", run(kvarts_command("plan", trace, *on, *slo)))


def sweeps(trace: Path, folder: Path) -> None:
    part = folder / "part.jsonl"
    part.write_text("".join(trace.read_text().splitlines(keepends=True)[:3000]))
    config = folder / "sweep.toml"
    pages = ", ".join(str(400 + 100 * step) for step in range(20))
    config.write_text(SWEEP.format(trace=part, pages=pages, rates="0.5, 0.75, 1.0, 1.5, 2.0"))
    taken = []
    for workers in (1, 2):
        out = folder / f"out{workers}"
        began = time.perf_counter()
        run(kvarts_command("sweep", config, "-o", out, "--workers", workers))
        taken.append(time.perf_counter() - began)
        print(f"sweep of 100 points, {workers} workers {taken[-1]:8.2f} s", flush=True)
    same = (folder / "out1" / "points.json").read_bytes() == (folder / "out2" / "points.json").read_bytes()
    print(f"  {taken[0] / taken[1]:.2f} times as fast on 2, tables {'equal' if same else 'DIFFER'}")
    if not same:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--libcachesim", metavar="PYTHON")
    parser.add_argument("--lmcache", metavar="PYTHON")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--million", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    show_load()
    commands = {f"all sizes, pages of {size}": plan(arguments.trace, size, "--at", 4000) for size in (512, 16)}
    commands["the same with eleven sizes of the optimum"] = plan(arguments.trace, 512)
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, command in commands.items():
            costs[name].append(run(command))
    medians = {name: median_of(found) for name, found in costs.items()}
    base = next(iter(medians.values()))
    for name, cost in medians.items():
        show(name, cost, base)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.libcachesim:
            beside_a_peer(arguments.libcachesim, arguments.trace, folder, base)
        if arguments.lmcache:
            beside_lmcache(arguments.lmcache, arguments.trace, folder, base)
        if arguments.latency:
            latencies(arguments.trace)
        if arguments.million:
            million = write_repeated(arguments.trace, folder / "million.jsonl", 1_000_000)
            show("a million requests, all sizes", run(plan(million, 512, "--at", 4000)))
            show("the same with the optimum at ten sizes", run(plan(million, 512)))
        if arguments.sweep:
            sweeps(arguments.trace, folder)
    show_load()


if __name__ == "__main__":
    main()
