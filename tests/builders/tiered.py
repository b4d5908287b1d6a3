"""Cases with tiers below the device."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import msgspec
from hypothesis import strategies as st

from kvarts.core.tiers.config import SHORT, LoadKv, OffloadConfig, TierConfig

from builders.case import Case, Row, cases
from oracles.naive import polynomial_ns

__all__ = ["BYTES_PER_TOKEN", "Tiered", "as_list", "exchanges", "naive_settings"]
__all__ += ["tiered", "tiers_below", "tiers_between"]

BYTES_PER_TOKEN = 1000


def as_list(offload: OffloadConfig, *between: TierConfig) -> OffloadConfig:
    """Return the same tiers as a list, with more `between` host memory and files."""
    short = [name for names in SHORT.values() for name in names]
    defaults = {field.name: field.default for field in msgspec.structs.fields(offload) if field.name in short}
    host, *files = offload.listed
    return msgspec.structs.replace(offload, **defaults, tiers=(host, *between, *files))


@st.composite
def tiers_between(draw: st.DrawFn) -> TierConfig:
    """A tier of memory below host memory."""
    rates = st.sampled_from([50_000, 1_000_000, 1_000_000_000])
    return TierConfig(
        name="cxl",
        pages=draw(st.sampled_from([1, 3, 20, 200])),
        read=draw(rates),
        write=draw(rates),
        latency_us=draw(st.sampled_from([0.0, 500.0])),
    )


@dataclass
class Tiered:
    case: Case
    offload: OffloadConfig


@st.composite
def tiered(
    draw: st.DrawFn,
    *,
    max_requests: int = 24,
    cancels: bool = False,
    limits: bool = False,
    all_loads: bool = False,
    lists: bool = False,
) -> Tiered:
    """`lists`: some cases have a list of tiers, with one between host memory and files."""
    case = draw(cases(max_requests=max_requests, cancels=cancels, limits=limits))
    offload = draw(tiers_below(all_loads=all_loads))
    if lists and draw(st.booleans()):
        offload = as_list(offload, draw(tiers_between()))
    return Tiered(case, offload)


@st.composite
def exchanges(draw: st.DrawFn) -> Tiered:
    """Sessions of many pages that come again, one or a few at a time, and fill a device: loads evict other sessions."""
    page_size = draw(st.sampled_from([1, 2, 4]))
    lengths = st.integers(12 * page_size, 30 * page_size)
    sessions = [[10 * name + unit % 7 for unit in range(64 * page_size)] for name in range(draw(st.integers(3, 5)))]
    for units in sessions[1:]:
        units[: draw(st.sampled_from([0, 0, 3]))] = sessions[0][:3]
    rows = []
    arrival_ms = 0
    for _ in range(draw(st.integers(6, 16))):
        units = draw(st.sampled_from(sessions))
        num_output = draw(st.integers(1, 12))
        tenant = draw(st.sampled_from([None, None, "a"]))
        rows.append(Row(arrival_ms, units, draw(lengths), num_output, None, 0, tenant))
        arrival_ms += draw(st.sampled_from([0, 20, 200, 2000]))
    case = Case(
        rows=rows,
        unit_tokens=1,
        page_size=page_size,
        num_pages=draw(st.integers(44, 60)),
        max_num_batched_tokens=draw(st.sampled_from([16, 64, 200])),
        max_num_seqs=draw(st.sampled_from([1, 2, 8])),
        profile="default",
        replicas=1,
    )
    # A page takes microseconds, or about as long as its tokens take to compute.
    rates = st.sampled_from([2_000_000, 10_000_000, 1_000_000_000])
    offload = OffloadConfig(
        host_pages=draw(st.sampled_from([20, 40, 60, 200])),
        policy="exclusive",
        target_free=draw(st.sampled_from([0, 1, 8, 8, 16, None])),
        h2d=draw(rates),
        d2h=draw(rates),
        latency_us=draw(st.sampled_from([0.0, 10.0, 1000.0])),
        kv_bytes_per_token=BYTES_PER_TOKEN,
        full_prompt_hits=draw(st.booleans()),
        disk_pages=draw(st.sampled_from([None, None, 30, 100])),
        disk_read=draw(rates),
        disk_write=draw(rates),
        store_within_ms=500.0,
        fail_every=draw(st.sampled_from([0, 0, 0, 2, 5])),
        load_kv=draw(st.sampled_from(["placed", "placed", "async"])),
        load_overlap="none",
    )
    return Tiered(case, offload)


@st.composite
def tiers_below(
    draw: st.DrawFn,
    *,
    of_groups: bool = False,
    all_loads: bool = False,
    sync_loads: bool = False,
) -> OffloadConfig:
    """Host memory and files, in sizes that fill up; `of_groups`: only what tiers of parts of pages can have.

    `all_loads`: requests may also wait without a place, or not wait; `sync_loads`: only the latter.
    """
    modes: tuple[LoadKv, ...] = ("placed", "placed", "async", "sync") if all_loads else ("placed",)
    if sync_loads:
        modes = ("placed", "sync")
    load_kv = draw(st.sampled_from(modes))
    num_host = draw(st.sampled_from([1, 3, 8, 30, 200]))
    # A page takes from microseconds, less than a step, to many steps.
    rates = st.sampled_from([50_000, 1_000_000, 1_000_000_000])
    policy: Any = draw(st.sampled_from(["eager", "lazy", "exclusive"]))
    disk_pages = draw(st.sampled_from([None, None, 2, 10, 100]))
    return OffloadConfig(
        host_pages=num_host,
        policy=policy,
        target_free=draw(st.sampled_from([0, 1, 4, 20, None])),
        h2d=draw(rates),
        d2h=draw(rates),
        latency_us=draw(st.sampled_from([0.0, 10.0, 5000.0])),
        kv_bytes_per_token=BYTES_PER_TOKEN,
        full_prompt_hits=draw(st.booleans()) and not of_groups,
        disk_pages=disk_pages,
        disk_read=draw(rates),
        disk_write=draw(rates),
        store_within_ms=draw(st.sampled_from([0.0, 1.0, 20.0, 500.0])),
        fail_every=0 if load_kv == "sync" else draw(st.sampled_from([0, 0, 1, 2, 5])),
        load_kv=load_kv,
        load_overlap=draw(st.sampled_from(["none", "layers"])) if load_kv == "placed" else "none",
        num_layers=draw(st.sampled_from([1, 2, 7, 32])),
        preemption_mode="recompute" if of_groups else draw(st.sampled_from(["swap", "swap", "recompute"])),
    )


def naive_settings(tiers: Tiered) -> dict[str, Any]:
    """The settings of a NaiveOffloadEngine."""
    case, offload = tiers.case, tiers.offload
    specs = offload.specs(case.page_size)
    channels = [channel for spec in specs for channel in (spec.read, spec.write)]
    policy, write = offload.policy, specs[0].write
    step_pages = -(-case.max_num_batched_tokens // case.page_size)
    step_ns = Fraction(step_pages * case.page_size * BYTES_PER_TOKEN * 10**9, write.bytes_per_s)
    if policy == "exclusive" and ceil(step_ns) + round(write.latency_us * 1000) > offload.store_within_ms * 1e6:
        policy = "lazy"  # a channel that cannot store again what is released
    target_free = offload.target_free
    if target_free is None:
        num_below = sum(spec.num_pages for spec in specs)
        target_free = max(2 * step_pages, min(8 * step_pages, num_below // 8))
        if policy == "exclusive":
            target_free = max(-(-3 * step_pages // 2), min(8 * step_pages, num_below // 16))
    return {
        "num_pages": case.num_pages,
        "page_size": case.page_size,
        "max_num_batched_tokens": case.max_num_batched_tokens,
        "max_num_seqs": case.max_num_seqs,
        "profile": case.profile,
        "cost": polynomial_ns,
        "tiers": [spec.num_pages for spec in specs],
        "names": tuple(spec.name for spec in specs),
        "policy": policy,
        "target_free": target_free,
        "page_bytes": BYTES_PER_TOKEN * case.page_size,
        "rates": {channel.name: channel.bytes_per_s for channel in channels},
        "latency_ns": {channel.name: round(channel.latency_us * 1000) for channel in channels},
        "full_prompt_hits": offload.full_prompt_hits,
        "fail_every": offload.fail_every,
        "store_within_ns": round(offload.store_within_ms * 1e6),
        "long_prefill_token_threshold": case.long_prefill_token_threshold,
        "watermark": case.watermark,
        "load_kv": offload.load_kv,
        "swaps": offload.preemption_mode == "swap",
        "num_layers": offload.num_layers if offload.load_overlap == "layers" else 1,
    }
