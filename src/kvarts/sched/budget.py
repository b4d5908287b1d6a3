"""Token budgets of models that share a device: a weighted max-min share of every round, in whole tokens.

Active models share by weight. What one cannot use, because it is idle, at its ceiling, or was measured to use less,
goes to those that can, in proportion to their weights, never past a ceiling. Shares are exact fractions; they become
whole tokens by largest remainder, and what rounding took from a model in one round is owed to it in the next, so that
nobody with work gets nothing for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import msgspec

from kvarts.errors import ConfigError

__all__ = ["TokenBudgets"]

PER_MILLE = 1000
DEFAULT_CEILING = 900
"""Per mille of the total, where at least two are active."""


class _Member(msgspec.Struct):
    weight: Fraction
    floor: int
    ceiling: int | None
    is_active: bool = True
    used: int | None = None
    """Tokens it was measured to use of a budget that it did not use up; None: it could use more."""
    owed: Fraction = Fraction(0)


class TokenBudgets:
    """Owner of the shares. Models go by name, in the order in which they were registered, which decides ties.

    `total`: tokens a round; may be changed at any time. Raises ConfigError for a value out of range.
    """

    def __init__(self, total: int) -> None:
        self._members: dict[str, _Member] = {}
        self._total = 0
        self._budgets: dict[str, int] | None = None
        self._shares: dict[str, Fraction] = {}
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
        self._budgets = None

    # Models come and go -----------------------------------------------------------------------------------

    def register(self, model: str, weight: float, *, floor: int = 0, ceiling: int | None = None) -> None:
        """Adds `model`, active; or changes the weight of one that is there, and nothing else.

        `floor` and `ceiling` are per mille of the total: what it always gets while it is active, and what it never gets
        more of. Without a ceiling it may have 900 while another is active, and all while it is alone. Raises
        ConfigError for a weight that is not above 0, a floor above the ceiling, or floors above the whole.
        """
        if not 0 < weight < float("inf"):
            raise ConfigError(f"must be a finite number above 0, got {weight}", field=f"{model}.weight")
        member = self._members.get(model)
        if member is not None:
            member.weight = Fraction(weight)
            self._budgets = None
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
        self._budgets = None

    def deregister(self, model: str) -> None:
        """Takes `model` out. Raises ConfigError for one that is not there."""
        self._member(model)
        del self._members[model]
        self._budgets = None

    def set_active(self, model: str, active: bool) -> None:
        """Whether `model` has work. Its budget changes at once, and so do those that had been lent its share."""
        member = self._member(model)
        if member.is_active != active:
            member.is_active = active
            member.used = None
            self._budgets = None

    def report_usage(self, model: str, num_tokens: int) -> None:
        """What `model` used in the round under way; the next one knows. Raises ConfigError for a number below 0."""
        if num_tokens < 0:
            raise ConfigError(f"must be at least 0, got {num_tokens}", field=f"{model}.usage")
        member = self._member(model)
        # Who used all it had might have used more.
        used = None if num_tokens >= self.budget_for(model) else num_tokens
        if used != member.used:
            budgets = self.budgets()
            member.used = used
            self._budgets = budgets  # the round under way stays as it is

    # Rounds -----------------------------------------------------------------------------------------------

    def budgets(self) -> dict[str, int]:
        """Tokens of each model in this round; together the smaller of the total and of all ceilings of the active."""
        if self._budgets is None:
            self._budgets = self._divide()
        return dict(self._budgets)

    def budget_for(self, model: str) -> int:
        """Tokens of one model in this round. Raises ConfigError for one that is not there; 0 is a number."""
        self._member(model)
        return self.budgets()[model]

    def next_round(self) -> dict[str, int]:
        """Ends the round, and answers the budgets of the next."""
        budgets = self.budgets()
        for name, share in self._shares.items():
            if name in self._members:
                self._members[name].owed += share - budgets[name]
        self._budgets = None
        return self.budgets()

    # Inside -----------------------------------------------------------------------------------------------

    def _member(self, model: str) -> _Member:
        member = self._members.get(model)
        if member is None:
            known = ", ".join(self._members) or "none"
            raise ConfigError("is not registered", field=model, hint=f"There are: {known}.")
        return member

    def _divide(self) -> dict[str, int]:
        counting = {name: member for name, member in self._members.items() if member.is_active} or self._members
        ceilings = {name: self._ceiling(member, len(counting)) for name, member in counting.items()}
        floors = {name: self._total * member.floor // PER_MILLE for name, member in counting.items()}
        weights = {name: member.weight for name, member in counting.items()}
        total = min(self._total, sum(ceilings.values()))
        wanted = {
            name: ceilings[name] if member.used is None else min(ceilings[name], max(floors[name], member.used))
            for name, member in counting.items()
        }
        shares = _fill(weights, floors, wanted, min(total, sum(wanted.values())))
        left = total - sum(shares.values())
        if left:
            # Nobody was measured to want it; whoever may have it can have it.
            room = {name: ceilings[name] - share for name, share in shares.items()}
            more = _fill(weights, dict.fromkeys(counting, 0), room, left)
            shares = {name: share + more[name] for name, share in shares.items()}
        self._shares = shares
        owed = {name: shares[name] + member.owed for name, member in counting.items()}
        budgets = dict.fromkeys(self._members, 0)
        budgets.update(_whole(owed, floors, ceilings, total))
        return budgets

    def _ceiling(self, member: _Member, num_counting: int) -> int:
        """In tokens; what is allowed anything is allowed one."""
        default = DEFAULT_CEILING if num_counting > 1 else PER_MILLE
        per_mille = default if member.ceiling is None else member.ceiling
        return min(self._total, max(1, self._total * per_mille // PER_MILLE))


def _fill(
    weights: Mapping[str, Fraction],
    lowest: Mapping[str, int | Fraction],
    highest: Mapping[str, int | Fraction],
    total: int | Fraction,
) -> dict[str, Fraction]:
    """Shares in proportion to `weights`, each between its bounds, that add up to `total`.

    They are those of one water level: max(lowest, min(highest, level x weight)). The level is found among the points at
    which somebody reaches a bound.
    """
    points = {Fraction(0)}
    for name, weight in weights.items():
        points |= {lowest[name] / weight, highest[name] / weight}

    def shares_at(level: Fraction) -> dict[str, Fraction]:
        return {
            name: max(Fraction(lowest[name]), min(Fraction(highest[name]), level * weight))
            for name, weight in weights.items()
        }

    below = Fraction(0)
    for point in sorted(points):
        if sum(shares_at(point).values()) > total:
            break
        below = point
    shares = shares_at(below)
    rising = [name for name, weight in weights.items() if lowest[name] <= below * weight < highest[name]]
    missing = Fraction(total) - sum(shares.values(), Fraction(0))
    if missing > 0 and rising:
        # Between two points all that rise do so in proportion to their weights.
        step = missing / sum((weights[name] for name in rising), Fraction(0))
        for name in rising:
            shares[name] += step * weights[name]
    return shares


def _whole(
    shares: Mapping[str, Fraction], lowest: Mapping[str, int], highest: Mapping[str, int], total: int
) -> dict[str, int]:
    """Whole tokens that add up to `total`, each within its bounds: rounded down, the rest to the largest remainders."""
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
