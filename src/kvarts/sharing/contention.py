"""Use of a device while several models wanted more of it, compared with their shares."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvarts.sharing.tenant import Tenant

__all__ = ["Contended", "Contention"]


class Contended(msgspec.Struct, frozen=True):
    """One model's part of the contested turns, and the part that its share entitled it to."""

    ns: int = 0
    ns_owned: float = 0.0

    def __add__(self, other: Contended) -> Contended:
        return Contended(
            self.ns + other.ns,
            self.ns_owned + other.ns_owned,
        )


class Contention:
    """Owner of these counts. A turn is contested if at least two models have requests."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = tenants
        self._counts: dict[int, list[int]] = {}
        """Nanoseconds of each model, by the set of models that have requests."""
        self._bits = {tenant: 1 << place for place, tenant in enumerate(tenants)}

    def wanting(self) -> int:
        """Return the set of models that have requests now."""
        want = 0
        for tenant, bit in self._bits.items():
            if tenant.scheduler.running.num_running or tenant.scheduler.waiting.num_waiting:
                want |= bit
        return want

    def count(self, tenant: Tenant, want: int, duration_ns: int) -> None:
        """Count turns of `tenant`; `want` is the result of `wanting()` before them."""
        bit = self._bits[tenant]
        if want & bit and want != bit:
            counts = self._counts.get(want)
            if counts is None:
                counts = self._counts[want] = [0] * len(self._tenants)
            counts[bit.bit_length() - 1] += duration_ns

    def outcome(self) -> dict[str, Contended]:
        """Return the outcome by model."""
        outcome = {}
        for place, (tenant, bit) in enumerate(self._bits.items()):
            contested = Contended()
            for want, counts in self._counts.items():
                if want & bit:
                    part = tenant.share / sum(other.share for other, each in self._bits.items() if want & each)
                    contested += Contended(counts[place], float(sum(counts) * part))
            outcome[tenant.name] = contested
        return outcome
