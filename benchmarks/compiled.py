"""The compiled build beside the interpreted one: the same replays, in turns.

    python benchmarks/compiled.py TRACE --compiled DIR [--interpreted DIR]

TRACE: Mooncake's conversation_trace.jsonl. DIR: a folder with the package, such as `DIR/src` of `python
scripts/compiled_build.py --keep DIR`; `src` of this checkout unless given. All times are processor time, as a machine
with other work changes that less: in process, of the shortest replay of all rounds, of a trace that was read before; of
whole processes, from start to written report, medians.
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
from pathlib import Path

from processes import Cost, run

CASES = [("16 tokens a page", 128_000, 16), ("512 tokens a page", 4_000, 512)]
SOURCES = Path(__file__).resolve().parents[1] / "src"
REPLAYS_OF_A_ROUND = 2


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


def environment(source: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source)}


def in_process(source: Path, trace: str, pages: int, page_size: int) -> float:
    command = [sys.executable, __file__, trace, "--child", str(pages), str(page_size)]
    done = subprocess.run(command, env=environment(source), capture_output=True, text=True, check=True)
    times: list[float] = json.loads(done.stdout)
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
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.trace, *args.child)
        return
    builds = (args.interpreted.resolve(), args.compiled.resolve())
    with tempfile.TemporaryDirectory() as folder:
        short, out = Path(folder) / "one.jsonl", Path(folder) / "report.json"
        with Path(args.trace).open() as rows:
            short.write_text(next(rows))
        for name, pages, page_size in CASES:
            inside = [[in_process(build, args.trace, pages, page_size) for build in builds] for _ in range(args.rounds)]
            tell(f"{name}, in process", *(min(times) for times in zip(*inside, strict=True)))
            for what, trace in (("whole process", args.trace), ("a trace of one request", str(short))):
                took = []
                for _ in range(args.rounds):
                    took.append([whole(build, trace, pages, page_size, out).cpu_seconds for build in builds])
                    if args.dynamo_python and trace == args.trace:
                        took[-1].append(peer(args.dynamo_python, trace, pages, page_size, out).cpu_seconds)
                tell(f"{name}, {what}", *(statistics.median(times) for times in zip(*took, strict=True)))


def tell(what: str, plain: float, native: float, dynamo: float | None = None) -> None:
    line = f"{what}: {plain:.3f} s, compiled {native:.3f} s: {plain / native:.2f} times"
    if dynamo is not None:
        line += f"; Dynamo {dynamo:.3f} s: {dynamo / plain:.1f} and {dynamo / native:.1f} times"
    print(line, flush=True)


if __name__ == "__main__":
    main()
