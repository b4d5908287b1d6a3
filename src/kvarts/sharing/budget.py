"""Token budgets of models that share a device: a weighted max-min share of every round, in whole tokens.

Active models share by weight. Tokens that a model cannot use, because it is idle, at its ceiling, or was measured to
use less, go to models that can, in proportion to their weights, never past a ceiling. Shares are exact fractions; they
become whole tokens by largest remainder. What rounding took from a model in one round is added to its share in the
next, so that no model with work is left without tokens for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import msgspec

from kvarts.errors import ConfigError

__all__ = ["TokenBudgets"]

PER_MILLE = 1000
DEFAULT_CEILING = 900
"""Per mille of the total, if at least two models are active."""

MOST_KNOWN = 4096
"""Rounds remembered for one set of active models."""

Exact = int | Fraction


class _Member(msgspec.Struct):
    weight: Fraction
    floor: int
    ceiling: int | None
    is_active: bool = True
    used: int | None = None
    """Tokens it was measured to use of a budget that it did not exhaust; None if it could use more."""
    owed: Exact = 0


class TokenBudgets:
    """Owner of the shares. Models are named, and kept in the order of registration, which decides ties.

    `total`: tokens a round; may be changed at any time. Raises ConfigError for a value out of range.
    """

    def __init__(self, total: int) -> None:
        self._members: dict[str, _Member] = {}
        self._total = 0
        self._budgets: dict[str, int] | None = None
        self._weights: dict[str, int] = {}
        """Weights as whole numbers in the same proportions: their sums are faster than those of fractions."""
        self._bounds: dict[tuple[str, ...], _Bounds] = {}
        self._owed: dict[str, Exact] = {}
        """What each model of the present round is owed after it."""
        self.total = total

    @property
    def total(self) -> int:
        """Tokens a round."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        if total < 0:
            raise ConfigError(f"must be at least 0, got {total}", field="total")
        self._total = total
        self._bounds.clear()
        self._budgets = None

    # Models come and go -----------------------------------------------------------------------------------

    def register(self, model: str, weight: float, floor: int = 0, ceiling: int | None = None) -> None:
        """Add `model` as active; or change the weight of a registered model, and nothing else.

        `floor` and `ceiling` are per mille of the total: the least that the model gets while it is active, and the most
        it ever gets. Without a ceiling it may have 900 while another is active, and all while it is alone. Raise
        ConfigError for a weight that is not above 0, a floor above the ceiling, or floors above the whole.
        """
        if not 0 < weight < float("inf"):
            raise ConfigError(f"must be a finite number above 0, got {weight}", field=f"{model}.weight")
        member = self._members.get(model)
        if member is not None:
            member.weight = Fraction(weight)
            self._changed()
            return
        if ceiling is not None and not 1 <= ceiling <= PER_MILLE:
            raise ConfigError(f"must be from 1 to 1000 per mille, got {ceiling}", field=f"{model}.ceiling")
        highest = DEFAULT_CEILING if ceiling is None else ceiling
        if not 0 <= floor <= highest:
            raise ConfigError(f"must be from 0 to {highest} per mille, got {floor}", field=f"{model}.floor")
        floors = floor + sum(other.floor for other in self._members.values())
        if floors > PER_MILLE:
            raise ConfigError(f"would bring all floors to {floors} per mille", field=f"{model}.floor")
        self._members[model] = _Member(Fraction(weight), floor, ceiling)
        self._changed()

    def deregister(self, model: str) -> None:
        """Remove `model`. Raise ConfigError if it is not registered."""
        self._member(model)
        del self._members[model]
        self._changed()

    def set_active(self, model: str, active: bool) -> None:
        """Set whether `model` has work. Its budget changes at once, and so do budgets that got its unused share."""
        member = self._member(model)
        if member.is_active != active:
            member.is_active = active
            member.used = None
            self._budgets = None

    def report_usage(self, model: str, num_tokens: int) -> None:
        """Record the tokens that `model` used in this round, for the next. Raise ConfigError for a number below 0."""
        if num_tokens < 0:
            raise ConfigError(f"must be at least 0, got {num_tokens}", field=f"{model}.usage")
        member = self._member(model)
        # A model that used all it had might have used more.
        used = None if num_tokens >= self.budget_for(model) else num_tokens
        if used != member.used:
            budgets = self.budgets()
            member.used = used
            self._budgets = budgets  # the round under way stays as it is

    # Rounds -----------------------------------------------------------------------------------------------

    def budgets(self) -> dict[str, int]:
        """Return the tokens of each model in this round.

        Their sum is the total, or the sum of the ceilings of active models if that is smaller.
        """
        if self._budgets is None:
            self._budgets = self._divide()
        return dict(self._budgets)

    def budget_for(self, model: str) -> int:
        """Return the tokens of one model in this round, possibly 0. Raise ConfigError if it is not registered."""
        self._member(model)
        return self.budgets()[model]

    def ceiling_for(self, model: str, num_active: int) -> int:
        """Return the most tokens of a round that one model can get while `num_active` models have work.

        Raise ConfigError if it is not registered.
        """
        return self._ceiling(self._member(model), num_active)

    def next_round(self, demands: Mapping[str, int | None] | None = None) -> dict[str, int]:
        """End the round and return the budgets of the next.

        `demands`, if given, replaces everything known of which models are active and what they used: by model, the
        tokens that it could use in the next round, or None for any number. Models left out have no work.
        """
        if self._budgets is not None:  # None if the budgets of the round were never asked for
            for name, owed in self._owed.items():
                if name in self._members:
                    self._members[name].owed = owed
        if demands is not None:
            for name, member in self._members.items():
                member.is_active = name in demands
                member.used = demands.get(name)
        self._budgets = None
        return self.budgets()

    # Inside -----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Take note that models or their weights have changed."""
        scale = lcm(*(member.weight.denominator for member in self._members.values()))
        self._weights = {name: int(member.weight * scale) for name, member in self._members.items()}
        self._bounds.clear()
        self._budgets = None

    def _member(self, model: str) -> _Member:
        member = self._members.get(model)
        if member is None:
            known = ", ".join(self._members) or "none"
            raise ConfigError("is not registered", field=model, hint=f"There are: {known}.")
        return member

    def _divide(self) -> dict[str, int]:
        members = self._members
        counting = [name for name, member in members.items() if member.is_active] or list(members)
        bounds = self._bounds.get(tuple(counting))
        if bounds is None:
            ceilings = {name: self._ceiling(members[name], len(counting)) for name in counting}
            bounds = self._bounds[tuple(counting)] = _Bounds(
                {name: self._weights[name] for name in counting},
                {name: self._total * members[name].floor // PER_MILLE for name in counting},
                ceilings,
                min(self._total, sum(ceilings.values())),
            )
        used = tuple([members[name].used for name in counting])
        owed = tuple([members[name].owed for name in counting])
        of_round = bounds.rounds.get((used, owed)) or bounds.divide(used, owed)
        self._owed = of_round.owed
        return {**dict.fromkeys(members, 0), **of_round.budgets}

    def _ceiling(self, member: _Member, num_active: int) -> int:
        """Return the ceiling of `member` in tokens, at least 1 if it is above 0 per mille."""
        default = DEFAULT_CEILING if num_active > 1 else PER_MILLE
        per_mille = default if member.ceiling is None else member.ceiling
        return min(self._total, max(1, self._total * per_mille // PER_MILLE))


class _Round(msgspec.Struct, frozen=True):
    """One division: whole tokens by model, and what each is owed after it because shares are not whole."""

    budgets: dict[str, int]
    owed: dict[str, Exact]


class _Bounds(msgspec.Struct):
    """Bounds of the shares of the active models, valid as long as these are the same and no model registers."""

    weights: dict[str, int]
    floors: dict[str, int]
    ceilings: dict[str, int]
    total: int
    """The sum of their shares."""
    rounds: dict[tuple[tuple[int | None, ...], tuple[Exact, ...]], _Round] = {}
    """Rounds by what models were measured to use and are owed: rounding comes back to the same few states."""

    def divide(self, used: tuple[int | None, ...], owed: tuple[Exact, ...]) -> _Round:
        """Return a round of models that were measured to use `used`, or could use more (None), and are owed `owed`."""
        shares = self._share(used)
        due = {name: share + before for (name, share), before in zip(shares.items(), owed, strict=True)}
        budgets = _whole(due, self.floors, self.ceilings, self.total)
        if len(self.rounds) >= MOST_KNOWN:
            self.rounds.clear()
        of_round = self.rounds[used, owed] = _Round(budgets, {name: due[name] - budgets[name] for name in due})
        return of_round

    def _share(self, used: tuple[int | None, ...]) -> dict[str, Exact]:
        floors, ceilings = self.floors, self.ceilings
        wanted = {
            name: ceiling if tokens is None else min(ceiling, max(floors[name], tokens))
            for (name, ceiling), tokens in zip(ceilings.items(), used, strict=True)
        }
        shares = _fill(self.weights, floors, wanted, min(self.total, sum(wanted.values())))
        left = self.total - sum(shares.values())
        if left:
            # No model was measured to want it; give it to any that may have it.
            room = {name: ceilings[name] - share for name, share in shares.items()}
            more = _fill(self.weights, dict.fromkeys(floors, 0), room, left)
            shares = {name: share + more[name] for name, share in shares.items()}
        return shares


def _fill(
    weights: Mapping[str, Exact], lowest: Mapping[str, Exact], highest: Mapping[str, Exact], total: Exact
) -> dict[str, Exact]:
    """Return shares in proportion to `weights`, each between its bounds, that add up to `total`.

    They are those of one water level: max(lowest, min(highest, level x weight)). As long as the part of some model in
    what is left is out of its bounds, the models on the side that is further out in sum keep to their bound, and the
    others share the rest; they can only be further out on that side. (The way flexible lengths are resolved in CSS.)
    """
    shares: dict[str, Exact] = {}
    rising = list(weights)
    left = total
    while rising:
        whole = sum(weights[name] for name in rising)
        too_low = [name for name in rising if left * weights[name] < lowest[name] * whole]
        too_high = [name for name in rising if left * weights[name] > highest[name] * whole]
        if not too_low and not too_high:
            for name in rising:
                quotient, rest = divmod(left * weights[name], whole)
                shares[name] = quotient + Fraction(rest, whole) if rest else quotient
            break
        missing = sum(lowest[name] * whole - left * weights[name] for name in too_low)
        beyond = sum(left * weights[name] - highest[name] * whole for name in too_high)
        if missing >= beyond:
            shares.update({name: lowest[name] for name in too_low})
        if beyond >= missing:
            shares.update({name: highest[name] for name in too_high})
        rising = [name for name in rising if name not in shares]
        left = total - sum(shares.values())
    return {name: shares[name] for name in weights}


def _whole(
    shares: Mapping[str, Exact], lowest: Mapping[str, int], highest: Mapping[str, int], total: int
) -> dict[str, int]:
    """Return whole tokens that add up to `total`, each within its bounds: floors plus the rest by largest remainder."""
    tokens = {name: max(lowest[name], min(highest[name], share.__floor__())) for name, share in shares.items()}
    left = total - sum(tokens.values())
    while left:
        sign = 1 if left > 0 else -1
        bound = highest if left > 0 else lowest
        open_to = [name for name in tokens if tokens[name] != bound[name]]
        ranked = sorted(open_to, key=lambda name: sign * (tokens[name] - shares[name]))
        assert ranked, "floors or ceilings leave no way to add up"
        for name in ranked[: abs(left)]:
            tokens[name] += sign
            left -= sign
    return tokens
