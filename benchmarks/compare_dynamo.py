"""kvarts beside NVIDIA Dynamo 1.6.1's native replay: the same answers, and what they take.

    python benchmarks/compare_dynamo.py TRACE --dynamo-python OTHER_VENV/bin/python

TRACE: Mooncake's conversation_trace.jsonl. OTHER_VENV: a virtual environment with
`pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1`. Each comparison runs whole processes, from start to
written report, one after the other in turns; times are medians. Run it with the Python of an installed kvarts: modules
that have no bytecode yet are compiled at every start.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import kvarts_command, median_of, run

SCRIPT = Path(__file__).with_name("dynamo_replay.py")
EQUAL = [("1 worker", 16384, 512, 1), ("4 workers", 16384, 512, 4), ("600 pages", 600, 512, 1)]
TIMED = [("16 tokens a page", 524_288, 16, 8.0), ("512 tokens a page", 16_384, 512, 3.0)]
TOLERANCE_MS = 1e-3


def ours_of(path: Path) -> list[tuple[float, ...]]:
    names = ("arrival_ms", "input_tokens", "output_tokens", "first_admitted_ms", "first_token_ms", "last_token_ms")
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return sorted((*(row[name] for name in names), row["cached_tokens"], row["admissions"]) for row in rows)


def theirs_of(path: Path) -> list[tuple[float, ...]]:
    names = ("arrival_time_ms", "input_length", "output_length", "first_admit_ms", "first_token_ms", "last_token_ms")

    def values(row: dict[str, Any]) -> tuple[float, ...]:
        reused = max(admission["reused_input_tokens"] for admission in row["admission_history"])
        return (*(row[name] for name in names), reused, row["admission_count"])

    return sorted(values(json.loads(line)) for line in path.read_text().splitlines())


def commands(
    trace: str, python: str, pages: int, page_size: int, replicas: int, out: Path, *, rows: bool
) -> tuple[list[str], list[str]]:
    """Kvarts' and the peer's command for the same replay; both write a row a request, or both only a summary."""
    mine = ("--requests", out / "ours.jsonl") if rows else ("--report", out / "ours.json")
    ours = kvarts_command(
        *("replay", trace, "--profile", "mocker", "--pages", pages, "--page-size", page_size),
        *("--replicas", replicas, *mine),
    )
    peers = out / ("theirs.jsonl" if rows else "theirs.json")
    return ours, [python, str(SCRIPT), trace, str(pages), str(page_size), str(replicas), str(peers)]


def compare_answers(trace: str, python: str, out: Path) -> bool:
    """Prints the largest differences; whether all are within bounds."""
    good = True
    for name, pages, page_size, replicas in EQUAL:
        for command in commands(trace, python, pages, page_size, replicas, out, rows=True):
            run(command)
        ours, theirs = ours_of(out / "ours.jsonl"), theirs_of(out / "theirs.jsonl")
        worst = max(
            abs(a - b) for mine, peers in zip(ours, theirs, strict=True) for a, b in zip(mine, peers, strict=True)
        )
        same_tokens = [row[6:] for row in ours] == [row[6:] for row in theirs]
        print(
            f"{name:12} {len(ours):,} requests: times differ by at most {worst:.1e} ms, "
            f"cached tokens and admissions {'equal' if same_tokens else 'DIFFER'}"
        )
        good &= worst <= TOLERANCE_MS and same_tokens
    return good


def compare_times(trace: str, python: str, out: Path, num_runs: int) -> None:
    for name, pages, page_size, target in TIMED:
        for rows in (False, True):
            ours, theirs = commands(trace, python, pages, page_size, 1, out, rows=rows)
            costs = [(run(ours), run(theirs)) for _ in range(num_runs)]
            mine, peers = median_of([cost for cost, _ in costs]), median_of([cost for _, cost in costs])
            print(
                f"{name}, {'a row a request' if rows else 'summary'}: kvarts {mine.seconds:.3f} s and "
                f"{mine.mebibytes:.0f} MiB, dynamo {peers.seconds:.3f} s and {peers.mebibytes:.0f} MiB: "
                f"{peers.seconds / mine.seconds:.1f} times faster (target {target:g}), "
                f"{mine.mebibytes / peers.mebibytes:.2f} of the memory (target 0.2)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--dynamo-python", required=True, help="a Python in which dynamo._core can be imported")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Times first: a child's peak memory is at least what this process has when it starts it.
        compare_times(args.trace, args.dynamo_python, Path(folder), args.runs)
        good = compare_answers(args.trace, args.dynamo_python, Path(folder))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
