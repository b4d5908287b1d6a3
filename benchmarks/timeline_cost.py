"""What a timeline costs: to record it, to write it, to judge it; and the journal and the page beside it.

    python benchmarks/timeline_cost.py TRACE [--repeat N] [--steps STEPS]

TRACE: Mooncake's conversation_trace.jsonl. Recording is measured in this process, with and without a record, in turns;
writing too; judging as a whole process. `--steps`: a file of so many steps for memory, ten million if left out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from kvarts import ReplayConfig, Trace, replay
from kvarts.proof.record.timeline import Timeline, timelines_of
from kvarts.sim.arrivals import Arrivals
from kvarts.sim.driver import Driver
from kvarts.sim.replay import open_replica
from kvarts.sim.report.requests import RequestLog
from kvarts.sim.report.steps import StepLog
from kvarts.sim.router import RoundRobin
from kvarts.sim.traffic.mooncake import load_mooncake
from kvarts.sim.traffic.source import OpenLoop
from processes import Cost, kvarts_command, median_of, run

CONFIG = ReplayConfig(profile="mocker", num_pages=16_384 * 32, page_size=16)


def timed(work: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds


def run_engine(trace: Trace, log: StepLog | None) -> None:
    replica = open_replica(CONFIG, [] if log is None else [log])
    Driver(
        [Arrivals(trace, OpenLoop(trace), RoundRobin(1), [replica], RequestLog(largest_hit_counts=True))], [replica]
    ).run()


def write_long(path: Path, num_steps: int, timeline: Timeline) -> None:
    """The timeline again and again, up to `num_steps` rows, as one file."""
    repeats = -(-num_steps // len(timeline))
    columns = {name: np.tile(column, repeats)[:num_steps] for name, column in timeline.columns.items()}
    for name, unit in (("step", 1), ("t_ms", 1.0)):
        span = timeline.columns[name][-1] + unit
        columns[name] = columns[name] + np.repeat(np.arange(repeats), len(timeline))[:num_steps] * span
    Timeline(columns, {}, block_size_tokens=timeline.block_size_tokens, total_blocks=timeline.total_blocks).write(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10_000_000)
    arguments = parser.parse_args()
    trace = load_mooncake(arguments.trace)
    bare, recorded = [], []
    for _ in range(arguments.repeat):
        bare.append(timed(lambda: run_engine(trace, None)))
        recorded.append(timed(lambda: run_engine(trace, StepLog(CONFIG.num_pages))))
    ratio = statistics.median(recorded) / statistics.median(bare)
    print(f"replay {statistics.median(bare):.3f} s, with its timeline {statistics.median(recorded):.3f} s: {ratio:.2f}")

    exported = []
    for _ in range(arguments.repeat):
        timeline = timelines_of(replay(trace, CONFIG))[0]
        exported.append(timed(timeline.to_json))
    print(f"{len(timeline):,} rows to JSON: {statistics.median(exported):.3f} s")

    with tempfile.TemporaryDirectory() as folder:
        costs: dict[str, list[Cost]] = {}
        for form in ("json", "jsonl", "parquet", "json.gz"):
            path = Path(folder) / f"timeline.{form}"
            timeline.write(path)
            costs[form] = [run(kvarts_command("verify", path)) for _ in range(arguments.repeat)]
            cost = median_of(costs[form])
            size = path.stat().st_size / 2**20
            print(f"verify .{form} ({size:.1f} MiB): {cost.seconds:.3f} s, {cost.mebibytes:.0f} MiB, whole process")
        if arguments.steps:
            path = Path(folder) / "long.json"
            # In a process of its own: what this one holds would count for its children.
            writer = get_context("fork").Process(target=write_long, args=(path, arguments.steps, timeline))
            writer.start()
            writer.join()
            cost = run(kvarts_command("verify", path))
            size = path.stat().st_size / 2**20
            print(f"verify {arguments.steps:,} rows ({size:,.0f} MiB): {cost.seconds:.1f} s, {cost.mebibytes:.0f} MiB")
            path.unlink()
        replays = ("replay", arguments.trace, "--profile", "mocker", "--pages", CONFIG.num_pages)
        runs: dict[str, list[Cost]] = {"bare": [], "run": [], "page": []}
        for turn in range(3):
            run_dir = Path(folder) / f"run{turn}"
            runs["bare"].append(run(kvarts_command(*replays)))
            runs["run"].append(run(kvarts_command(*replays, "--run-dir", run_dir)))
            page = Path(folder) / "page.html"
            runs["page"].append(run(kvarts_command("report", run_dir, "--html", page)))
        bare_s, run_s = median_of(runs["bare"]).seconds, median_of(runs["run"]).seconds
        print(f"kvarts replay: {bare_s:.2f} s; with --run-dir {run_s:.2f} s")
        print(f"kvarts report --html: {median_of(runs['page']).seconds:.2f} s, {page.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
