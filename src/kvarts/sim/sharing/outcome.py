"""What models make of a device that they share: their steps, memory, debts, and use compared with their shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.columns import Column
from kvarts.core.events import Event, LeapDone, StepDone
from kvarts.core.events.steps import StepRow
from kvarts.sim.report.distributions import Extent, Ranges
from kvarts.sim.report.packed import PackedColumn
from kvarts.sim.report.steps import StepLog
from kvarts.sim.sharing.config import SharingConfig
from kvarts.sim.sharing.tenant import Tenant

__all__ = ["Contended", "Contention", "LoanPeriod", "OfDevice", "TurnLog", "ratio"]

NS_PER_MS = 1e6


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


class TurnLog(StepLog):
    """A StepLog with gaps between steps, in which other models may take or evict pages."""

    takes_rows = False

    def __init__(
        self, num_pages: int, tiers: Mapping[str, int] | None = None, memory: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(num_pages, tiers, memory)
        self._starts_ns = PackedColumn("q")
        self._cached = PackedColumn("i")
        self._withheld = PackedColumn("i")

    def observe(self, events: Sequence[Event | StepRow]) -> None:
        """Record the steps in `events`."""
        super().observe(events)
        starts_ns, cached, withheld = self._starts_ns.recent, self._cached.recent, self._withheld.recent
        for event in events:
            if isinstance(event, StepDone):
                starts_ns.append(event.start_ns)
                cached.append(event.num_cached)
                withheld.append(event.num_withheld)
            elif isinstance(event, LeapDone):
                turns = event.turns
                assert turns is not None
                starts_ns += turns.starts_ns
                cached += turns.cached
                withheld += turns.withheld
        for column in (self._starts_ns, self._cached, self._withheld):
            column.settle()

    @property
    def starts_ns(self) -> Column:
        """The start of each step; other models may have had turns since the previous step."""
        return self._starts_ns.whole()

    def gaps(self) -> Iterator[tuple[Column, Column]]:
        """Yield the time from the end of the previous step to the end of each step, and its decodes, by slabs.

        For the first step, the time is its duration.
        """
        before_ns = None
        for slab, starts_ns in zip(self.slabs(), self._starts_ns.blocks(), strict=True):
            ends_ns = starts_ns + slab.durations_ns
            yield np.diff(ends_ns, prepend=starts_ns[0] if before_ns is None else before_ns), slab.of_steps("decodes")
            before_ns = ends_ns[-1]

    def gap_extent(self) -> Extent | None:
        """Return None: times between turns are not known before a pass over them."""
        return None

    def gaps_within(self, ranges: Ranges) -> Iterator[tuple[Column, Column]]:
        """Return all `gaps`."""
        return self.gaps()

    @property
    def end_ns(self) -> int:
        """The end of the last step; 0 without steps."""
        return int(self.starts_ns[-1] + self.durations_ns[-1]) if len(self) else 0

    def cached(self) -> Column:
        """Return the pages cached at the mark of each step."""
        return self._cached.whole().astype(np.int64)

    def withheld(self) -> Column:
        """Return the pages withheld before each step."""
        return self._withheld.whole().astype(np.int64)


class LoanPeriod(msgspec.Struct, frozen=True, omit_defaults=True):
    """A period from `since_ms` to `until_ms` in which `borrower` owed `lender` memory without interruption.

    It owed `peak_bytes` at most and `mean_bytes` on average. `replica`: the number of the device, if there are several.
    """

    lender: str
    borrower: str
    since_ms: float
    until_ms: float
    peak_bytes: int
    mean_bytes: float
    replica: int | None = None


class OfDevice:
    """The outcome on one device. `logs`, `settled` and `contested` are by model.

    `settled`: releases of pages between steps, as in Tenant. `number`: the device's, if there are several.
    """

    def __init__(
        self,
        config: SharingConfig,
        logs: Mapping[str, TurnLog],
        settled: Mapping[str, Sequence[int]],
        contested: Mapping[str, Contended],
        number: int | None = None,
    ) -> None:
        self.config = config
        self.logs = logs
        self.contested = contested
        self._settled = settled
        self._number = number

    @cached_property
    def num_tokens(self) -> dict[str, int]:
        """Tokens computed, by model."""
        return {name: int(log.spans["tokens"] @ log.spans["num_steps"]) for name, log in self.logs.items()}

    @cached_property
    def busy_ms(self) -> dict[str, float]:
        """Computing time, by model."""
        return {name: float(log.durations_ns.sum()) / NS_PER_MS for name, log in self.logs.items()}

    @cached_property
    def loans(self) -> list[LoanPeriod]:
        """Return every loan period, ordered by start. A loan is use beyond a guarantee, at the mark of each step."""
        times_ns, owed = self.debts
        lasts_ns = np.diff(times_ns, append=times_ns[-1:])
        periods = []
        for (lender, borrower), num_bytes in owed.items():
            is_owed = np.concatenate(([False], num_bytes > 0, [False]))
            begins = np.flatnonzero(is_owed[1:] & ~is_owed[:-1])
            ends = np.flatnonzero(~is_owed[1:] & is_owed[:-1])
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                until_ns = int(times_ns[end]) if end < len(times_ns) else int(times_ns[-1])
                since_ns = int(times_ns[begin])
                mine = num_bytes[begin:end]
                mean = float(mine @ lasts_ns[begin:end]) / (until_ns - since_ns)
                periods.append(
                    LoanPeriod(
                        lender,
                        borrower,
                        since_ns / NS_PER_MS,
                        until_ns / NS_PER_MS,
                        int(mine.max()),
                        mean,
                        self._number,
                    )
                )
        return sorted(periods, key=lambda period: (period.since_ms, period.lender, period.borrower))

    def used(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return times, at least one, and the bytes that each model uses from each on: shape [models, times]."""
        config = self.config
        names = list(self.logs)
        moments, marks = [], []
        for place, log in enumerate(self.logs.values()):
            rests = log.rests
            settled: npt.NDArray[np.int64] = np.array(self._settled[names[place]], np.int64).reshape((-1, 3))
            # An entry between two steps is ordered after the first of them.
            after = np.concatenate((settled[:, 0], rests["step"])) * 2 + 1
            order = np.argsort(np.concatenate((np.arange(len(log)) * 2, after)), kind="stable")
            moments.append(np.concatenate((log.starts_ns, settled[:, 1], rests["time_ns"]))[order])
            mark = np.full((len(names), len(order)), -1, np.int64)
            pages: npt.NDArray[np.int64] = np.concatenate((log.used(), settled[:, 2], rests["used"]))
            mark[place] = pages[order] * config.counted_bytes[names[place]]
            marks.append(mark)
        times_ns = np.concatenate(moments)
        order = np.argsort(times_ns, kind="stable")
        times_ns = times_ns[order]
        if not len(times_ns):
            return np.zeros(1, np.int64), np.zeros((len(names), 1), np.int64)
        used_bytes = np.concatenate(marks, axis=1)[:, order]
        # Carry each model's last entry forward to its next one.
        last = np.maximum.accumulate(np.where(used_bytes >= 0, np.arange(len(times_ns)), -1), axis=1)
        used_bytes = np.where(last >= 0, np.take_along_axis(used_bytes, np.maximum(last, 0), axis=1), 0)
        # The last of several entries at one time is valid.
        holds = np.append(np.diff(times_ns) > 0, True)
        return times_ns[holds], used_bytes[:, holds]

    @cached_property
    def debts(self) -> tuple[npt.NDArray[np.int64], dict[tuple[str, str], npt.NDArray[np.float64]]]:
        """Times, and the bytes owed from each on by lender and borrower, by the rule of `device.debts`."""
        config = self.config
        names = list(self.logs)
        times_ns, used_bytes = self.used()
        if config.static_split:
            return times_ns, {}
        parts = np.array([config.guaranteed_bytes[name] for name in names])[:, None]
        excess, unused = np.maximum(used_bytes - parts, 0), np.maximum(parts - used_bytes, 0)
        total_excess, total_unused = excess.sum(axis=0), unused.sum(axis=0)
        owed = np.maximum(total_excess - (config.kv_bytes - int(parts.sum())), 0)
        owed[total_unused == 0] = 0
        if not owed.any():
            return times_ns, {}
        found = {}
        for lender, borrower in product(range(len(names)), repeat=2):
            if lender != borrower:
                part = (unused[lender] / np.maximum(total_unused, 1)) * (excess[borrower] / np.maximum(total_excess, 1))
                if (owed * part).any():
                    found[names[lender], names[borrower]] = owed * part
        return times_ns, found

    def lent(self, duration_ms: float) -> dict[str, Any]:
        """Return the totals of all loans together. At any time they add up to the use beyond guarantees."""
        times_ns, owed = self.debts
        total = sum(owed.values(), np.zeros(len(times_ns)))
        lasts_ns = np.diff(times_ns, append=times_ns[-1:])
        return {
            "peak_bytes": int(total.max()),
            "mean_bytes": ratio(float(total @ lasts_ns) / NS_PER_MS, duration_ms),
            "share_of_time": ratio(float(lasts_ns[total > 0].sum()) / NS_PER_MS, duration_ms),
        }

    def loan_totals(self, duration_ms: float) -> list[dict[str, Any]]:
        """Return the totals of loans by lender and borrower."""
        pairs: dict[tuple[str, str], list[LoanPeriod]] = {}
        for period in self.loans:
            pairs.setdefault((period.lender, period.borrower), []).append(period)
        return [
            {
                "lender": lender,
                "borrower": borrower,
                "num_loans": len(periods),
                "peak_bytes": max(period.peak_bytes for period in periods),
                "mean_bytes": ratio(
                    sum(period.mean_bytes * (period.until_ms - period.since_ms) for period in periods), duration_ms
                ),
                "share_of_time": ratio(sum(period.until_ms - period.since_ms for period in periods), duration_ms),
            }
            for (lender, borrower), periods in sorted(pairs.items())
        ]


def ratio(part: float, whole: float) -> float | None:
    """Return a part of the whole; None if the whole is 0."""
    return part / whole if whole else None
