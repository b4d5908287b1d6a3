"""The report of a replay of several models: on each model, and on each shared device.

A model that shares a device is compared with its static split, and with its slice of the device without other models.

In the *split*, memory is divided by guarantees, and models still take turns. A *slice* is a separate device with the
model's guarantee as its memory, on which every step takes 1 / share as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import fsum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.base.columns import percentile_rank
from kvarts.core.executor import CostModel
from kvarts.core.sched.plan import Batch
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay_one
from kvarts.sim.report.report import REPORT_VERSION, Report
from kvarts.sim.report.requests import COMPLETED
from kvarts.sim.sharing.config import SharingConfig
from kvarts.sim.sharing.outcome import Contended, LoanPeriod, OfDevice, ratio
from kvarts.sim.traffic.trace import Trace

__all__ = ["LoanPeriod", "SharedReport", "compared", "jain_index", "slices", "split_config", "worst"]

COUNTS = ("num_requests", "num_completed", "num_rejected", "num_failed")


NS_PER_MS = 1e6


class SlicedCost:
    """A CostModel of a part of a device: every step takes `times` as long as on the whole."""

    def __init__(self, whole: CostModel, times: float) -> None:
        self._whole = whole
        self._times = times

    def step_ns(self, batch: Batch) -> int:
        """Return the duration of a step that computes `batch`."""
        return round(self._whole.step_ns(batch) * self._times)

    def decode_ns(self, num_decodes: int, known_tokens: int, pool_tokens: int, num_steps: int) -> list[int]:
        """Return the durations of `num_steps` steps of decodes."""
        times = self._times
        durations_ns = self._whole.decode_ns(num_decodes, known_tokens, pool_tokens, num_steps)
        return [round(duration_ns * times) for duration_ns in durations_ns]


def split_config(config: SharingConfig) -> SharingConfig:
    """Return the static split of `config`. Raise ConfigError if a guarantee is smaller than a page."""
    each = msgspec.structs.replace(config.each, audit=False)
    return msgspec.structs.replace(config, static_split=True, baselines=False, health=(), each=each)


def slice_config(config: SharingConfig, model: str) -> ReplayConfig:
    """Return the configuration of the slice of `model`. Raise ConfigError if its guarantee is smaller than a page."""
    of_model = split_config(config).configs[model]
    cost = SlicedCost(of_model.cost_model, float(1 / config.shares[model]))
    return msgspec.structs.replace(of_model, cost=cost)


def slices(traces: Mapping[str, Trace], config: SharingConfig) -> dict[str, Report]:
    """Replay each model on its slice."""
    return {name: replay_one(traces[name], slice_config(config, name)) for name in config.models}


def compared(shared: Report, baseline: Report) -> dict[str, Any]:
    """Return the TTFT of `baseline` and the ratios of `shared` to it, over requests that completed in both."""
    rows, ttft_ms = _ttft_ms(shared)
    rows_before, ttft_before_ms = _ttft_ms(baseline)
    _, mine, theirs = np.intersect1d(rows, rows_before, return_indices=True)
    found: dict[str, Any] = {"num_compared": len(mine)}
    if not len(mine):
        return found
    before, now = _figures(ttft_before_ms[theirs]), _figures(ttft_ms[mine])
    found["ttft_ms"] = before
    found["ratio"] = {name: ratio(now[name], before[name]) for name in before}
    return found


def worst(compared_by_model: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the largest ratio, its model and its statistic (mean or p99); None if nothing could be compared."""
    ratios = [
        (value, model, name)
        for model, found in compared_by_model.items()
        for name, value in found.get("ratio", {}).items()
        if value is not None
    ]
    if not ratios:
        return None
    value, model, name = max(ratios, key=lambda entry: entry[0])
    return {"ratio": value, "model": model, "of": name}


def _ttft_ms(report: Report) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    columns = report.request_columns
    done = columns["status"] == COMPLETED
    return columns["row"][done], (columns["first_token_ns"] - columns["arrival_ns"])[done] / NS_PER_MS


def _figures(ttft_ms: npt.NDArray[np.float64]) -> dict[str, float]:
    ordered = np.sort(ttft_ms)
    return {"mean": fsum(ordered.tolist()) / len(ordered), "p99": float(ordered[percentile_rank(99, len(ordered))])}


def jain_index(shares: list[float]) -> float | None:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2): 1 for equal shares, 1/n if one has all; None if empty.

    R. Jain, D. Chiu and W. Hawe, A Quantitative Measure of Fairness and Discrimination for Resource Allocation in
    Shared Computer Systems, DEC-TR-301, 1984.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


class SharedReport:
    """The outcome of a replay of several models. `reports` is by model; `summary` is printed by `--json`.

    `devices`: the outcome on each device. `num_reclaimed`: by model, how many of its requests were preempted for other
    models. `baselines`: reports of each model, by the name of the baseline, `split` or `slice`.
    """

    def __init__(
        self,
        config: SharingConfig,
        reports: Mapping[str, Report],
        devices: Sequence[OfDevice],
        *,
        num_reclaimed: Mapping[str, int],
        baselines: Mapping[str, Mapping[str, Report]] | None = None,
    ) -> None:
        self.config = config
        self.reports = reports
        self.devices = devices
        self._num_reclaimed = num_reclaimed
        self._baselines = baselines or {}

    @cached_property
    def loans(self) -> list[LoanPeriod]:
        """Return every loan period, ordered by start. A loan is use beyond a guarantee, at the mark of each step."""
        periods = [period for device in self.devices for period in device.loans]
        # Periods of one device are ordered by lender and borrower, and devices by number.
        return sorted(periods, key=lambda period: period.since_ms)

    @cached_property
    def beside(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return, by the name of a baseline and the model, its TTFT there and the ratios to it."""
        return {
            name: {model: compared(self.reports[model], report) for model, report in reports.items()}
            for name, reports in self._baselines.items()
        }

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Return the whole report as a JSON value.

        A single device is in `device`; several are in `devices`, and all of them together in `total`.
        """
        of_models = {name: report.summary for name, report in self.reports.items()}
        duration_ms = max(summary["duration_ms"] for summary in of_models.values())
        models = self._of_models(of_models)
        of_devices: dict[str, Any]
        if len(self.devices) == 1:
            of_devices = {"device": {**self._of_all(of_models, duration_ms), **_loans(self.devices[0], duration_ms)}}
        else:
            of_devices = {
                "total": self._of_all(of_models, duration_ms),
                "devices": [self._of_one(number, duration_ms) for number in range(len(self.devices))],
            }
        return {
            "version": REPORT_VERSION,
            **of_devices,
            "models": {name: {**models[name], **of_models[name]} for name in of_models},
        }

    def _of_models(self, of_models: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the figures of each model that a report on one model lacks; sums are over all devices."""
        config, devices = self.config, self.devices
        tokens = {name: sum(device.num_tokens[name] for device in devices) for name in of_models}
        busy_ms = {name: sum(device.busy_ms[name] for device in devices) for name in of_models}
        contested = _contested(config, devices)
        models = {}
        for name, summary in of_models.items():
            share = config.models[name]
            peak = summary["peak_used_pages"] * config.counted_bytes[name]
            models[name] = {
                "model": share.model,
                "weight": share.weight,
                "share_owned": float(config.shares[name]),
                "share_of_tokens": ratio(tokens[name], sum(tokens.values())),
                "share_of_time": ratio(busy_ms[name], sum(busy_ms.values())),
                "contested_ms": contested[name].ns / NS_PER_MS,
                "contested_ms_owned": contested[name].ns_owned / NS_PER_MS,
                "page_bytes": config.page_bytes[name],
                "guaranteed_bytes": config.guaranteed_bytes[name],
                "peak_used_bytes": peak,
                "peak_borrowed_bytes": max(0, peak - config.guaranteed_bytes[name]),
                "num_tokens": tokens[name],
                "num_preemptions_inside": summary["num_preemptions"] - self._num_reclaimed[name],
                "num_preemptions_for_others": self._num_reclaimed[name],
                "beside": {baseline: found[name] for baseline, found in self.beside.items()} or None,
            }
        return models

    def _totals(self, devices: Sequence[OfDevice], counts: Mapping[str, int], duration_ms: float) -> dict[str, Any]:
        """Return the figures of `devices`, with the counts of their requests."""
        config = self.config
        contested = _contested(config, devices).values()
        had = [of_model.ns / of_model.ns_owned for of_model in contested if of_model.ns_owned]
        busy_ms = sum(sum(device.busy_ms.values()) for device in devices)
        return {
            "kv_bytes": config.kv_bytes * len(devices),
            "max_batched_tokens": config.each.max_num_batched_tokens,
            "static_split": config.static_split,
            "duration_ms": duration_ms,
            "busy_pct": ratio(busy_ms, duration_ms * len(devices)),
            **{name: counts[name] for name in COUNTS},
            "num_tokens": sum(sum(device.num_tokens.values()) for device in devices),
            "output_throughput_tokens_per_s": ratio(counts["num_output_tokens"], duration_ms / 1e3),
            "worst_ratio": {name: worst(found) for name, found in self.beside.items()} or None,
            "jain_index": jain_index(had),
        }

    def _of_all(self, of_models: Mapping[str, dict[str, Any]], duration_ms: float) -> dict[str, Any]:
        """Return the figures of all devices together."""
        counted = (*COUNTS, "num_output_tokens")
        counts = {name: sum(summary[name] for summary in of_models.values()) for name in counted}
        return self._totals(self.devices, counts, duration_ms)

    def _of_one(self, number: int, duration_ms: float) -> dict[str, Any]:
        """Return the figures of one of several devices. Its requests are those that were routed to it."""
        counts: Counter[str] = Counter()
        for report in self.reports.values():
            columns = report.requests
            mine = np.flatnonzero(np.asarray(columns["replica"]) == number)
            statuses = Counter(columns["status"][row] for row in mine.tolist())
            counts.update({f"num_{status}": count for status, count in statuses.items()})
            counts["num_requests"] += len(mine)
            completed = [row for row in mine.tolist() if columns["status"][row] == "completed"]
            counts["num_output_tokens"] += int(np.asarray(columns["output_tokens"])[completed].sum())
        device = self.devices[number]
        return {**self._totals([device], counts, duration_ms), **_loans(device, duration_ms)}

    def to_json(self) -> bytes:
        """Return the summary as indented JSON, with a newline at the end."""
        return msgspec.json.format(msgspec.json.encode(self.summary), indent=2) + b"\n"

    def loans_jsonl(self) -> bytes:
        """Return the loan periods as JSON lines."""
        encoded: bytes = msgspec.json.Encoder().encode_lines(self.loans)
        return encoded


def _contested(config: SharingConfig, devices: Sequence[OfDevice]) -> dict[str, Contended]:
    """Return each model's contested turns on all of `devices`."""
    return {name: sum((device.contested[name] for device in devices), Contended()) for name in config.models}


def _loans(device: OfDevice, duration_ms: float) -> dict[str, Any]:
    return {"lent": device.lent(duration_ms), "loans": device.loan_totals(duration_ms)}
