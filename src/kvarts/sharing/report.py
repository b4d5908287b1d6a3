"""The report of a replay of several models: one of each model, and one of the device that they share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.report.report import REPORT_VERSION, Report
from kvarts.sharing.config import SharingConfig
from kvarts.sharing.steps import TurnLog

__all__ = ["LoanPeriod", "SharedReport", "jain_index"]

NS_PER_MS = 1e6


class LoanPeriod(msgspec.Struct, frozen=True):
    """A period in which `borrower` owed `lender` something without a pause, from `since_ms` to `until_ms`.

    It owed `peak_bytes` at most and `mean_bytes` on average.
    """

    lender: str
    borrower: str
    since_ms: float
    until_ms: float
    peak_bytes: int
    mean_bytes: float


def jain_index(shares: list[float]) -> float | None:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2): 1 for equal shares, 1/n if one has all; None if empty.

    R. Jain, D. Chiu and W. Hawe, A Quantitative Measure of Fairness and Discrimination for Resource Allocation in
    Shared Computer Systems, DEC-TR-301, 1984.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


class SharedReport:
    """The outcome of a replay of several models. `reports` is by model; `summary` is what `--json` prints.

    `contested`: by model, the tokens it computed in rounds in which several models could have computed more than their
    budget, and the part of these that its weight entitled it to.
    """

    def __init__(
        self,
        config: SharingConfig,
        reports: Mapping[str, Report],
        logs: Mapping[str, TurnLog],
        *,
        num_reclaimed: Mapping[str, int],
        contested: Mapping[str, tuple[int, float]],
    ) -> None:
        self.config = config
        self.reports = reports
        self._logs = logs
        self._num_reclaimed = num_reclaimed
        self._contested = contested

    @cached_property
    def loans(self) -> list[LoanPeriod]:
        """Return every loan period by its beginning. A loan is use beyond a guarantee, at the mark of each step."""
        times_ns, owed = self._debts()
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
                    LoanPeriod(lender, borrower, since_ns / NS_PER_MS, until_ns / NS_PER_MS, int(mine.max()), mean)
                )
        return sorted(periods, key=lambda period: (period.since_ms, period.lender, period.borrower))

    def _used(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return times, at least one, and the bytes that each model uses from each on: shape [models, times]."""
        config = self.config
        names = list(self._logs)
        moments, marks = [], []
        for place, log in enumerate(self._logs.values()):
            rests, order = log.rests, log.row_order
            moments.append(np.concatenate((log.starts_ns, rests["time_ns"]))[order])
            mark = np.full((len(names), len(order)), -1, np.int64)
            mark[place] = np.concatenate((log.used(), rests["used"]))[order] * config.page_bytes[names[place]]
            marks.append(mark)
        times_ns = np.concatenate(moments)
        order = np.argsort(times_ns, kind="stable")
        times_ns = times_ns[order]
        if not len(times_ns):
            return np.zeros(1, np.int64), np.zeros((len(names), 1), np.int64)
        used_bytes = np.concatenate(marks, axis=1)[:, order]
        # A model uses what it used last until the next entry of its own.
        last = np.maximum.accumulate(np.where(used_bytes >= 0, np.arange(len(times_ns)), -1), axis=1)
        used_bytes = np.where(last >= 0, np.take_along_axis(used_bytes, np.maximum(last, 0), axis=1), 0)
        # Of several entries at one time the last one holds.
        settled = np.append(np.diff(times_ns) > 0, True)
        return times_ns[settled], used_bytes[:, settled]

    def _debts(self) -> tuple[npt.NDArray[np.int64], dict[tuple[str, str], npt.NDArray[np.float64]]]:
        """Return times, and the bytes owed from each on, by lender and borrower, as `debts` computes them."""
        config = self.config
        names = list(self._logs)
        times_ns, used_bytes = self._used()
        if config.static_split:
            return times_ns, {}
        parts = np.array([config.guaranteed_bytes[name] for name in names])[:, None]
        excess, unused = np.maximum(used_bytes - parts, 0), np.maximum(parts - used_bytes, 0)
        total_excess, total_unused = excess.sum(axis=0), unused.sum(axis=0)
        owed = np.maximum(total_excess - (config.kv_bytes - int(parts.sum())), 0)
        owed[total_unused == 0] = 0
        found = {}
        for lender, borrower in product(range(len(names)), repeat=2):
            if lender != borrower:
                part = (unused[lender] / np.maximum(total_unused, 1)) * (excess[borrower] / np.maximum(total_excess, 1))
                if (owed * part).any():
                    found[names[lender], names[borrower]] = owed * part
        return times_ns, found

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Return the whole report as one value that JSON can hold."""
        config = self.config
        of_models = {name: report.summary for name, report in self.reports.items()}
        duration_ms = max(summary["duration_ms"] for summary in of_models.values())
        tokens = {name: int(log.spans["tokens"] @ log.spans["num_steps"]) for name, log in self._logs.items()}
        busy_ms = {name: float(log.durations_ns.sum()) / NS_PER_MS for name, log in self._logs.items()}
        total_weight = sum(share.weight for share in config.models.values())
        contested = [tokens / share for tokens, share in self._contested.values() if share]
        models = {}
        for name, summary in of_models.items():
            share = config.models[name]
            peak = summary["peak_used_pages"] * config.page_bytes[name]
            models[name] = {
                "model": share.model,
                "weight": share.weight,
                "share_owned": share.weight / total_weight,
                "share_of_tokens": _ratio(tokens[name], sum(tokens.values())),
                "share_of_time": _ratio(busy_ms[name], sum(busy_ms.values())),
                "contested_tokens": self._contested[name][0],
                "contested_tokens_owned": self._contested[name][1],
                "page_bytes": config.page_bytes[name],
                "guaranteed_bytes": config.guaranteed_bytes[name],
                "peak_used_bytes": peak,
                "peak_borrowed_bytes": max(0, peak - config.guaranteed_bytes[name]),
                "num_tokens": tokens[name],
                "num_preemptions_inside": summary["num_preemptions"] - self._num_reclaimed[name],
                "num_preemptions_for_others": self._num_reclaimed[name],
            }
        return {
            "version": REPORT_VERSION,
            "device": {
                "kv_bytes": config.kv_bytes,
                "max_batched_tokens": config.each.max_num_batched_tokens,
                "static_split": config.static_split,
                "duration_ms": duration_ms,
                "busy_pct": _ratio(sum(busy_ms.values()), duration_ms),
                "num_requests": sum(summary["num_requests"] for summary in of_models.values()),
                "num_completed": sum(summary["num_completed"] for summary in of_models.values()),
                "num_rejected": sum(summary["num_rejected"] for summary in of_models.values()),
                "num_failed": sum(summary["num_failed"] for summary in of_models.values()),
                "num_tokens": sum(tokens.values()),
                "output_throughput_tokens_per_s": _ratio(
                    sum(summary["num_output_tokens"] for summary in of_models.values()), duration_ms / 1e3
                ),
                "jain_index": jain_index(contested),
                "loans": self._loan_totals(duration_ms),
            },
            "models": {name: {**models[name], **of_models[name]} for name in of_models},
        }

    def _loan_totals(self, duration_ms: float) -> list[dict[str, Any]]:
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
                "mean_bytes": _ratio(
                    sum(period.mean_bytes * (period.until_ms - period.since_ms) for period in periods), duration_ms
                ),
                "share_of_time": _ratio(sum(period.until_ms - period.since_ms for period in periods), duration_ms),
            }
            for (lender, borrower), periods in sorted(pairs.items())
        ]

    def to_json(self) -> bytes:
        """Return the summary as indented JSON, with a line end."""
        return msgspec.json.format(msgspec.json.encode(self.summary), indent=2) + b"\n"

    def loans_jsonl(self) -> bytes:
        """Return the loan periods as JSON lines."""
        encoded: bytes = msgspec.json.Encoder().encode_lines(self.loans)
        return encoded


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
