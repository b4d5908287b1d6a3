"""kvarts beside NVIDIA Dynamo 1.6.1 with prefill and decode apart: the same answers, request by request.

    python benchmarks/compare_fleet.py TRACE --dynamo-python OTHER_VENV/bin/python [--rows N] [--write-goldens]

TRACE: Mooncake's conversation_trace.jsonl, of which the first N rows are replayed. OTHER_VENV: a virtual environment
with `pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1`. Every case in tests/sim/fleet/data is replayed
by both; a request agrees if all its times, both its workers, the tokens that it reused and its preemptions do.
`--write-goldens` keeps Dynamo's answers there, for the tests. Times are of whole processes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

from processes import run

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "sim" / "fleet" / "data"
sys.path.append(str(ROOT / "tests"))

from kvarts.sim.replaying import replay  # noqa: E402
from kvarts.sim.traffic.formats import load_trace  # noqa: E402

from builders.dynamo_fleet import COLUMNS, config_of, num_equal, rows_of, theirs_of  # noqa: E402

SCRIPT = Path(__file__).with_name("dynamo_fleet.py")


def write_golden(path: Path, rows: list[tuple[float, ...]]) -> None:
    """Write a table, compressed; the same rows give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([f"{value:.6f}".rstrip("0").rstrip(".") for value in row] for row in rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--dynamo-python", required=True, help="a Python in which dynamo._core can be imported")
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--only", action="append", help="a case; all of them if left out")
    parser.add_argument("--write-goldens", action="store_true")
    args = parser.parse_args()
    good = True
    cases = json.loads((DATA / "cases.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        trace, out = Path(folder) / "trace.jsonl", Path(folder) / "out.jsonl"
        with args.trace.open() as lines:
            trace.write_text("".join(islice(lines, args.rows)))
        for name in args.only or cases:
            cost = run([args.dynamo_python, str(SCRIPT), str(DATA / "cases.json"), name, str(trace), str(out)])
            theirs = theirs_of(out)
            report = replay(load_trace(trace), config_of(cases[name]))
            ours = rows_of(report)
            seconds = {pool["role"]: pool["worker_seconds"] for pool in report.summary["fleet"]["pools"]}
            equal = num_equal(ours, theirs)
            good &= equal == len(theirs) == len(ours)
            their_seconds = json.loads(Path(f"{out}.seconds").read_text())
            worst = max(abs(seconds[role] - their_seconds[role]) for role in seconds)
            print(
                f"{name}: {equal:,} of {len(theirs):,} requests equal, worker seconds differ by {worst:.1e}; "
                f"dynamo took {cost.cpu_seconds:.2f} s of CPU"
            )
            if args.write_goldens:
                write_golden(DATA / f"dynamo-1.6.1-{name}.csv.gz", theirs)
                (DATA / f"dynamo-1.6.1-{name}.json").write_text(json.dumps(their_seconds) + "\n")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
