"""Fits the constants that all rooflines share to a table of measured points, and writes them as a prior."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvarts.calibrate.points import load_points
from kvarts.calibrate.shared import (
    HALVES,
    Errors,
    PointsFit,
    fit_points,
    held_out_of,
    record,
    test_halves,
)
from kvarts.errors import ConfigError
from kvarts.executor.constants import Constants, shipped_constants

__all__ = ["TableFit", "fit_table"]

UNITS = {"tpot_ms": "TPOT", "ttft_ms": "TTFT", "e2e_ms": "E2E", "tok_s_gpu": "tokens/s"}


class TableFit(msgspec.Struct, frozen=True):
    """Result of a fit to the `num_points` points of the table `name`. `held_out`: errors by field and metric."""

    name: str
    num_points: int
    found: PointsFit
    held_out: Mapping[str, Mapping[str, Errors]]
    constants: Constants

    def to_text(self) -> str:
        """Return the text that `kvarts calibrate --points` prints, with a line end."""
        lines = [f"{self.num_points:,} points", f"  {'':<24}{'prior':>9}{'fitted':>9}{'+-':>7}   worth, in nats"]
        lines += [
            f"  {each.name:<24}{each.prior:>9.4g}{each.value:>9.4g}{each.deviation:>7.0%}{each.gain:>10,.1f}"
            for each in self.found.worth
        ]
        lines.append("  error                      median     p90    bias  points")
        lines += _errors("before", self.found.before)
        lines += _errors("after", self.found.after)
        for by, errors in self.held_out.items():
            lines += _errors(f"held out by {by}", errors)
        return "\n".join(lines) + "\n"

    def to_builtins(self) -> dict[str, Any]:
        """Return the fit, JSON-able."""
        return {
            "num_points": self.num_points,
            "constants": msgspec.to_builtins(self.found.worth),
            "before": msgspec.to_builtins(self.found.before),
            "after": msgspec.to_builtins(self.found.after),
            "held_out": {by: msgspec.to_builtins(errors) for by, errors in self.held_out.items()},
        }

    def to_toml(self) -> str:
        """Return the constants in the format of load_constants, to four digits."""
        lines = [f"# Fitted by kvarts calibrate --points to {self.num_points:,} points of {self.name}."]
        for title in ("values", "deviations"):
            values = getattr(self.constants, title)
            lines += ["", f"[{title}]", *(f"{key} = {value:.4g}" for key, value in values.items())]
        for row in self.constants.held_out:
            lines += ["", "[[held_out]]"]
            values = msgspec.to_builtins(row)
            lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


def fit_table(
    path: Path | str,
    *,
    prior: Constants | None = None,
    hold_out: Sequence[str] = (),
    on_progress: Callable[[int], object] | None = None,
) -> TableFit:
    """Fit to the points at `path`, starting from `prior`; default: the built-in constants.

    `hold_out`: fields by which the points are also halved; each half is predicted from a fit to the other.
    `on_progress` receives the number of points replayed. Raise ConfigError without SciPy, for an unknown field, and for
    a point that cannot be replayed; MissingFileError and InputError for files.
    """
    for name in hold_out:
        if name not in HALVES:
            raise ConfigError(f"{name!r} is not one of {', '.join(HALVES)}", field="hold_out")
    path = Path(path)
    prior = prior or shipped_constants()
    points = load_points(path)
    courses = record(points, prior, on_progress)
    found = fit_points(courses, prior)
    halves: dict[str, dict[str, Errors]] = {}
    held_out = []
    for by in hold_out:
        halves[by], each = test_halves(courses, prior, by)
        held_out.append(each)
    constants = msgspec.structs.replace(found.constants, held_out=held_out_of(held_out) if held_out else [])
    return TableFit(path.name, len(points), found, halves, constants)


def _errors(when: str, errors: Mapping[str, Errors]) -> list[str]:
    return [
        f"  {when:<18}{UNITS[metric]:<8}{each.median:>7.1%}{each.p90:>8.1%}{each.bias:>+8.1%}{each.num_points:>8,}"
        for metric, each in errors.items()
    ]
