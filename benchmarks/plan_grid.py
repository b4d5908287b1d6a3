"""Compare answers of `kvarts plan fleet` with the cheapest of a grid over devices, shapes, host memory and policies.

    python benchmarks/plan_grid.py [--requests 150] [--only NAME]

Each case is a trace, a model and a device, with the most devices of the search. The grid has mixed workers of every
shape and number, with each size of host memory and store policy; it takes minutes per case. A replay of the grid ends
as soon as too many requests have missed the SLO. Rows have both answers, their prices, and the replays and processor
time of both. The status is 1 if an answer costs more than the cheapest of its grid by more than one step of host
memory. The last four cases were added after the search had been written. Bounds are such that something in the grid
keeps each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from kvarts.base.settings import given_by_keywords
from kvarts.cli.replaying import all_sections
from kvarts.core.request import Request
from kvarts.plan.cache import CachePlan
from kvarts.plan.fleet_search import FleetKinds
from kvarts.plan.fleets import plan_fleets
from kvarts.plan.purchases import SIZE_RATIO, Prices, host_sizes, policies_of, with_memory
from kvarts.plan.replays import PlanProgress, share_kept
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replaying import replay
from kvarts.sim.report.requests import COMPLETED, RequestLog
from kvarts.sim.traffic.editing import sliced
from kvarts.sim.traffic.formats import load_trace
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.traffic.trace_request import TraceRequest


class Case(NamedTuple):
    """One search. `settings`: as those of `kvarts replay`, by name."""

    name: str
    trace: str
    gpus: int
    slo_share: float
    settings: dict[str, Any]


class Counter:
    """Counts replays."""

    num = 0

    def add(self) -> None:
        """Count one more."""
        self.num += 1


def settings_of(model: str, device: str, ttft_ms: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "device": device, "slo_ttft_ms": ttft_ms, "router": "prefix", **more}


CASES = (
    Case("dense, agents", "sample:agents", 4, 0.9, settings_of("qwen3-32b", "h100-80gb", 8000)),
    Case("dense, conversation", "sample:mooncake", 4, 0.8, settings_of("qwen3-8b", "h100-80gb", 4000)),
    Case("dense, chat", "sample:azure-chat", 4, 0.95, settings_of("qwen3-32b", "h100-80gb", 1000, speedup=4.0)),
    Case("experts, agents", "sample:agents", 4, 0.9, settings_of("qwen3-30b-a3b", "h100-80gb", 1500)),
    Case("experts, code", "sample:azure-code", 4, 0.9, settings_of("gpt-oss-120b", "h200-141gb", 500, speedup=4.0)),
    Case("hybrid, agents", "sample:agents", 2, 0.9, settings_of("granite-4.0-h-small", "h100-80gb", 5000)),
    Case("hybrid, conversation", "sample:mooncake", 4, 0.8, settings_of("gemma-3-27b", "h200-141gb", 8000)),
    Case("latent, conversation", "sample:mooncake", 16, 0.8, settings_of("deepseek-v3", "h200-141gb", 15_000)),
    Case(
        "aside: dense, code", "sample:azure-code", 4, 0.9, settings_of("mistral-nemo", "a100-80gb", 3000, speedup=6.0)
    ),
    Case("aside: experts, conversation", "sample:mooncake", 4, 0.8, settings_of("gpt-oss-20b", "l40s", 30_000)),
    Case("aside: hybrid, chat", "sample:azure-chat", 4, 0.9, settings_of("gemma-3-12b", "l40s", 1500, speedup=5.0)),
    Case("aside: latent, agents", "sample:agents", 8, 0.8, settings_of("deepseek-v3.2", "mi355x", 3000)),
)
NS_PER_MS = 1_000_000
ROUNDING = 1e-6


class TooManyMissedError(Exception):
    """More requests have missed the SLO than may."""


class Impatient(RequestLog):
    """Raises TooManyMissedError once more than `most` requests took longer than `ttft_ms` or were not completed."""

    def __init__(self, most: float, ttft_ms: float, **fields: Any) -> None:
        super().__init__(**fields)
        self._left, self._ttft_ns = most, ttft_ms * NS_PER_MS

    def end(
        self, request: Request, row: TraceRequest, replica: int, status: int = COMPLETED, more: Sequence[int] = ()
    ) -> None:
        super().end(request, row, replica, status, more)
        self._left -= status != COMPLETED or request.first_token_ns - request.arrival_ns > self._ttft_ns
        if self._left < 0:
            raise TooManyMissedError


def keeps(trace: Trace, config: ReplayConfig, case: Case) -> bool:
    """Return whether a replay keeps the SLO for enough requests."""
    most_missed = len(trace.requests or ()) * (1 - case.slo_share) + ROUNDING
    log = partial(Impatient, most_missed, case.settings["slo_ttft_ms"])
    try:
        with patch("kvarts.sim.replay.RequestLog", log):
            summary = replay(trace, config).summary
    except TooManyMissedError:
        return False
    return (share_kept(summary) or 0.0) >= case.slo_share


def grid_of(trace: Trace, case: Case) -> Iterator[tuple[float, str, Any]]:
    """Yield the price, the name and the configuration of everything in the grid."""
    kinds = FleetKinds(given_by_keywords(case.settings, all_sections()), all_sections(), case.gpus)
    prices = Prices()
    reused_pages = CachePlan(trace, kinds.first.page_size).curve.most_pages
    for kind, family in zip(kinds.kinds, kinds.families, strict=True):
        if kind.is_apart:
            continue
        for count in range(1, case.gpus // family.sizes[0] + 1):
            config = kinds.config(kind, (count,))
            num_devices = count * family.sizes[0]
            name = f"{num_devices} in {count} x {kind.name}"
            yield prices.of(num_devices), name, config
            for size in host_sizes(config, reused_pages):
                for policy in policies_of(config):
                    price = prices.of(num_devices, size)
                    yield price, f"{name}, {size >> 30} GiB {policy}", with_memory(config, size, policy)


def cheapest_of_grid(trace: Trace, case: Case) -> tuple[float | None, str, int]:
    """Return the price and the name of the cheapest that keeps the SLO, and the number of replays.

    In the order of prices, the first that keeps the SLO is the cheapest.
    """
    grid = sorted(grid_of(trace, case), key=lambda each: each[:2])
    for num, (price, name, config) in enumerate(grid, 1):
        assert isinstance(config, ReplayConfig)
        if keeps(trace, config, case):
            return price, name, num
    return None, "nothing", len(grid)


def main() -> int:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    num_off = 0
    for case in CASES:
        if arguments.only not in case.name:
            continue
        trace = sliced(load_trace(case.trace), count=arguments.requests)
        replays = Counter()
        begun = time.process_time()
        plan = plan_fleets(
            trace, case.gpus, slo_share=case.slo_share, progress=PlanProgress(replays.add), **case.settings
        )
        of_plan_s, begun = time.process_time() - begun, time.process_time()
        best = plan.options[0] if plan.options[0]["keeps_slo"] else None
        price, name, num = cheapest_of_grid(trace, case)
        of_grid_s = time.process_time() - begun
        most = None if price is None else price + (SIZE_RATIO - 1) * (price % 1)
        is_off = most is not None and (best is None or best["price_per_hour"] > most + 1e-9)
        num_off += is_off
        found = "nothing" if best is None else f"{best['price_per_hour']:.4f} {best['fleet']}"
        print(f"{case.name}: {'OFF' if is_off else 'same'}")
        print(f"  plan  {found} ({replays.num} replays, {of_plan_s:.1f} s)")
        found = name if price is None else f"{price:.4f} {name}"
        print(f"  grid  {found} ({num} replays, {of_grid_s:.1f} s)", flush=True)
    return 1 if num_off else 0


if __name__ == "__main__":
    raise SystemExit(main())
