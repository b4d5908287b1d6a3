"""Token budgets of models that share a device: a weighted max-min share of every round, in whole tokens.

Active models share by weight. If a model cannot use some of its tokens, because it is idle, at its ceiling, or was
measured to use less, the others get them in proportion to their weights, up to their ceilings. Shares are exact
fractions, rounded to whole tokens by largest remainder. A model's rounding loss in one round is added to its share in
the next, so that every model with work gets tokens in the long run.
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
"""Most rounds that are remembered for one set of active models."""

Exact = int | Fraction


class _Member(msgspec.Struct):
    weight: Fraction
    floor: int
    ceiling: int | None
    is_active: bool = True
    used: int | None = None
    """Tokens that it was measured to use of a budget that it did not exhaust; None if it could use more."""
    owed: Exact = 0


class TokenBudgets:
    """Owner of the shares. Ties are decided by the order of registration.

    `total`: tokens per round; may be changed at any time. Raises ConfigError for a value out of range.
    """

    def __init__(self, total: int) -> None:
        self._members: dict[str, _Member] = {}
        self._total = 0
        self._budgets: dict[str, int] | None = None
        self._weights: dict[str, int] = {}
        """Weights as whole numbers in the same proportions: adding these is faster than adding fractions."""
        self._bounds: dict[tuple[str, ...], _Bounds] = {}
        self._owed: dict[str, Exact] = {}
        """Tokens owed to each model of the present round after it."""
        self.total = total

    @property
    def total(self) -> int:
        """Tokens per round."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        if total < 0:
            raise ConfigError(f"must be at least 0, got {total}", field="total")
        self._total = total
        self._bounds.clear()
        self._budgets = None

    # Registration -----------------------------------------------------------------------------------------

    def register(self, model: str, weight: float, floor: int = 0, ceiling: int | None = None) -> None:
        """Add `model` as active; if it is registered, change only its weight.

        `floor` and `ceiling` are per mille of the total: the least that the model gets while it is active, and the most
        that it ever gets. The default ceiling is 900 while another model is active, and 1000 otherwise. Raise
        ConfigError for a weight that is not above 0, a floor above the ceiling, or floors that add up to more than
        1000.
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
        """Set whether `model` has work. Budgets change at once: its own, and those that include its unused share."""
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
        # A model that used its whole budget might have used more.
        used = None if num_tokens >= self.budget_for(model) else num_tokens
        if used != member.used:
            budgets = self.budgets()
            member.used = used
            self._budgets = budgets  # the current round stays as it is

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
        """Return the most tokens per round that one model can get while `num_active` models have work.

        Raise ConfigError if it is not registered.
        """
        return self._ceiling(self._member(model), num_active)

    def next_round(self, demands: Mapping[str, int | None] | None = None) -> dict[str, int]:
        """End the round and return the budgets of the next.

        `demands`, if given, replaces the recorded activity and usage of all models: for each model with work, the
        tokens that it could use in the next round, or None for any number.
        """
        if self._budgets is not None:  # None if the budgets of the round were never requested
            for name, owed in self._owed.items():
                if name in self._members:
                    self._members[name].owed = owed
        if demands is not None:
            for name, member in self._members.items():
                member.is_active = name in demands
                member.used = demands.get(name)
        self._budgets = None
        return self.budgets()

    # Division ---------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Recompute integer weights and discard cached rounds after a change of models or weights."""
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
    """One division: whole tokens by model, and the fraction of a token that each is owed after it."""

    budgets: dict[str, int]
    owed: dict[str, Exact]


class _Bounds(msgspec.Struct):
    """Bounds of the active models' shares, valid until a model registers or another set is active."""

    weights: dict[str, int]
    floors: dict[str, int]
    ceilings: dict[str, int]
    total: int
    """The sum of their shares."""
    rounds: dict[tuple[tuple[int | None, ...], tuple[Exact, ...]], _Round] = {}
    """Rounds by the models' measured usage and owed fractions: rounding cycles through a few states."""

    def divide(self, used: tuple[int | None, ...], owed: tuple[Exact, ...]) -> _Round:
        """Return the round for each model's measured usage `used` (None: could use more) and fraction `owed`."""
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
            # No model was measured to need these tokens; any model below its ceiling may have them.
            room = {name: ceilings[name] - share for name, share in shares.items()}
            more = _fill(self.weights, dict.fromkeys(floors, 0), room, left)
            shares = {name: share + more[name] for name, share in shares.items()}
        return shares


def _fill(
    weights: Mapping[str, Exact], lowest: Mapping[str, Exact], highest: Mapping[str, Exact], total: Exact
) -> dict[str, Exact]:
    """Return shares in proportion to `weights`, each between its bounds, that add up to `total`.

    They have a common water level: max(lowest, min(highest, level x weight)). While the proportional part of some model
    is out of bounds, sum up the violations on each side, and fix the models on the side with the larger sum at their
    bound; the others share the rest. Later rounds cannot move a fixed model back inside its bounds. (CSS resolves
    flexible lengths in the same way.)
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
    """Return whole tokens that add up to `total`, within bounds: rounded down, the rest by largest remainder."""
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
