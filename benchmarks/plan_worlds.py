"""How often the worlds of a plan contain the step times that were measured, of points that were held out.

    python benchmarks/plan_worlds.py POINTS.csv [MORE.csv ...] [--prior FILE] [--every N] [--workers N]

POINTS.csv: tables of measured points, as `kvarts calibrate --points` takes them. Constants are fitted, from --prior, to
one half of the points, and predict the other, with the tables halved by source, device and model. A held-out
point is `measured` if the fitted half has its model on its device, `near` if it has its device only, and `extrapolated`
if it has neither. A plan's answer that holds in k of 10 worlds holds up to a factor on step times; the table has the
share of points whose measured time is within that factor, which should be k tenths; with clustered points each point
counts as one, so the shares are as uncertain as of far fewer. The last column is the factor on the held-out error of
the constants that ship with which nine of ten points are within 9 of 10 worlds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from kvarts.base.errors import ConfigError
from kvarts.base.processes import Processes
from kvarts.cost.roofline_settings import Constants, load_constants, shipped_constants
from kvarts.plan.calibrate.joint_fit import HALVES, cell_of, halves_of, record, test_halves
from kvarts.plan.calibrate.schedule import Course, Point, load_points, usable
from kvarts.plan.confidence import COST_ERROR, NINE_IN_TEN, WIDER, error_of, world_factor

GUESSES = Path(__file__).with_name("guesses.toml")
WORLDS = (5, 6, 7, 8, 9)
Held = tuple[str, float, float]
"""Evidence, measured over predicted time, and the held-out error (one sigma) of its cell."""


def starts(point: Point) -> bool:
    """Return whether a replay of the point starts: vLLM refuses some at a model's own longest length."""
    try:
        point.config()
    except ConfigError as error:
        print(f"left out: {point.model} on {point.gpu}: {error.what[:80]}", file=sys.stderr)
        return False
    return True


def held_out(courses: Sequence[Course], by: str, prior: Constants, processes: Processes) -> Iterator[Held]:
    """Yield every point with a step time, predicted from the half without it."""
    points = [course.point for course in courses]
    half = halves_of(points, by)
    side = {id(point): where for point, where in zip(points, half, strict=True)}
    pairs = [{(point.gpu, point.model) for point in points if side[id(point)] is where} for where in (False, True)]
    _, errors = test_halves(courses, prior, by, processes)
    for metric in ("tpot_ms", "tok_s_gpu"):
        for course, error in errors.get(metric, ()):
            point = course.point
            if metric == "tok_s_gpu" and "tpot_ms" in point.measured:
                continue
            fitted = pairs[not side[id(point)]]
            is_known = any(gpu == point.gpu for gpu, _ in fitted)
            evidence = "measured" if (point.gpu, point.model) in fitted else "near" if is_known else "extrapolated"
            vendor, *of = cell_of(course)
            stated = shipped_constants().held_out_of(vendor, *of).get("tpot")
            sigma = COST_ERROR / NINE_IN_TEN if stated is None else stated.one_sigma
            slower = 1.0 + error if metric == "tok_s_gpu" else 1.0 / (1.0 + error)
            yield evidence, slower, sigma


def row(name: str, held: Sequence[Held], wider: float | None) -> None:
    """Print the shares of points within worlds. `wider`: the factor on all errors; None: that of their evidence."""
    shares = []
    for num in WORLDS:
        deviations = NormalDist().inv_cdf(num / 10)
        within = [
            slower <= world_factor(error_of(sigma, WIDER[evidence] if wider is None else wider), deviations)
            for evidence, slower, sigma in held
        ]
        shares.append(f"{np.mean(within):.0%}")
    needed = np.quantile([(slower - 1.0) / (NINE_IN_TEN * sigma) for _, slower, sigma in held], 0.9)
    print(f"| {name} | {len(held):,} | {' | '.join(shares)} | {needed:.2f} |", flush=True)


def main() -> None:
    """Fit, predict and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, nargs="+")
    parser.add_argument("--prior", type=Path, default=GUESSES)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    prior = load_constants(arguments.prior)
    points, _ = usable([point for path in arguments.points for point in load_points(path)][:: arguments.every])
    points = [point for point in points if starts(point)]
    found: list[tuple[str, Held]] = []
    with Processes(arguments.workers) as processes:
        courses = record(points, prior, None, processes)
        for by in HALVES:
            found += [(by, held) for held in held_out(courses, by, prior, processes)]
    heads = " | ".join(f"{num} of 10" for num in WORLDS)
    print(f"{len(courses):,} points\n\n| evidence | held out | {heads} | factor |")
    print(f"|---|---:|{'---:|' * (len(WORLDS) + 1)}")
    for evidence in ("measured", "near", "extrapolated"):
        if held := [each for _, each in found if each[0] == evidence]:
            row(evidence, held, None)
    for by in HALVES:
        row(f"by {by}", [each for halved, each in found if halved == by], None)
    row("all, one factor for all", [each for _, each in found], 1.0)


if __name__ == "__main__":
    main()
