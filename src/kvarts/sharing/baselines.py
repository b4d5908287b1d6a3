"""Baselines for a model that shares a device: its static split, and its slice of the device without other models.

In the *split*, memory is divided by guarantees, and models still take turns. A *slice* is a separate device with the
model's guarantee as its memory, on which every step takes 1 / share as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvarts.executor.base import CostModel
from kvarts.report.report import Report
from kvarts.report.requests import COMPLETED
from kvarts.sched.plan import Batch
from kvarts.sharing.config import SharingConfig
from kvarts.sharing.outcome import ratio
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay_one
from kvarts.traffic.trace import Trace

__all__ = ["SlicedCost", "compared", "slice_config", "slices", "split_config", "worst"]

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
    return {"mean": fsum(ordered.tolist()) / len(ordered), "p99": float(ordered[round(0.99 * (len(ordered) - 1))])}
