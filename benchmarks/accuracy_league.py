"""The accuracy league: replays beside published measurements, and beside other predictors of the same points.

    python benchmarks/accuracy_league.py POINTS.csv [--others OTHERS.csv] [--prior FILE] [--every N]

POINTS.csv: a table of measured points, as `kvarts calibrate --points` takes it (docs/reference.md has its columns).
Every point is replayed once with the constants that ship, or those of --prior, under the defaults of the engine that
it names; nothing is fitted. Printed are tables in Markdown: errors by source, kind of model, number format, device and
load. OTHERS.csv: what other predictors said of points, with columns row (of POINTS.csv, from 1), predictor, ttft_ms,
tpot_ms, e2e_ms and tok_s_gpu, of which each may be empty; each predictor is then compared with the measurements beside
kvarts, on the points that it has. --every N: only every Nth point.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from kvarts.cost.roofline_settings import load_constants, shipped_constants
from kvarts.plan.calibrate.joint_fit import record
from kvarts.plan.calibrate.schedule import Course, Point, load_points, with_constants

METRICS = {"tpot_ms": "TPOT", "tok_s_gpu": "tokens/s", "ttft_ms": "TTFT", "e2e_ms": "E2E"}
Errors = dict[str, list[float]]


def level_of(point: Point) -> str:
    """Return the name of a load."""
    if point.load != "closed":
        return point.load
    return "1-4 in flight" if point.level <= 4 else "5-64 in flight" if point.level <= 64 else "65 and more"


GROUPS: dict[str, Callable[[Course], str]] = {
    "source": lambda course: course.point.source or "-",
    "kind": lambda course: "dense" if course.cost.geometry.experts is None else "experts",
    "kind and format": lambda course: (
        ("dense " if course.cost.geometry.experts is None else "experts ") + (course.point.weight or "of the model")
    ),
    "device": lambda course: course.point.gpu,
    "engine": lambda course: course.point.engine or "-",
    "load": lambda course: level_of(course.point),
}


def cell(errors: Sequence[float]) -> str:
    """Return median of the sizes, p90 and bias, in per cent."""
    if not errors:
        return "-"
    sizes = np.abs(errors) * 100
    return f"{np.median(sizes):.1f} ({np.percentile(sizes, 90):.0f}, {np.median(errors) * 100:+.0f})"


def table(title: str, rows: Iterable[tuple[str, Errors]]) -> None:
    """Print a table of errors by metric."""
    print(f"\n| {title} | points | {' | '.join(METRICS.values())} |")
    print(f"|---|---:|{'---:|' * len(METRICS)}")
    for name, errors in rows:
        count = max(map(len, errors.values()), default=0)
        print(f"| {name} | {count} | {' | '.join(cell(errors.get(metric, [])) for metric in METRICS)} |")


def main() -> None:
    """Predict every point, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("points", type=Path)
    parser.add_argument("--others", type=Path)
    parser.add_argument("--prior", type=Path)
    parser.add_argument("--every", type=int, default=1)
    asked = parser.parse_args()
    constants = shipped_constants() if asked.prior is None else load_constants(asked.prior)
    places = range(0, len(points := load_points(asked.points)), asked.every)
    courses = dict(zip(places, record([points[place] for place in places], constants, None), strict=True))
    predictions = {
        place: course.predicted(with_constants(course.cost, constants.values)) for place, course in courses.items()
    }
    print("Median of the absolute errors (90th percentile, median of the errors), in per cent.")
    for title, of in GROUPS.items():
        found: dict[str, Errors] = {}
        for place, course in courses.items():
            for name in (of(course), *(["all"] if title == "source" else [])):
                row = found.setdefault(name, {})
                for metric, measured in course.point.measured.items():
                    row.setdefault(metric, []).append(predictions[place][metric] / measured - 1.0)
        table(title, sorted(found.items()))
    if asked.others is not None:
        table("predictor", beside(asked.others, points, predictions))


def beside(path: Path, points: Sequence[Point], predictions: dict[int, dict[str, float]]) -> list[tuple[str, Errors]]:
    """Return the errors of each other predictor, and those of kvarts on the same points and metrics."""
    found: dict[str, tuple[Errors, Errors]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            place = int(row["row"]) - 1
            if place not in predictions:
                continue
            theirs, ours = found.setdefault(row["predictor"], ({}, {}))
            for metric, measured in points[place].measured.items():
                if row.get(metric):
                    theirs.setdefault(metric, []).append(float(row[metric]) / measured - 1.0)
                    ours.setdefault(metric, []).append(predictions[place][metric] / measured - 1.0)
    return [
        pair
        for name, (theirs, ours) in sorted(found.items())
        for pair in ((name, theirs), (f"kvarts on the points of {name}", ours))
    ]


if __name__ == "__main__":
    main()
