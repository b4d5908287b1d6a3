"""What serves a trace: devices, host memory and its store policy; their prices, and the search for the cheapest.

`with_host_memory` is the only search that adds host memory to devices, and `Prices.of` the only definition of cost.
Shapes are ways to divide a model: lines of one shape differ in the number of devices. The search assumes that more
devices of a shape, and more host memory under one policy, never hurt; if that holds for the first FEW lines of a shape,
it finds the cheapest of these whatever more devices do. Smaller sizes that miss an SLO by a few requests are tried one
by one, as more host memory may lose a few. What it returns has been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from kvarts.base.errors import ConfigError, InputError, problem_of
from kvarts.base.files import read_toml
from kvarts.core.config import WritePolicy
from kvarts.cost.hardware.device import preset_name
from kvarts.sim.config import ReplayConfig
from kvarts.sim.replay import replay_one
from kvarts.sim.report.advice import as_size
from kvarts.sim.traffic.trace import Trace
from kvarts.sim.trials import ReplayTrials, round_sizes

__all__ = [
    "FEW",
    "Prices",
    "Purchase",
    "between",
    "devices_of",
    "first_from",
    "first_that",
    "given_host_bytes",
    "given_policy",
    "host_memory_of",
    "host_sizes",
    "load_prices",
    "per_million_tokens",
    "policies_of",
    "with_host_memory",
    "with_memory",
]

GIB = 1 << 30
NS_PER_HOUR = 3_600_000_000_000
SUFFIX = "_gib"
SMALLEST = 1 / 64
"""The smallest host memory that is tried, as a share of the largest."""
MARGIN = 1.25
"""The largest, as a multiple of the working set: host memory also receives pages that no request uses again."""
OF_HICACHE: tuple[WritePolicy, ...] = ("write_through", "write_through_selective", "write_back")
POLICIES = {"sglang": OF_HICACHE, "tensorrt-llm": ("exclusive",), "trtllm": ("exclusive",)}
"""Store policies of engines by the setting `engine`, the default first; OF_VLLM for others, and for the rules of vLLM.

TensorRT-LLM stores a block before its eviction, and swaps it with one of the device when it is used again.
"""
OF_VLLM = ("eager", "lazy")
FEW = 3
"""Lines of a shape, and replicas, that a search also tries if more of them are not enough: hits may be divided."""
NEAR = 0.03
"""The share of requests that a size may lack of keeping an SLO if the next smaller one is to be tried, too."""
SIZE_RATIO = 1.25
"""Sizes are a quarter apart."""


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices per hour: of a device, of a GiB of host memory, and of a GiB of other tiers, by their names.

    `currency`: empty for relative prices: a device is 1. `date`: when the prices were valid.

    >>> Prices(device=2.0, host_gib=0.01).of(2, 100 * 2**30)
    6.0
    """

    device: float = 1.0
    host_gib: float = 1 / 1024
    tiers: dict[str, float] = {}
    currency: str = ""
    date: str = ""

    def of(self, num_devices: int, host_bytes: int = 0) -> float:
        """Return the price per hour of devices with `host_bytes` of host memory each."""
        return num_devices * (self.device + host_bytes / GIB * self.host_gib)

    def per_gib(self, device_bytes: int | None) -> dict[str, float]:
        """Return the price of a GiB of each tier. `device_bytes`: the memory of a device, if known."""
        of_device = {"device": self.device * GIB / device_bytes} if device_bytes else {}
        return {**of_device, "host": self.host_gib, **self.tiers}

    def sentence(self) -> str:
        """Return what the prices are, and where they are from."""
        if self.currency:
            each = f"{self.currency} {self.device:g} per GPU and {self.host_gib:g} per GiB of host memory, an hour"
            return f"prices of {self.date}: {each}"
        gib = self.device / self.host_gib
        return f"relative prices, not a quotation: a GPU costs as much as {gib:,.0f} GiB of host memory"


def per_million_tokens(trace: Trace, price_per_hour: float, config: ReplayConfig) -> float | None:
    """Return the price of a million tokens, prompts and answers, at the rate of the trace; None in a closed loop."""
    requests = trace.requests or ()
    last_ns = max((request.arrival_ns for request in requests), default=0) / config.speedup
    num_tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request in requests)
    if not last_ns or config.concurrency is not None:
        return None
    return price_per_hour * (last_ns / NS_PER_HOUR) / (num_tokens / 1e6)


class _PricesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of prices: `per_hour` has host_gib, disk_gib (or another tier's), and device or names of devices."""

    date: str
    currency: str
    per_hour: dict[str, float]


def load_prices(path: Path, device: str | None) -> Prices:
    """Return the prices in a TOML file, for the device with the name `device`.

    Raise MissingFileError; InputError for a malformed file, and if it has no price for the device.
    """
    hint = "It has date, currency and a table [per_hour] with host_gib and the names of devices."
    try:
        read = msgspec.convert(read_toml(path, hint=hint), _PricesFile)
    except msgspec.ValidationError as error:
        raise InputError(problem_of(error), path=path, hint=hint) from error
    prices = dict(read.per_hour)
    for name, value in prices.items():
        if not 0 < value <= 1e9:
            raise InputError(f"must be above 0 and at most 1e9, got {value:g}", path=path, field=f"per_hour.{name}")
    of_tiers = {name.removesuffix(SUFFIX): prices.pop(name) for name in list(prices) if name.endswith(SUFFIX)}
    same = [] if device is None else [name for name in prices if preset_name(name) == preset_name(device)]
    name = next((each for each in (device, *same) if each in prices), "device")
    if name not in prices:
        what = f"has no price for {device or 'device'}"
        raise InputError(what, path=path, field="per_hour", hint=f"Add {device or name} = PRICE, per hour.")
    if "host" not in of_tiers:
        raise InputError("has no host_gib", path=path, field="per_hour", hint="Add host_gib = PRICE, per hour.")
    host_gib = of_tiers.pop("host")
    return Prices(device=prices[name], host_gib=host_gib, tiers=of_tiers, currency=read.currency, date=read.date)


class Purchase(msgspec.Struct, frozen=True, order=True):
    """Devices of a shape, and `host_bytes` of host memory per device that are stored to under `policy`, if any."""

    num_devices: int
    shape: int = 0
    host_bytes: int = 0
    policy: str = ""

    def price(self, prices: Prices) -> float:
        """Return the price per hour."""
        return prices.of(self.num_devices, self.host_bytes)


def host_memory_of(num_bytes: int, policy: str) -> str:
    """Return host memory in words, as the end of a sentence; empty without any."""
    if not num_bytes:
        return ""
    size = as_size(num_bytes).replace("GiB", " GiB").replace("MiB", " MiB")
    return f" and {size} of host memory ({policy} stores)"


def host_sizes(config: ReplayConfig, reused_pages: int) -> list[int]:
    """Return the sizes of host memory per device that are tried, ascending, a quarter apart; empty if it has some.

    `reused_pages`: the working set of the trace.
    """
    trials = _trials(config)
    page_bytes = config.page_bytes or trials.token_bytes * config.page_size
    most_bytes = MARGIN * reused_pages * page_bytes
    if not most_bytes or any(config.tiers.values()) or not trials.can_have_host_memory:
        return []
    return [size for size in round_sizes(most_bytes * SMALLEST, most_bytes, SIZE_RATIO) if size >= page_bytes]


def devices_of(config: ReplayConfig) -> int:
    """Return the number of devices over which one replica is divided."""
    return int(getattr(config.cost, "tensor_parallel", 1)) * int(getattr(config.cost, "pipeline_parallel", 1))


def given_host_bytes(config: ReplayConfig) -> int:
    """Return the bytes of host memory per device that a configuration has, of the tier `host`."""
    page_bytes = config.page_bytes if config.kv_groups == "off" else config.memory.block_bytes
    return config.tiers.get("host", 0) * page_bytes


def given_policy(config: ReplayConfig) -> str:
    """Return the store policy of a configuration; empty if it has neither a tier nor the engine `sglang`."""
    if config.plans_batches:
        return config.hicache_write_policy
    return "" if config.offload is None else config.offload.policy


def policies_of(config: ReplayConfig) -> list[str]:
    """Return the store policies that the engine of `config` has and that a replay of it can have.

    A given policy other than the default, such as `exclusive`, is the only one.
    """
    given = given_policy(config)
    found = []
    for policy in POLICIES.get(config.engine, OF_VLLM) if given in ("", "eager", OF_HICACHE[0]) else [given]:
        try:
            with_memory(config, GIB, policy)
        except ConfigError:
            continue
        found.append(policy)
    return found


def with_memory(config: ReplayConfig, host_bytes: int, policy: str) -> ReplayConfig:
    """Return the configuration with host memory, in bytes per device. Raise ConfigError if it cannot have it."""
    offload = _trials(config).with_memory(host_bytes).offload
    assert offload is not None
    if config.plans_batches:
        return msgspec.structs.replace(config, offload=offload, hicache_write_policy=cast("WritePolicy", policy))
    return msgspec.structs.replace(config, offload=msgspec.structs.replace(offload, policy=policy))


def _trials(config: ReplayConfig) -> ReplayTrials:
    return ReplayTrials(replay_one, Trace([]), config)


def with_host_memory(
    shapes: Sequence[Sequence[Purchase]],
    sizes: Sequence[int],
    policies: Sequence[str],
    prices: Prices,
    lacks: Callable[[Purchase], float],
    limit: float,
) -> list[Purchase]:
    """Return purchases with host memory that keep the SLO and cost less than `limit`, each less than the one before.

    `shapes`: per shape, the purchases without host memory, fewest devices first. `sizes`: ascending, in bytes. `lacks`:
    the share of requests that a purchase lacks of keeping the SLO; 0 or less if it keeps it.
    """
    found: list[Purchase] = []

    def affordable(line: Purchase) -> list[int]:
        most = found[-1].price(prices) if found else limit
        return [size for size in sizes if prices.of(line.num_devices, size) < most]

    def at(line: Purchase, size: int, policy: str) -> Purchase:
        return msgspec.structs.replace(line, host_bytes=size, policy=policy)

    for lines in shapes:
        able = [line for line in lines if affordable(line)]
        if not able:
            continue
        most = affordable(able[0])[-1]

        def reaches(line: Purchase, most: int = most) -> bool:
            return any(lacks(at(line, most, policy)) <= 0 for policy in policies)

        few = min(FEW, len(able)) - 1
        kept = next((place for place in sorted({few, len(able) - 1}) if reaches(able[place])), None)
        if kept is None:
            continue
        fails = -1 if kept == few else few
        first = between(lambda place, able=able: reaches(able[place]), fails, kept)  # type: ignore[misc]
        for line in able[first:]:
            for policy in policies:
                left = [at(line, size, policy) for size in affordable(line)]
                place = between(lambda place, left=left: lacks(left[place]) <= 0, -1, len(left))  # type: ignore[misc]
                cheapest = left[place:][:1]
                for bought in reversed(left[:place]):
                    if (lacking := lacks(bought)) > NEAR:
                        break
                    if lacking <= 0:
                        cheapest = [bought]
                found += cheapest
    return found


def between(keeps: Callable[[int], bool], fails: int, kept: int) -> int:
    """Return the lowest place where `keeps` holds, by bisection. It fails at `fails` and holds at `kept`."""
    while kept - fails > 1:
        middle = (fails + kept) // 2
        if keeps(middle):
            kept = middle
        else:
            fails = middle
    return kept


def first_that(keeps: Callable[[int], bool], start: int, end: int) -> int | None:
    """Return the lowest place below `end` where `keeps` holds, or None if none is found. `start` is tried first."""
    return between(keeps, -1, start) if keeps(start) else first_from(keeps, start, end)


def first_from(keeps: Callable[[int], bool], fails: int, end: int) -> int | None:
    """Return the lowest place in (`fails`, `end`) where `keeps` holds, or None. It does not hold at `fails`."""
    reach = 1
    while fails < end - 1:
        place = min(end - 1, fails + reach)
        if keeps(place):
            return between(keeps, fails, place)
        fails, reach = place, reach * 2
    return None
