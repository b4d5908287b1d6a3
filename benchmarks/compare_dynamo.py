"""Whether kvarts' replay and NVIDIA Dynamo 1.6.1's native replay give the same answers.

    python benchmarks/compare_dynamo.py TRACE --dynamo-python OTHER_VENV/bin/python

TRACE: Mooncake's conversation_trace.jsonl. OTHER_VENV: a virtual environment with
`pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1`. What both take is the figure `dynamo` of speed.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import kvarts_command, run

SCRIPT = Path(__file__).with_name("dynamo_replay.py")
EQUAL = [("1 worker", 16384, 512, 1), ("4 workers", 16384, 512, 4), ("600 pages", 600, 512, 1)]
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
    trace: str, python: str, pages: int, page_size: int, replicas: int, out: Path
) -> tuple[list[str], list[str]]:
    """Kvarts' and the peer's command for the same replay, each of which writes a row per request."""
    ours = kvarts_command(
        *("replay", trace, "--profile", "mocker", "--pages", pages, "--page-size", page_size),
        *("--replicas", replicas, "--requests", out / "ours.jsonl"),
    )
    return ours, [python, str(SCRIPT), trace, str(pages), str(page_size), str(replicas), str(out / "theirs.jsonl")]


def compare_answers(trace: str, python: str, out: Path) -> bool:
    """Prints the largest differences; whether all are within bounds."""
    good = True
    for name, pages, page_size, replicas in EQUAL:
        for command in commands(trace, python, pages, page_size, replicas, out):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--dynamo-python", required=True, help="a Python in which dynamo._core can be imported")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = compare_answers(args.trace, args.dynamo_python, Path(folder))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
