"""How the time of a replay grows: with smaller pages, longer outputs, and per-request rows.

    python benchmarks/scaling.py TRACE

TRACE: Mooncake's conversation_trace.jsonl. Whole processes; medians of runs in turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from processes import Cost, kvarts_command, median_of, run

POOL_TOKENS = 16_384 * 512


def replay(trace: Path, page_size: int, *more: object) -> list[str]:
    pages = POOL_TOKENS // page_size
    return kvarts_command("replay", trace, "--profile", "mocker", "--pages", pages, "--page-size", page_size, *more)


def rewritten(trace: Path, out: Path, change: Callable[[dict[str, object]], None]) -> Path:
    with trace.open() as lines, out.open("w") as file:
        for line in lines:
            row = json.loads(line)
            change(row)
            file.write(json.dumps(row) + "\n")
    return out


def ten_times_longer(row: dict[str, object]) -> None:
    length = row["output_length"]
    assert isinstance(length, int)
    row["output_length"] = 10 * length


def timed(commands: dict[str, list[str]], num_runs: int) -> dict[str, Cost]:
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(num_runs):
        for name, command in commands.items():
            costs[name].append(run(command))
    return {name: median_of(each) for name, each in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        longer = rewritten(args.trace, folder / "longer.jsonl", ten_times_longer)
        costs = timed(
            {
                "512 tokens a page": replay(args.trace, 512),
                "16 tokens a page": replay(args.trace, 16),
                "1 token a page": replay(args.trace, 1),
                "outputs times ten": replay(longer, 16),
                "with --requests": replay(args.trace, 16, "--requests", folder / "requests.jsonl"),
            },
            args.runs,
        )
        for label, cost in costs.items():
            print(f"{label:20} {cost.seconds:.3f} s, {cost.mebibytes:.0f} MiB")
        base = costs["16 tokens a page"].seconds
        by_page = [costs[f"{size} a page"].seconds for size in ("512 tokens", "16 tokens", "1 token")]
        print(f"slowest page size over fastest: {max(by_page) / min(by_page):.2f} (target 1.5)")
        print(f"outputs times ten over plain: {costs['outputs times ten'].seconds / base:.2f} (target 2)")
        print(f"--requests over plain: {costs['with --requests'].seconds / base:.2f} (target 1.5)")


if __name__ == "__main__":
    main()
