"""The compiled build beside the interpreted one: the same replays, in turns.

    python benchmarks/compiled.py TRACE --compiled DIR [--interpreted DIR] [--dynamo-python PYTHON] [--million]

TRACE: Mooncake's conversation_trace.jsonl. DIR: a folder with the package, such as `DIR/src` of `python
scripts/compiled_build.py --keep DIR`; `src` of this checkout unless given. In process it is the processor time of the
shortest replay of all rounds, of a trace that was read before. Of whole processes, from start to written report, it is
processor time, which other work on the machine changes less, and the time that passed; medians. A sweep is a thousand
requests on pools of many sizes, one replay after the other in a process. `--million`: a million requests, once each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from processes import Cost, environment, median_of, run
from scaling import POOL_TOKENS, write_million

CASES = [("16 tokens a page", 128_000, 16), ("512 tokens a page", 4_000, 512)]
SOURCES = Path(__file__).resolve().parents[1] / "src"
REPLAYS_OF_A_ROUND = 2
SWEEP_REQUESTS = 1000
SWEEP_PAGES = range(4_000, 36_000, 1_000)
"""Pages of 16 tokens: from where requests are preempted to where nothing is evicted."""


def child(trace: str, pages: int, page_size: int) -> None:
    """Replay in this process, and print seconds of processor time."""
    from kvarts import ReplayConfig, load_trace, replay

    traffic = load_trace(trace)
    config = ReplayConfig(num_pages=pages, page_size=page_size, profile="mocker")
    times = []
    for _ in range(REPLAYS_OF_A_ROUND):
        start = time.process_time()
        replay(traffic, config)
        times.append(time.process_time() - start)
    print(json.dumps(times))


def sweep(trace: str) -> None:
    """Replay on pools of many sizes in this process, and print replays a second."""
    from kvarts import ReplayConfig, load_trace, replay

    traffic = load_trace(trace)
    configs = [ReplayConfig(num_pages=pages, page_size=16, profile="mocker") for pages in SWEEP_PAGES]
    replay(traffic, configs[0])
    start = time.perf_counter()
    for config in configs:
        assert replay(traffic, config).summary["num_completed"]
    print(json.dumps(len(configs) / (time.perf_counter() - start)))


def asked(source: Path, *arguments: object) -> Any:
    """What this script says in a process of its own, with the build in `source`."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(
        command, env={**environment(), "PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def in_process(source: Path, trace: str, pages: int, page_size: int) -> float:
    times: list[float] = asked(source, trace, "--child", pages, page_size)
    return min(times)


def whole(source: Path, trace: str, pages: int, page_size: int, out: Path) -> Cost:
    os.environ["PYTHONPATH"] = str(source)
    setting = ("--profile", "mocker", "--pages", str(pages), "--page-size", str(page_size))
    return run([sys.executable, "-m", "kvarts", "replay", trace, *setting, "--report", str(out)])


def peer(python: str, trace: str, pages: int, page_size: int, out: Path) -> Cost:
    script = Path(__file__).with_name("dynamo_replay.py")
    return run([python, str(script), trace, str(pages), str(page_size), "1", str(out)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--compiled", type=Path, metavar="DIR", default=SOURCES)
    parser.add_argument("--interpreted", type=Path, metavar="DIR", default=SOURCES)
    parser.add_argument("--dynamo-python", help="a Python with Dynamo, as compare_dynamo.py takes it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--million", action="store_true", help="replay a million requests as well")
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sweep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.trace, *args.child)
        return
    if args.sweep:
        sweep(args.trace)
        return
    builds = (args.interpreted.resolve(), args.compiled.resolve())
    with tempfile.TemporaryDirectory() as folder:
        short, some, out = (Path(folder) / name for name in ("one.jsonl", "some.jsonl", "report.json"))
        with Path(args.trace).open() as rows:
            short.write_text(next(rows))
        with Path(args.trace).open() as rows:
            some.write_text("".join(islice(rows, SWEEP_REQUESTS)))
        for name, pages, page_size in CASES:
            inside = [[in_process(build, args.trace, pages, page_size) for build in builds] for _ in range(args.rounds)]
            emit(f"{name}, in process", *(min(times) for times in zip(*inside, strict=True)))
            for what, trace in (("whole process", args.trace), ("a trace of one request", str(short))):
                took = []
                for _ in range(args.rounds):
                    took.append([whole(build, trace, pages, page_size, out) for build in builds])
                    if args.dynamo_python and trace == args.trace:
                        took[-1].append(peer(args.dynamo_python, trace, pages, page_size, out))
                costs = [median_of(each) for each in zip(*took, strict=True)]
                emit(f"{name}, {what}", *(cost.cpu_seconds for cost in costs))
                emit(f"{name}, {what}, time that passed", *(cost.seconds for cost in costs))
        rates = [[asked(build, some, "--sweep") for build in builds] for _ in range(args.rounds)]
        plain, native = (statistics.median(each) for each in zip(*rates, strict=True))
        print(f"a sweep in one process: {plain:.1f} replays/s, compiled {native:.1f}: {native / plain:.2f} times")
        if args.million:
            million = write_million(Path(args.trace), Path(folder) / "million.jsonl")
            for build, how in zip(builds, ("interpreted", "compiled"), strict=True):
                cost = whole(build, str(million), POOL_TOKENS // 16, 16, out)
                print(f"a million requests, {how}: {cost.seconds:.1f} s, {cost.mebibytes:.0f} MiB", flush=True)


def emit(what: str, plain: float, native: float, dynamo: float | None = None) -> None:
    line = f"{what}: {plain:.3f} s, compiled {native:.3f} s: {plain / native:.2f} times"
    if dynamo is not None:
        line += f"; Dynamo {dynamo:.3f} s: {dynamo / plain:.1f} and {dynamo / native:.1f} times"
    print(line, flush=True)


if __name__ == "__main__":
    main()
