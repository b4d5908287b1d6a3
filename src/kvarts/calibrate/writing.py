"""A fitted cost model as text, as JSON-able values, and as the file that `kvarts replay --cost` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvarts.calibrate.coefficients import at_limit
from kvarts.executor.constants import COEFFICIENTS
from kvarts.executor.roofline import RooflineCost

__all__ = ["coefficients_text", "cost_toml", "cost_values", "finite"]

KEPT = ("tensor_parallel", "graph_tokens", *COEFFICIENTS)
"""Fields that are written to a file even at their default, which other releases may change."""


def cost_values(cost: RooflineCost) -> dict[str, Any]:
    """Return the fields of a cost model, without its uncertainty."""
    values: dict[str, Any] = msgspec.to_builtins(cost)
    del values["uncertainty"]
    return values


def finite(shares: Mapping[str, float]) -> dict[str, float | None]:
    """Return `shares` with infinite values replaced by None."""
    return {name: share if share < float("inf") else None for name, share in shares.items()}


def coefficients_text(
    cost: RooflineCost,
    uncertainty: Mapping[str, float],
    not_identified: Sequence[str],
    why: str,
    beyond_transfer: Sequence[str] = (),
) -> str:
    """Return a line per fitted coefficient, with a line end. `why`: the note on those that are not identified."""
    limited = at_limit(cost, uncertainty)
    lines = [f"{cost.llm} on {cost.device}"]
    for name, share in uncertainty.items():
        unsure = "these data do not say" if share == float("inf") else f"+- {share:.0%}"
        if name in not_identified and share < float("inf"):
            unsure += f", {why}"
        if name in beyond_transfer:
            unsure += ", farther from its prior than holds for other models"
        if name in limited:
            unsure += ", at the limit of the search: is the device what was measured?"
        lines.append(f"  {name:<22}{cost.coefficient(name):>12.4g}   {unsure}")
    return "\n".join(lines) + "\n"


def cost_toml(cost: RooflineCost, uncertainty: Mapping[str, float], measured: Sequence[str]) -> str:
    """Return a cost model as the text of a file. `measured`: names of the measurements it was fitted to."""
    lines = [f"# Fitted by kvarts calibrate to {', '.join(measured)}.", "[cost]"]
    defaults = {field.name: field.default for field in msgspec.structs.fields(cost)}
    for name, value in cost_values(cost).items():
        if value is not None and (name in KEPT or value != defaults.get(name, msgspec.NODEFAULT)):
            lines.append(f"{name} = {_toml(value)}")
    lines += ["", "[uncertainty]  # as a share of each; left out, these data do not say"]
    lines += [f"{name} = {share!r}" for name, share in finite(uncertainty).items() if share is not None]
    if cost.uncertainty is not None:
        posterior = msgspec.to_builtins(cost.uncertainty)
        lines += ["", "[posterior]  # of the logarithms: what replays say of their uncertainty follows from it"]
        lines.append(f"coefficients = {_toml(posterior['coefficients'])}")
        lines.append("covariance = [")
        lines += [f"  {_toml(row)}," for row in posterior["covariance"]]
        lines.append("]")
        for each in posterior["measured"]:
            lines += ["", "[[posterior.measured]]", *(f"{name} = {_toml(value)}" for name, value in each.items())]
        for table in ("elsewhere", "deviations"):
            if values := posterior[table]:
                lines += ["", f"[posterior.{table}]", *(f"{name} = {value!r}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()
