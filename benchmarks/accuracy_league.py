"""The accuracy league: replays compared with published measurements, and with other predictors of the same points.

    python benchmarks/accuracy_league.py POINTS.csv [MORE.csv ...] [--prior FILE] [--every N] [--hold-out FIELD]

POINTS.csv: tables of measured points, as `kvarts calibrate --points` takes them (docs/reference.md has the columns); a
row is a point, and a row added to a file is a point added to the league. Every point is replayed once with the
constants that ship, or those of --prior, under the defaults of the engine and version that it names; nothing is
fitted. Rows that measure something else than they state, or whose model does not start so divided, are counted and left
out. Printed are tables in Markdown: the
sources with their engine versions and dates; errors by source, kind of model, format, device, engine and load, each
with median, mean (MAPE), 90th percentile and bias; the share of points within the `±` of a report, and within twice
its level; and each other predictor whose answers are in the columns NAME_ttft and NAME_tpot, next to kvarts on the
same points. --every N: only every Nth point. --hold-out source, gpu or model: also fit to one half of the points,
divided by that field, and predict the other, both ways; printed is how often the errors of one half of the sweeps are
within the `±` that the other half of them gives, in the mean of DRAWS random divisions. This takes minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Processes
from kvarts.cost.roofline_settings import Constants, load_constants, shipped_constants
from kvarts.plan.calibrate.joint_fit import HALVES, cell_of, held_out_of, record, sweep_of, test_halves
from kvarts.plan.calibrate.schedule import Course, Point, load_points, usable, with_constants

METRICS = {"tpot_ms": "TPOT", "tok_s_gpu": "tokens/s", "ttft_ms": "TTFT", "e2e_ms": "E2E"}
HELD_OUT = {"tpot_ms": "tpot", "tok_s_gpu": "tpot", "ttft_ms": "ttft", "e2e_ms": "e2e"}
Errors = dict[str, list[float]]
Counts = dict[tuple[str, str], list[tuple[bool, bool]]]
"""By cell and metric: whether each error is within one and within two of the stated ones."""
DRAWS = 40


def level_of(point: Point) -> str:
    """Return the name of a load."""
    if point.load != "closed":
        return point.load
    return "1-4 in flight" if point.level <= 4 else "5-64 in flight" if point.level <= 64 else "65 and more"


GROUPS: dict[str, Callable[[Course], str]] = {
    "source": lambda course: course.point.source or "-",
    "kind": lambda course: course.cost.kind,
    "kind and format": lambda course: f"{course.cost.kind} {course.point.weight or 'of the model'}",
    "device": lambda course: course.point.gpu,
    "engine": lambda course: course.point.engine_name or "-",
    "load": lambda course: level_of(course.point),
}


def cell(errors: Sequence[float]) -> str:
    """Return median of the sizes, their mean, p90 and the median of the errors, in per cent."""
    if not errors:
        return "-"
    sizes = np.abs(errors) * 100
    return (
        f"{np.median(sizes):.1f} ({np.mean(sizes):.0f}, {np.percentile(sizes, 90):.0f}, {np.median(errors) * 100:+.0f})"
    )


def table(title: str, rows: Iterable[tuple[str, Errors]]) -> None:
    """Print a table of errors by metric."""
    print(f"\n| {title} | points | {' | '.join(METRICS.values())} |")
    print(f"|---|---:|{'---:|' * len(METRICS)}")
    for name, errors in rows:
        count = max(map(len, errors.values()), default=0)
        print(f"| {name} | {count} | {' | '.join(cell(errors.get(metric, [])) for metric in METRICS)} |")


def sources(points: Sequence[Point]) -> None:
    """Print what each source measured, and when."""
    print("\n| source | points | engines | dates | licence |\n|---|---:|---|---|---|")
    for name in sorted({point.source for point in points}):
        of = [point for point in points if point.source == name]
        dates = sorted({point.date for point in of if point.date})
        engines = ", ".join(sorted({point.engine_name for point in of}))
        when = "not stated" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        print(f"| {name} | {len(of)} | {engines} | {when} | {', '.join(sorted({p.licence for p in of})) or '-'} |")


def covered(errors: Iterable[tuple[Course, str, float]], constants: Constants) -> Counts:
    """Return whether each error is within one and two of those that reports state; none if these are unmeasured."""
    counts: Counts = {}
    for course, metric, error in errors:
        if metric == "tok_s_gpu" and "tpot_ms" in course.point.measured:
            continue  # the same time once more
        vendor, *of = cell_of(course)
        each = counts.setdefault((f"{vendor}, {of[0]}, {of[1]}", HELD_OUT[metric].upper()), [])
        stated = constants.held_out_of(vendor, *of).get(HELD_OUT[metric])
        if stated is not None:
            each.append((abs(error) <= stated.one_sigma, abs(error) <= (stated.two_sigma or 2 * stated.one_sigma)))
    return counts


def coverage(draws: Sequence[Counts]) -> None:
    """Print the shares of errors within one and two of the stated ones, in the mean of `draws`."""
    print("\n| vendor, kind, load | metric | errors | within ± | within 2 |\n|---|---|---:|---:|---:|")
    for group, metric in sorted({key for counts in draws for key in counts}):
        of_draws = [each for counts in draws if (each := counts.get((group, metric)))]
        one, two = np.mean([np.mean(each, axis=0) for each in of_draws], axis=0) if of_draws else (np.nan, np.nan)
        shares = "unmeasured | " if np.isnan(one) else f"{one:.0%} | {two:.0%}"
        count = round(np.mean([len(each) for each in of_draws])) if of_draws else 0
        print(f"| {group} | {metric} | {count} | {shares} |")


def coverage_held_out(courses: Sequence[Course], prior: Constants, by: str) -> None:
    """Print the coverage of quantiles from one half of the sweeps, on the held-out errors of the other half."""
    with Processes(None) as processes:
        _, found = test_halves(courses, prior, by, processes)
    sweeps = sorted({sweep_of(course.point) for course in courses}, key=str)
    draws = []
    for seed in range(DRAWS):
        order = np.random.default_rng(seed).permutation(len(sweeps))
        first = {sweeps[place] for place in order[::2]}
        known = {name: [pair for pair in pairs if sweep_of(pair[0].point) in first] for name, pairs in found.items()}
        constants = msgspec.structs.replace(prior, held_out=held_out_of([known]))
        others = [
            (course, metric, error)
            for metric, pairs in found.items()
            for course, error in pairs
            if sweep_of(course.point) not in first
        ]
        draws.append(covered(others, constants))
    print(f"\nHeld out by {by}; quantiles of one half of the sweeps, errors of the other, mean of {DRAWS} divisions.")
    coverage(draws)


def errors_of_others(
    courses: Sequence[Course], errors: Sequence[tuple[Course, str, float]]
) -> list[tuple[str, Errors]]:
    """Return the errors of each other predictor, and those of kvarts on the same points and metrics."""
    ours = {(id(course), metric): error for course, metric, error in errors}
    found: dict[str, tuple[Errors, Errors]] = {}
    for course in courses:
        for predictor, answers in course.point.others.items():
            theirs, own = found.setdefault(predictor, ({}, {}))
            for metric, answer in answers.items():
                if metric in course.point.measured:
                    theirs.setdefault(metric, []).append(answer / course.point.measured[metric] - 1.0)
                    own.setdefault(metric, []).append(ours[id(course), metric])
    return [
        pair
        for name, (theirs, own) in sorted(found.items())
        for pair in ((name, theirs), (f"kvarts on the points of {name}", own))
    ]


def main() -> None:
    """Predict every point, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("points", type=Path, nargs="+")
    parser.add_argument("--prior", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--hold-out", choices=sorted(HALVES))
    asked = parser.parse_args()
    constants = shipped_constants() if asked.prior is None else load_constants(asked.prior)
    points, left_out = usable([point for path in asked.points for point in load_points(path)][:: asked.every])
    courses = replayed(points, constants, left_out)
    report(courses, errors_of(courses, constants), left_out)
    if asked.hold_out is not None:
        coverage_held_out(courses, constants, asked.hold_out)


def replayed(points: Sequence[Point], constants: Constants, left_out: dict[str, int]) -> list[Course]:
    """Return the replayed points; those that are refused are added to `left_out`."""
    courses = []
    for point in points:
        try:
            courses += record([point], constants, None)
        except ConfigError:
            left_out["refused"] = left_out.get("refused", 0) + 1
    return courses


def errors_of(courses: Sequence[Course], constants: Constants) -> list[tuple[Course, str, float]]:
    """Return the relative error of each course and metric."""
    found = []
    for course in courses:
        predicted = course.predicted(with_constants(course.cost, constants, course.point.engine_name))
        found += [(course, metric, predicted[metric] / value - 1.0) for metric, value in course.point.measured.items()]
    return found


def report(courses: Sequence[Course], errors: Sequence[tuple[Course, str, float]], left_out: dict[str, int]) -> None:
    """Print all tables."""
    print(f"kvarts {version('kvarts')}: {len(courses):,} points")
    for reason, count in left_out.items():
        print(f"{count:,} left out: {reason}")
    sources([course.point for course in courses])
    print("\nMedian of the absolute errors (mean, 90th percentile, median of the errors), in per cent.")
    for title, of in GROUPS.items():
        found: dict[str, Errors] = {}
        for course, metric, error in errors:
            for name in (of(course), *(["all"] if title == "source" else [])):
                found.setdefault(name, {}).setdefault(metric, []).append(error)
        table(title, sorted(found.items()))
    coverage([covered(errors, shipped_constants())])
    if others := errors_of_others(courses, errors):
        table("predictor", others)


if __name__ == "__main__":
    main()
