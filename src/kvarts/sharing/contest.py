"""Use of a device while several models wanted more of it, compared with their weights."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvarts.events import Blocked
from kvarts.sharing.tenant import Tenant

__all__ = ["Contest", "Contested"]


class Contested(msgspec.Struct, frozen=True):
    """One model's part of the contested turns, and the part that its weight entitled it to."""

    tokens: int = 0
    tokens_owned: float = 0.0
    ns: int = 0
    ns_owned: float = 0.0

    def __add__(self, other: Contested) -> Contested:
        return Contested(
            self.tokens + other.tokens,
            self.tokens_owned + other.tokens_owned,
            self.ns + other.ns,
            self.ns_owned + other.ns_owned,
        )


class Contest:
    """Owner of these counts. A turn is contested if at least two models want something.

    `of_time`: whether weights divide time. If so, a model wants something if it has a request. If weights divide
    tokens, a model wants something if it could compute more than one token per decode, or waits for memory; while
    another model waits for memory, so does the model whose turn it is.
    """

    def __init__(self, tenants: Sequence[Tenant], *, of_time: bool) -> None:
        self._tenants = tenants
        self._of_time = of_time
        self._counts: dict[int, list[int]] = {}
        """Tokens and nanoseconds of each model, alternating, by the set of models that want something."""
        self._bits = {tenant: 1 << place for place, tenant in enumerate(tenants)}
        self._at = {tenant: 2 * place for place, tenant in enumerate(tenants)}

    def wanting(self) -> tuple[int, int]:
        """Return the set of models that want something now, and the set of those that wait for memory."""
        want = wait = 0
        for tenant, bit in self._bits.items():
            scheduler = tenant.scheduler
            if self._of_time:
                if scheduler.running.num_running or scheduler.waiting.num_waiting:
                    want |= bit
            elif scheduler.waiting.num_waiting and scheduler.blocked is Blocked.PAGES:
                want |= bit
                wait |= bit
            elif tenant.wants_tokens:
                want |= bit
        return want, wait

    def count(self, tenant: Tenant, wanting: tuple[int, int], num_tokens: int, duration_ns: int) -> None:
        """Count turns of `tenant`; `wanting` is the result of `wanting()` before them."""
        want, wait = wanting
        bit = self._bits[tenant]
        if wait & ~bit:
            want |= bit
        elif not want & bit:
            return
        if want & (want - 1):  # at least two
            counts = self._counts.get(want)
            if counts is None:
                counts = self._counts[want] = [0] * (2 * len(self._tenants))
            at = self._at[tenant]
            counts[at] += num_tokens
            counts[at + 1] += duration_ns

    def outcome(self) -> dict[str, Contested]:
        """Return the outcome by model."""
        outcome = {}
        for tenant, bit in self._bits.items():
            contested = Contested()
            for want, counts in self._counts.items():
                if want & bit:
                    part = tenant.weight / sum(other.weight for other, bit in self._bits.items() if want & bit)
                    at = self._at[tenant]
                    contested += Contested(
                        counts[at], sum(counts[::2]) * part, counts[at + 1], sum(counts[1::2]) * part
                    )
            outcome[tenant.name] = contested
        return outcome
