"""Shares of a device's time: in proportion to weights, within floors and ceilings. They add up to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from kvarts.errors import ConfigError

__all__ = ["shares_of"]

PER_MILLE = 1000


def shares_of(
    weights: Mapping[str, float], floors: Mapping[str, int], ceilings: Mapping[str, int | None]
) -> dict[str, Fraction]:
    """Return the share of each model, by name.

    `floors` and `ceilings` (None: 1000) are per mille of the time. Raise ConfigError for a floor above its ceiling, for
    floors that add up to more than 1000 or leave nothing to a model, and for ceilings that add up to less.
    """
    lowest, highest = {}, {}
    for model, ceiling in ceilings.items():
        most = PER_MILLE if ceiling is None else ceiling
        if not 1 <= most <= PER_MILLE:
            raise ConfigError(f"must be from 1 to 1000 per mille, got {most}", field=f"{model}.ceiling")
        if not 0 <= floors[model] <= most:
            raise ConfigError(f"must be from 0 to {most} per mille, got {floors[model]}", field=f"{model}.floor")
        lowest[model], highest[model] = Fraction(floors[model], PER_MILLE), Fraction(most, PER_MILLE)
    if sum(lowest.values()) > 1:
        last = [model for model in weights if floors[model]][-1]
        raise ConfigError(
            f"brings all floors to {sum(floors.values())} per mille",
            field=f"{last}.floor",
            hint="Give floors that add up to at most 1000.",
        )
    if sum(highest.values()) < 1:
        last = [model for model in weights if ceilings[model] is not None][-1]
        raise ConfigError(
            f"leaves {int(1000 - 1000 * sum(highest.values()))} per mille of the time to no model",
            field=f"{last}.ceiling",
            hint="Give ceilings that add up to at least 1000.",
        )
    exact = {model: Fraction(str(weight)) for model, weight in weights.items()}
    shares = _fill(exact, lowest, highest)
    for model, share in shares.items():
        if not share:
            raise ConfigError("is left no time by the floors of the others", field=f"{model}.weight")
    return shares


def _fill(
    weights: Mapping[str, Fraction], lowest: Mapping[str, Fraction], highest: Mapping[str, Fraction]
) -> dict[str, Fraction]:
    """Return shares in proportion to `weights`, each between its bounds, that add up to 1.

    They have a common water level: max(lowest, min(highest, level x weight)). While the proportional share of some
    model is out of bounds, sum up the violations on each side, and fix the models on the side with the larger sum at
    their bound; the others share the rest. Later passes cannot move a fixed model back inside its bounds. (CSS resolves
    flexible lengths in the same way.)
    """
    shares: dict[str, Fraction] = {}
    rising: Sequence[str] = list(weights)
    while rising:
        left = 1 - sum(shares.values(), Fraction(0))
        whole = sum(weights[name] for name in rising)
        part = {name: left * weights[name] / whole for name in rising}
        missing = {name: lowest[name] - part[name] for name in rising if part[name] < lowest[name]}
        beyond = {name: part[name] - highest[name] for name in rising if part[name] > highest[name]}
        if not missing and not beyond:
            shares.update(part)
            break
        if sum(missing.values()) >= sum(beyond.values()):
            shares.update({name: lowest[name] for name in missing})
        if sum(beyond.values()) >= sum(missing.values()):
            shares.update({name: highest[name] for name in beyond})
        rising = [name for name in rising if name not in shares]
    return {name: shares[name] for name in weights}
