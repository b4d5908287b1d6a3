"""Fuzz the command line: `PYTHONPATH=src:tests python -m fuzz --seconds 60 --seed 1`.

Each line is a random combination of options, changed until kvarts accepts it. A replay then runs again, in steps, with
an audit, and with all its readers: the bytes are the same, and its totals are the sums of its rows. `--compiled
DIR/src`: it also runs there. `--processes 0.01`: that share of lines also runs in a process of its own. Ends with 1 if
a line failed, and prints a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from fuzz.laws import broken_laws
from fuzz.lines import RUN_FILES, Line, candidates, draw_line, mend, write_trace
from fuzz.running import Ended, Other, run_here, run_process, serve

from builders.calls import make_files

OUTPUTS = ["--json", "--requests", "rows.jsonl"]
READERS = ["--events", "events.jsonl", "--timeline", "timeline.json", "--html", "page.html"]
RUN_DIR = "new"
OF_A_RUN = (["verify", RUN_DIR], ["report", RUN_DIR], ["story", RUN_DIR], ["story", RUN_DIR, "--hits"])
"""Commands that read the directory of a run."""
CODES = (0, 2, 4, 5, 6)
"""Exit codes of lines whose files are there and can be written; 5 is a verdict, which a replay must not have."""
MOST_VERIFIED = 8
LONG_S = 2.0
"""A line that takes more processor time is run once more, in a way that is drawn: so are others in the meantime."""
MOST_CHANGES = 12
"""How often a line that is refused is changed."""


class Fuzzer:
    """Runs lines, and counts them; `failures`: each with the line and the seed of its traces."""

    def __init__(self, seed: int, *, compiled: Path | None = None, processes: float = 0.0) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.accepted: set[str] = set()
        self.failures: list[str] = []
        self._processes = processes
        self._compiled = None if compiled is None else Other(compiled)
        self._files = tempfile.TemporaryDirectory(prefix="kvarts-fuzz-")
        folder = Path(self._files.name)
        make_files(folder, lambda words: run_in(folder, [str(word) for word in words]))

    def close(self) -> None:
        """End the other interpreter."""
        self._files.cleanup()
        if self._compiled is not None:
            self._compiled.close()

    def step(self, number: int) -> None:
        """Draw line `number`, and run it in all ways."""
        rng = Random(f"{self.seed} {number}")
        with tempfile.TemporaryDirectory(prefix="kvarts-fuzz-") as name:
            folder = Path(shutil.copytree(self._files.name, Path(name, "files")))
            write_trace(folder, rng)
            line = draw_line(rng)
            outputs = OUTPUTS if line.words[0] == "replay" else []
            for _ in range(MOST_CHANGES):
                ended = self.run([*line.arguments, *outputs], folder)
                self.judge(number, line, ended)
                if ended.code != 2 or not mend(line, ended.err, rng):
                    break
            if ended.code not in (0, 5, 6):
                self.counts["refused"] += 1
                return
            self.counts["accepted"] += 1
            self.accepted |= {f"{line.words[0]} {name}" for name in line.names}
            self.compare(number, line, ended, folder, rng)

    def run(self, arguments: list[str], folder: Path) -> Ended:
        """Run a line here."""
        self.counts["runs"] += 1
        return run_here(arguments, folder)

    def judge(self, number: int, line: Line, ended: Ended) -> None:
        """Note a traceback, an exit code that means nothing, or a refusal without words or with output."""
        self.counts[f"code {ended.code}"] += 1
        if ended.code not in CODES or "Traceback" in ended.err:
            self.fail(number, line, f"ended with {ended.code}: {ended.err[-1500:]}")
        elif ended.code in (2, 4) and (
            not ended.err.startswith(("kvarts: ", "Usage: ", "Error: ")) or ended.out or ended.files
        ):
            self.fail(number, line, f"was refused with {ended.err!r}, {ended.out[:100]!r} and {sorted(ended.files)}")

    def compare(self, number: int, line: Line, first: Ended, folder: Path, rng: Random) -> None:
        """Run an accepted line, which ended as `first`, in all ways that must not differ."""
        is_replay = line.words[0] == "replay"
        arguments = [*line.arguments, *(OUTPUTS if is_replay else ())]
        ways: dict[str, Any] = {}
        if not is_replay or rng.random() < 0.25:  # the other ways are second runs as well
            ways["again"] = lambda: self.run(arguments, folder)
        if is_replay:
            for name, more in (("in steps", ["--step-by-step"]), ("audited", ["--audit"]), ("read", READERS)):
                ways[name] = lambda more=more: self.run([*arguments, *more], folder)
            if rng.random() < 0.3:
                ways["kept"] = lambda: self.run([*arguments, "--run-dir", RUN_DIR], folder)
        if self._compiled is not None:
            ways["compiled"] = lambda: self._compiled and self._compiled.run(arguments, folder)
        if rng.random() < self._processes:
            ways["in a process"] = lambda: run_process(arguments, folder)
        if first.busy_s > LONG_S:
            self.counts["long"] += 1
            name = rng.choice(sorted(ways))
            ways = {name: ways[name]}
        for name, run in ways.items():
            other: Ended = run()
            self.counts[name] += 1
            if name in ("audited", "read", "kept") and other.code == 2:
                self.counts[f"{name}: refused"] += 1
                continue
            if (other.code, other.out) != (first.code, first.out):
                self.fail(
                    number,
                    line,
                    f"{name}: {other.code} for {first.code}, {difference(first.out, other.out)} {other.err[-800:]}",
                )
            elif any(other.files.get(path) != data for path, data in first.files.items()):
                self.fail(number, line, f"{name}: other files")
            elif name == "read":
                self.verify(number, line, other, folder)
            elif name == "kept":
                self.read_run(number, line, other, folder)
        if is_replay and first.code in (0, 6):
            for problem in problems(first):
                self.fail(number, line, problem)

    def verify(self, number: int, line: Line, ended: Ended, folder: Path) -> None:
        """Judge the timelines of a run, of many replicas those of some."""
        timelines = [(path, data) for path, data in ended.files.items() if path.startswith("timeline") and data]
        for path, data in timelines[:MOST_VERIFIED]:
            (folder / path).write_bytes(data)
            verdict = self.run(["verify", path], folder)
            if verdict.code not in (0, 6):
                self.fail(number, line, f"verify {path}: {verdict.out.decode()[-600:]}{verdict.err[-300:]}")

    def read_run(self, number: int, line: Line, ended: Ended, folder: Path) -> None:
        """Read the directory of a run, which has what was printed and written outside, with each command that can."""
        for path, data in sorted(ended.files.items()):
            if path.partition("/")[0] == RUN_DIR:
                if data is None:
                    (folder / path).mkdir()
                else:
                    (folder / path).write_bytes(data)
        if ended.files[f"{RUN_DIR}/report.json"] != ended.out:
            self.fail(number, line, "kept: the report of the directory is not what was printed")
        rows = ended.files.get("rows.jsonl")
        if rows is not None and ended.files[f"{RUN_DIR}/requests.jsonl"] != rows:
            self.fail(number, line, "kept: the rows of the directory are not those of --requests")
        first = [json.loads(row)["request_id"] for row in (rows or b"").splitlines()[:1]]
        for words in (*OF_A_RUN, *(["story", RUN_DIR, "--request", each] for each in first)):
            read = self.run(words, folder)
            self.counts[f"kept: {words[0]}"] += 1
            self.judge(number, Line(words), read)
            if read.code not in (0, 2, 6) or (words[0] != "story" and read.code == 2):
                self.fail(number, line, f"{' '.join(words)}: {read.code} {read.err[-300:]}")

    def fail(self, number: int, line: Line, what: str) -> None:
        """Keep and print a failure."""
        self.failures.append(
            f"--seed {self.seed} --first {number} --lines 1: kvarts {' '.join(line.arguments)}\n  {what}"
        )
        print(self.failures[-1], file=sys.stderr, flush=True)


def run_in(folder: Path, words: list[str]) -> int:
    """Run a line that prepares `folder`; keep what it writes."""
    ended = run_here(words, folder)
    for path, data in sorted(ended.files.items()):
        target = folder / path
        target.mkdir(parents=True) if data is None else target.write_bytes(data)
    return ended.code


def problems(ended: Ended) -> list[str]:
    """Return the laws that a report and its rows break, each of several models alone."""
    report = json.loads(ended.out)
    by_name = report.get("models") or {"": report}
    found = []
    for name, each in by_name.items():
        data = ended.files[f"rows-{name}.jsonl" if name else "rows.jsonl"]
        assert data is not None
        found += [f"{name} {law}".strip() for law in broken_laws(each, [json.loads(row) for row in data.splitlines()])]
    if report.get("models"):
        devices = report.get("devices") or [report["device"]]
        for total in ("num_requests", "num_completed", "num_rejected", "num_failed"):
            if sum(device[total] for device in devices) != sum(each[total] for each in by_name.values()):
                found.append(f"{total} of the devices is not that of their models")
    return found


def difference(one: bytes, other: bytes) -> str:
    """Return the first line that differs."""
    pairs = zip(one.splitlines(), other.splitlines(), strict=False)
    return next((f"{a.decode()} | {b.decode()}" for a, b in pairs if a != b), f"{len(one)} and {len(other)} bytes")


def main() -> int:
    """Run the fuzzer; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--lines", type=int, default=1 << 60)
    parser.add_argument("--first", type=int, default=0, help="number of the first line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", type=Path, help="the sources of a compiled build, where there is one")
    parser.add_argument("--processes", type=float, default=0.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    compiled = options.compiled if options.compiled is not None and options.compiled.is_dir() else None
    fuzzer = Fuzzer(options.seed, compiled=compiled, processes=options.processes)
    end = time.monotonic() + options.seconds
    number = options.first
    while number < options.first + options.lines and time.monotonic() < end:
        fuzzer.step(number)
        number += 1
    fuzzer.close()
    drawn = {f"replay {param.opts[0]}" for param in candidates("replay")}
    summary = {
        "lines": number - options.first,
        "counts": dict(sorted(fuzzer.counts.items())),
        "compiled": compiled is not None,
        "options of replays": len(drawn),
        "never accepted": sorted(drawn - fuzzer.accepted),
        "given in all lines": list(RUN_FILES),
        "failures": len(fuzzer.failures),
    }
    print(json.dumps(summary, indent=1))
    return bool(fuzzer.failures)


if __name__ == "__main__":
    sys.exit(main())
