"""`kvarts calibrate --points`: fits the constants that all rooflines share, and writes them as a prior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvarts.errors import ConfigError

if TYPE_CHECKING:
    from kvarts.calibrate.shared import Errors, PointsFit
    from kvarts.executor.constants import Constants

__all__ = ["fit_table", "parse_hold_out"]

UNITS = {"tpot_ms": "TPOT", "ttft_ms": "TTFT", "e2e_ms": "E2E", "tok_s_gpu": "tokens/s"}


def parse_hold_out(text: str | None) -> list[str]:
    """Return the fields of a list such as `source,gpu`. Raise ConfigError for another one."""
    from kvarts.calibrate.shared import HALVES

    names = [] if text is None else text.split(",")
    for name in names:
        if name not in HALVES:
            raise ConfigError(f"{name!r} is not one of {', '.join(HALVES)}", field="hold_out")
    return names


def fit_table(
    path: Path, prior: Constants, hold_out: Sequence[str], on_progress: Callable[[int], object] | None
) -> tuple[str, dict[str, Any], str]:
    """Fit to the points at `path`. Return what is printed, the same JSON-able, and the TOML of the fitted constants.

    Raise ConfigError for a point that cannot be replayed, MissingFileError and InputError for files.
    """
    from kvarts.calibrate.points import load_points
    from kvarts.calibrate.shared import fit_points, held_out_of, record, test_halves

    points = load_points(path)
    courses = record(points, prior, on_progress)
    found = fit_points(courses, prior)
    halves: dict[str, dict[str, Errors]] = {}
    held_out = []
    for by in hold_out:
        halves[by], each = test_halves(courses, prior, by)
        held_out.append(each)
    constants = msgspec.structs.replace(found.constants, held_out=held_out_of(held_out) if held_out else [])
    report = {
        "num_points": len(points),
        "constants": msgspec.to_builtins(found.worth),
        "before": msgspec.to_builtins(found.before),
        "after": msgspec.to_builtins(found.after),
        "held_out": {by: msgspec.to_builtins(errors) for by, errors in halves.items()},
    }
    return _as_text(len(points), found, halves), report, as_toml(constants, path.name, len(points))


def _as_text(num_points: int, found: PointsFit, halves: dict[str, dict[str, Errors]]) -> str:
    lines = [f"{num_points:,} points", f"  {'':<24}{'prior':>9}{'fitted':>9}{'+-':>7}   worth, in nats"]
    lines += [
        f"  {each.name:<24}{each.prior:>9.4g}{each.value:>9.4g}{each.deviation:>7.0%}{each.gain:>10,.1f}"
        for each in found.worth
    ]
    lines.append("  error                      median     p90    bias  points")
    lines += _errors("before", found.before)
    lines += _errors("after", found.after)
    for by, errors in halves.items():
        lines += _errors(f"held out by {by}", errors)
    return "\n".join(lines) + "\n"


def _errors(when: str, errors: dict[str, Errors]) -> list[str]:
    return [
        f"  {when:<18}{UNITS[metric]:<8}{each.median:>7.1%}{each.p90:>8.1%}{each.bias:>+8.1%}{each.num_points:>8,}"
        for metric, each in errors.items()
    ]


def as_toml(constants: Constants, name: str, num_points: int) -> str:
    """Return constants as load_constants reads them, to four digits."""
    lines = [f"# Fitted by kvarts calibrate --points to {num_points:,} points of {name}."]
    for title in ("values", "deviations"):
        lines += ["", f"[{title}]", *(f"{key} = {value:.4g}" for key, value in getattr(constants, title).items())]
    for row in constants.held_out:
        lines += ["", "[[held_out]]"]
        lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in msgspec.to_builtins(row).items()]
    return "\n".join(lines) + "\n"
