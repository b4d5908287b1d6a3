"""The interface of an order in which the models of a device take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvarts.sharing.tenant import Tenant

__all__ = ["TurnOrder"]


class TurnOrder(Protocol):
    """Chooses the model of the next turn, and how many tokens it may compute in it.

    Promises: results depend on the calls alone. `leap` leaves the same state as the same turns executed one by one.
    """

    def begin(self) -> None:
        """Note that until now no model could step."""

    def next(self, now_ns: int) -> Tenant | None:
        """Return the model that has the next turn, of those that can step; None if none can."""

    def pass_turn(self, tenant: Tenant) -> None:
        """Begin the turn of `tenant`."""

    def take_budget(self, tenant: Tenant, now_ns: int) -> int | None:
        """Return the token budget of the turn; None if it is too small to run, which ends the turn."""

    def spend(self, tenant: Tenant, num_tokens: int, duration_ns: int) -> None:
        """Count the tokens that `tenant` computed in its turn, and its duration."""

    # Many turns at once

    def may_leap(self) -> bool:
        """Return whether many turns may be executed at once now, if all running requests only decode."""

    def in_turn(self) -> list[Tenant] | None:
        """Return all models that are not stalled and only decode, the next one first.

        None if tokens have to be divided among them.
        """

    def steps_until(self, active: Sequence[Tenant], horizons: Sequence[int], span_ns: int) -> list[int]:
        """Return how many steps of each of `active` may fall within `span_ns`; a guess, at least 1."""

    def places(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yield the places in `active` of the models that have the next turns, for steps of these durations."""

    def leap(self, active: Sequence[Tenant], durations_ns: Sequence[Sequence[int]]) -> None:
        """Count the turns executed at once, by the durations of each model's steps. The last of `active` ended last."""
