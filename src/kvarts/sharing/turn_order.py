"""What a device asks of the order in which its models take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvarts.sharing.tenant import Tenant

__all__ = ["TurnOrder"]


class TurnOrder(Protocol):
    """Which model has the next turn, and how many tokens it may compute in it.

    Promises: the answers follow from the calls alone. Turns done at once, with `leap`, leave it as the same turns one
    by one do.
    """

    def begin(self) -> None:
        """Take note that no model could step until now."""

    def next(self, now_ns: int) -> Tenant | None:
        """Return the model that has the next turn, of those that can step; None if none can."""

    def pass_turn(self, tenant: Tenant) -> None:
        """Begin the turn of `tenant`."""

    def take_budget(self, tenant: Tenant, now_ns: int) -> int | None:
        """Return the tokens that `tenant` may compute in its turn, which is over if these are too few: then None."""

    def spend(self, tenant: Tenant, num_tokens: int, duration_ns: int) -> None:
        """Count the tokens that `tenant` computed in its turn, and the time that it took."""

    # Many turns at once

    def may_leap(self) -> bool:
        """Return whether many turns may be done at once now, if all running requests only decode."""

    def in_turn(self) -> list[Tenant] | None:
        """Return all models that are not stalled and only decode, the one with the next turn first.

        None if what they need has to be divided among them.
        """

    def steps_until(self, active: Sequence[Tenant], horizons: Sequence[int], span_ns: int) -> list[int]:
        """Return how many steps of each of `active` may come within `span_ns`; a guess, at least 1."""

    def places(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> Iterator[int]:
        """Iterate over the places in `active` of the models that have the next turns, for steps of these durations."""

    def leap(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> None:
        """Count the turns that were done at once: of each model, how long its steps took. The last one ended last."""
