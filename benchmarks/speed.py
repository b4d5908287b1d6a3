"""Where the figures of speed stand: one command per figure, with its goal and whether it is missed.

    python benchmarks/speed.py FIGURE ... --data DIR [--build DIR/src] [--before DIR/src] [--turns 9]

FIGURE: `dynamo`, `hybrids`, `tiers`, `models`, `sglang`, `start`, `replay` or `million`. `--data`: a folder with
mooncake/conversation_trace.jsonl, mooncake/synthetic_trace.jsonl, azure2023/conv.csv and azure2023/code.csv. `--build`:
the package to measure, this checkout's sources unless given, such as `DIR/src` of `python scripts/compiled_build.py
--keep DIR --no-tests --no-bytes`; `--before`: another version, measured in the same turns, as a column of its own.
`--dynamo-python`: a Python in which `dynamo._core` can be imported, as compare_dynamo.py takes it.

Every case runs in a process of its own, once per turn, the cases of a figure one after the other. Times are processor
time. *In process* is the second call in a process, up to the summary; beside Dynamo, with the reading of the
trace. A *process* is from its start to its exit, with the report written. A ratio is the median of those within the
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

from processes import environment, run

ROOT = Path(__file__).resolve().parents[1]
CONVERSATION = "mooncake/conversation_trace.jsonl"
SIZES = {"16": 128_000, "512": 4_000}
"""Pages of the device, by tokens per page."""
HYBRIDS = ("gpt-oss-20b", "gemma-3-27b", "qwen3.5-27b")
TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "eager": {"policy": "eager", "host_pages": 16_000},
    "lazy": {"policy": "lazy", "host_pages": 16_000},
    "exclusive": {"policy": "exclusive", "host_pages": 16_000},
    "files": {"host_pages": 4_000, "disk_pages": 64_000},
}
PAIRS = {
    "Azure chat and code": ("azure2023/conv.csv", "azure2023/code.csv", "12GiB", 1.0),
    "Mooncake chat and synthetic": (CONVERSATION, "mooncake/synthetic_trace.jsonl", "40GiB", 0.25),
}
ONE_REQUEST = '{"timestamp": 0, "input_length": 1000, "output_length": 10, "hash_ids": [1, 2]}\n'


@dataclass(frozen=True)
class Case:
    """What one process measures. `words`: of `timed`, in process; or of the command line of a whole process."""

    words: tuple[str, ...]
    is_process: bool = False
    python: str = sys.executable


@dataclass(frozen=True)
class Row:
    """A figure: `case` divided by `base`, or the other way round if `is_speedup`; without a base, its seconds.

    `goal`: the largest that is good, or the least if `is_speedup`; 0 without one.
    """

    name: str
    case: Case
    base: Case | None = None
    goal: float = 0
    is_speedup: bool = False


@dataclass
class Taken:
    """Seconds and MiB of a case, by turn."""

    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)


def both(*words: str, ways: tuple[str, str]) -> tuple[Case, Case]:
    """Return two cases that differ in their last word."""
    first, second = ways
    return Case((*words, first)), Case((*words, second))


# Figures ----------------------------------------------------------------------------------------------------


def of_dynamo(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Dynamo's native replay, whole processes and in process."""
    trace, script = str(args.data / CONVERSATION), str(Path(__file__).with_name("dynamo_replay.py"))
    for size, pages in SIZES.items():
        options = ("--profile", "mocker", "--pages", str(pages), "--page-size", size)
        own = Case(("-m", "kvarts", "replay", trace, *options, "--report", str(folder / "own.json")), is_process=True)
        words = (script, trace, str(pages), size, "1", str(folder / "peer.json"))
        peer = Case(words, is_process=True, python=args.dynamo_python)
        yield Row(f"Dynamo, {size} tokens per page, processes", own, peer, {"16": 14, "512": 6}[size], is_speedup=True)
        inside = Case((*words, "--timed"), python=args.dynamo_python)
        goal = {"16": 25, "512": 10}[size]
        yield Row(f"Dynamo, {size} tokens per page, in process", Case(("mocker", trace, size)), inside, goal, True)


def of_hybrids(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Hybrid models as vLLM starts them, compared with the same replays in whole pages."""
    for model in HYBRIDS:
        yield Row(f"{model} as shipped", *both("hybrid", model, ways=("groups", "whole")), 1.4)


def of_tiers(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Replays with tiers, compared with the same without."""
    trace = str(args.data / CONVERSATION)
    goals = {"eager": 1.6, "lazy": 1.8, "exclusive": 2.0, "files": 2.5}
    for name, goal in goals.items():
        yield Row(f"tiers: {name}", *both("tier", trace, ways=(name, "none")), goal)


def of_models(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Two models on one device, compared with both alone on it."""
    for pair in PAIRS:
        yield Row(f"two models: {pair}", *both("pair", str(args.data), pair, ways=("shared", "alone")), 1.8)


def of_sglang(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """SGLang's profile, compared with vLLM's."""
    trace = str(args.data / CONVERSATION)
    yield Row("SGLang's profile", *both("engine", trace, ways=("sglang", "vllm")), 1.3)


def of_start(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Short commands."""
    (one := folder / "one.jsonl").write_text(ONE_REQUEST)
    for name, words in {"--version": ("--version",), "replay of one request": ("replay", str(one))}.items():
        yield Row(f"start: {name}, s", Case(("-m", "kvarts", *words), is_process=True), None, 0.15)
    yield Row("start: Python alone, s", Case(("-c", "pass"), is_process=True))


def of_replay(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """The replay alone, of a trace that was read: what `--before` compares."""
    for size in SIZES:
        yield Row(f"replay alone, {size} tokens per page, s", Case(("alone", str(args.data / CONVERSATION), size)))


def of_million(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """A million requests on one engine."""
    from fleet_cost import write_repeated
    from scaling import POOL_TOKENS

    trace = write_repeated(args.data / CONVERSATION, folder / "million.jsonl", 1_000_000)
    options = ("--profile", "mocker", "--pages", str(POOL_TOKENS // 16), "--page-size", "16")
    yield Row("a million requests, s", Case(("-m", "kvarts", "replay", str(trace), *options, "--json"), True), None, 12)


FIGURES: dict[str, Callable[[argparse.Namespace, Path], Iterator[Row]]] = {
    "dynamo": of_dynamo, "hybrids": of_hybrids, "tiers": of_tiers, "models": of_models, "sglang": of_sglang,
    "start": of_start, "replay": of_replay, "million": of_million,
}  # fmt: skip


# In the process of a case -----------------------------------------------------------------------------------


def timed(words: list[str]) -> float:
    """Return the processor time of a case, from the call to the report."""
    import gc

    kind, *rest = words
    prepared: dict[str, Callable[..., Callable[[], object]]] = {
        "mocker": mocker, "alone": alone, "tier": tier, "engine": engine, "hybrid": hybrid, "pair": pair,
    }  # fmt: skip
    replays = prepared[kind](*rest)
    gc.disable()  # as commands do
    replays()  # what is imported and compiled once per process is not counted
    start = process_time()
    replays()
    return process_time() - start


def mocker(trace: str, size: str) -> Callable[[], object]:
    from kvarts import ReplayConfig, load_trace, replay

    config = ReplayConfig(num_pages=SIZES[size], page_size=int(size), profile="mocker")
    return lambda: replay(load_trace(trace), config).summary


def alone(trace: str, size: str) -> Callable[[], object]:
    from kvarts import ReplayConfig, load_trace, replay

    config, loaded = ReplayConfig(num_pages=SIZES[size], page_size=int(size), profile="mocker"), load_trace(trace)
    return lambda: replay(loaded, config)


def tier(trace: str, way: str) -> Callable[[], object]:
    from kvarts import ReplayConfig, load_trace, replay
    from kvarts.core.tiers.config import OffloadConfig

    offload = OffloadConfig(**TIERS[way]) if TIERS[way] else None
    config, loaded = ReplayConfig(num_pages=4_000, page_size=512, offload=offload), load_trace(trace)
    return lambda: replay(loaded, config).summary


def engine(trace: str, name: str) -> Callable[[], object]:
    from kvarts import ReplayConfig, load_trace, replay
    from kvarts.sim.traffic.trace import Trace

    loaded = load_trace(trace)
    some = Trace(list(islice(loaded, 1000)), unit_tokens=loaded.unit_tokens, name=loaded.name)
    config = ReplayConfig.for_device("llama-3.1-8b", "h100-80gb", engine=name, concurrency=64)
    return lambda: replay(some, config).summary


def hybrid(model: str, way: str) -> Callable[[], object]:
    """Return the replay of a start of vLLM, or the same one in whole pages: the same pages, budget and scheduling."""
    from importlib.resources import files

    from kvarts import ReplayConfig, load_trace, replay

    device = "h100-80gb"
    given: dict[str, Any] = {"concurrency": 32, "max_seqs": 64}
    config = ReplayConfig.for_device(
        model, device, engine="vllm==0.32", max_model_len=131_072, kv_memory="30GiB", **given
    )
    if way == "whole":
        config = ReplayConfig.for_device(
            model,
            device,
            engine="vllm",
            kv_groups="off",
            page_size=config.page_size,
            pages=config.num_pages,
            max_batched_tokens=config.max_num_batched_tokens,
            async_scheduling=config.async_scheduling,
            **given,
        )
    loaded = load_trace(Path(str(files("kvarts"))) / "data" / "mooncake-conversation-1000.jsonl")
    return lambda: replay(loaded, config).summary


def pair(data: str, name: str, way: str) -> Callable[[], object]:
    from kvarts import ReplayConfig, load_trace, replay
    from kvarts.sim.sharing.config import ModelShare, SharingConfig

    first, second, kv_memory, speedup = PAIRS[name]
    traces = {"first": load_trace(Path(data) / first), "second": load_trace(Path(data) / second)}
    models = {"first": ModelShare(model="llama-3.1-8b"), "second": ModelShare(model="qwen3-8b")}
    each_config = ReplayConfig(speedup=speedup)
    config = SharingConfig(models=models, device="h100-80gb", kv_memory=kv_memory, each=each_config)
    if way == "shared":
        return lambda: replay(traces, config).summary
    each = {
        name: ReplayConfig(
            num_pages=config.kv_bytes // config.page_bytes[name],
            max_num_batched_tokens=config.each.max_num_batched_tokens,
            cost=config.configs[name].cost,
            speedup=config.configs[name].speedup,
        )
        for name in traces
    }
    return lambda: [replay(trace, each[name]).summary for name, trace in traces.items()]


# Measuring --------------------------------------------------------------------------------------------------


def measured(case: Case, build: Path) -> tuple[float, float]:
    """Return the seconds and the MiB of a case with the package in `build`; 0 MiB in process."""
    os.environ["PYTHONPATH"] = str(build)
    if case.is_process:
        cost = run([case.python, *case.words])
        return cost.cpu_seconds, cost.mebibytes
    command = [case.python, *(() if case.python != sys.executable else (__file__, "--timed")), *case.words]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1]), 0.0


def ratio_of(row: Row, taken: dict[Case, Taken]) -> float:
    """Return the median of a row's figures."""
    own = taken[row.case].seconds
    if row.base is None:
        return statistics.median(own)
    pairs = zip(own, taken[row.base].seconds, strict=True)
    return statistics.median(base / mine if row.is_speedup else mine / base for mine, base in pairs)


def cells(row: Row, builds: dict[str, dict[Case, Taken]]) -> Iterator[str]:
    """Return the row's cells: the seconds, the figure of each build, the goal, and whether it is missed."""
    now = builds["now"]
    seconds = [f"{statistics.median(now[each].seconds):.3f}" for each in (row.case, row.base) if each is not None]
    memory = max(now[row.case].mebibytes)
    yield " / ".join(seconds) + (f" s, {memory:.0f} MiB" if memory else " s")
    for taken in builds.values():
        yield f"{ratio_of(row, taken):.3g}"
    figure = ratio_of(row, now)
    is_missed = row.goal and (figure < row.goal if row.is_speedup else figure > row.goal)
    yield f"{row.goal:g}" if row.goal else ""
    yield "missed" if is_missed else ""


def main() -> None:
    """Print a table of figures."""
    if sys.argv[1:2] == ["--timed"]:
        print(timed(sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="+", choices=FIGURES, metavar="FIGURE")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--build", type=Path, default=ROOT / "src", metavar="DIR")
    parser.add_argument("--before", type=Path, metavar="DIR")
    parser.add_argument("--dynamo-python", metavar="PYTHON")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    if "dynamo" in args.figures and not args.dynamo_python:
        parser.error("dynamo needs --dynamo-python")
    args.data = args.data.resolve()
    sources = {"before": args.before, "now": args.build} if args.before else {"now": args.build}
    print(f"| | s | {' | '.join(sources)} | goal | |\n|---|---|{'---:|' * len(sources)}---:|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for figure in args.figures:
            rows = list(FIGURES[figure](args, Path(name)))
            cases = list(dict.fromkeys(case for row in rows for case in (row.case, row.base) if case is not None))
            builds = {build: {case: Taken() for case in cases} for build in sources}
            for _ in range(args.turns):
                for case in cases:
                    for build, source in sources.items():
                        seconds, mebibytes = measured(case, source.resolve())
                        builds[build][case].seconds.append(seconds)
                        builds[build][case].mebibytes.append(mebibytes)
            for row in rows:
                print(f"| {row.name} | {' | '.join(cells(row, builds))} |", flush=True)
    print(json.dumps({"turns": args.turns, "load": os.getloadavg()[0]}), file=sys.stderr)


if __name__ == "__main__":
    main()
