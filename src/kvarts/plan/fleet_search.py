"""The fleets that a plan may recommend, and the search among them by a monotone law: more workers of a pool never lower
the goodput, nor break an SLO that is kept.

Fleets of a *family* differ only in the numbers of their workers. A replayed fleet is therefore an upper bound for all
fleets of its family that have no more workers in any pool. A fleet is not replayed if its upper bound is no better than
a replayed fleet with as many devices or fewer; nor if a fleet with fewer devices keeps the SLO.

A kind of fleet is a change of the given settings, written as the options of a replay's command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import check_whole
from kvarts.base.settings import Flags, Given, Section, Setting, SettingError
from kvarts.base.units import parse_bytes
from kvarts.core.parts.combines import check_combination
from kvarts.plan.purchases import devices_of
from kvarts.sim.config import ReplayConfig, resolve_replay
from kvarts.sim.fleet.config import resolve_fleet

__all__ = [
    "BATCH",
    "Family",
    "Fleet",
    "FleetKind",
    "FleetKinds",
    "FleetOutcome",
    "FleetSearch",
    "given_of_fleets",
    "workers_of",
]

BATCH = 4
"""Fleets that are replayed before bounds are applied again: a constant, so that processes do not change the search."""
MOST_GPUS = 256
TENSOR_PARALLELS = (1, 2, 4, 8)
"""Devices of a worker that are tried unless a tensor parallel size is given."""
RANKS = ((1, 2), (1, 4), (1, 8), (1, 16), (4, 2), (8, 2))
"""Devices of a rank, and ranks, that are tried of models with experts: attention in each rank, experts over all."""
STAGES = ((8, 2), (8, 4))
"""Devices of a stage, and stages, that are tried where there are as many devices: a stage per node."""
ROUTERS = ("prefix", "least-loaded")
"""Routers that are tried by default."""
APART = ("prefill", "decode")
OF_FLEET = (*APART, "transfer", "scaling", "faults", "price", "store", "pool")
"""Tables of settings that only fleets have."""

Changes = dict[str, Any]
"""Settings by key; None drops the given value."""


class Family(msgspec.Struct, frozen=True):
    """Fleets of the same pools. `sizes`: devices of a worker, per pool.

    `skips`: numbers of workers that other families also have, such as one worker behind another router.
    """

    sizes: tuple[int, ...]
    skips: frozenset[tuple[int, ...]] = frozenset()


class Fleet(msgspec.Struct, frozen=True, order=True):
    """One fleet: the place of its family, and its workers per pool."""

    family: int
    counts: tuple[int, ...]


class FleetOutcome(msgspec.Struct, frozen=True):
    """The outcome of a replay. `keeps`: whether enough requests keep the SLO.

    `goodput`: a measure of the requests that do, which more workers do not lower. `also`: decides among equals.
    """

    goodput: float
    keeps: bool
    also: float = 0.0


class FleetSearch:
    """The best fleets of `families` with at most `most_devices`. `measure` replays several fleets at once.

    With `ends`, the search ends at the fewest devices that keep the SLO: more of them have nothing to gain.
    """

    def __init__(
        self,
        families: Sequence[Family],
        most_devices: int,
        measure: Callable[[Sequence[Fleet]], Sequence[FleetOutcome]],
        *,
        ends: bool = True,
    ) -> None:
        self.families = list(families)
        self.known: dict[Fleet, FleetOutcome] = {}
        """The replayed fleets."""
        self.limit = most_devices
        """The most devices of fleets that are still of interest."""
        self._measure = measure
        self._ends = ends
        self.fleets = sorted(self._all(most_devices), key=lambda fleet: (self.devices(fleet), fleet))
        """All fleets with at most `most_devices`, the smallest first."""
        self._by_devices: dict[int, list[Fleet]] = {}
        for fleet in self.fleets:
            self._by_devices.setdefault(self.devices(fleet), []).append(fleet)

    def devices(self, fleet: Fleet) -> int:
        """Return the number of devices of a fleet."""
        return sum(map(int.__mul__, fleet.counts, self.families[fleet.family].sizes))

    def run(self) -> None:
        """Replay the fleets that may be on the front, or the best of their number of pools within the limit."""
        self._climb([fleet for fleet in self.fleets if len(fleet.counts) == 1])
        self._lower_limit([fleet for fleet in self.fleets if len(fleet.counts) > 1])
        self._descend()

    def front(self) -> list[Fleet]:
        """Return the replayed fleets that have more goodput than all with as many devices or fewer, smallest first.

        Fleets with equal devices and goodput are represented by the first. Devices beyond the limit are left out.
        """
        found: list[Fleet] = []
        for fleet in self.in_order():
            if self.devices(fleet) <= self.limit and (
                not found or self.known[fleet].goodput > self.known[found[-1]].goodput
            ):
                found.append(fleet)
        return found

    def in_order(self) -> list[Fleet]:
        """Return the replayed fleets: the smallest first, among equals those with the most goodput."""

        def rank(fleet: Fleet) -> tuple[int, float, float, Fleet]:
            found = self.known[fleet]
            return self.devices(fleet), -found.goodput, -found.also, fleet

        return sorted(self.known, key=rank)

    def pairs(self) -> Iterator[tuple[FleetOutcome, FleetOutcome]]:
        """Yield the replays of a family of which one has no more workers in any pool than the other; that one first."""
        for fleet, found in self.known.items():
            for other, larger in self.known.items():
                if other != fleet and other.family == fleet.family and _covers(other, fleet):
                    yield found, larger

    # Steps ----------------------------------------------------------------------------------------------------

    def _climb(self, fleets: Sequence[Fleet]) -> None:
        """Replay `fleets`, the smallest first, until one keeps the SLO."""
        for start in range(0, len(fleets), BATCH):
            self._replay([fleet for fleet in fleets[start : start + BATCH] if self.devices(fleet) <= self.limit])

    def _lower_limit(self, fleets: Sequence[Fleet]) -> None:
        """Find the fewest devices with which one of `fleets` keeps the SLO, by bisection; the limit becomes these."""
        if not self._ends or not fleets:
            return
        high = self.limit
        is_kept = any(each.keeps for each in self.known.values())
        low = self.devices(fleets[0]) - 1
        most = high - 1 if is_kept else high
        if most <= low or not self._reaches(fleets, most):
            return
        high = self.limit
        while high - low > 1:
            middle = (low + high) // 2
            if self._reaches(fleets, middle):
                high = min(middle, self.limit)
            else:
                low = middle

    def _reaches(self, fleets: Sequence[Fleet], num_devices: int) -> bool:
        """Return whether one of `fleets` with at most `num_devices` keeps the SLO.

        Only fleets without room for another worker are replayed, those with the most even pools first.
        """
        full = [fleet for fleet in fleets if self.devices(fleet) <= num_devices and self._is_full(fleet, num_devices)]
        full.sort(key=lambda fleet: (self._unevenness(fleet), fleet))
        while True:
            if any(self.known[fleet].keeps for fleet in full if fleet in self.known):
                return True
            rest = [fleet for fleet in full if fleet not in self.known and self._may_keep(fleet)]
            if not rest:
                return False
            self._replay(rest[:BATCH])

    def _descend(self) -> None:
        """Replay the fleets whose bounds permit them to be on the front, the largest first.

        At the limit itself, fleets are only compared with those of as many pools: each kind has its best there.
        """
        for num_devices in range(self.limit, 0, -1):
            level = self._by_devices.get(num_devices, [])
            is_limit = num_devices == self.limit
            if is_limit:  # also smaller ones that have no room for another worker
                level = [
                    fleet
                    for fleet in self.fleets
                    if self.devices(fleet) <= num_devices and self._is_full(fleet, num_devices)
                ]
            while rest := [fleet for fleet in level if fleet not in self.known and self._is_open(fleet, is_limit)]:
                rest.sort(key=lambda fleet: (-self._bound(fleet), self._unevenness(fleet), fleet))
                self._replay(rest[:BATCH])

    def _replay(self, fleets: Sequence[Fleet]) -> None:
        new = [fleet for fleet in fleets if fleet not in self.known]
        if not new:
            return
        for fleet, found in zip(new, self._measure(new), strict=True):
            self.known[fleet] = found
            if self._ends and found.keeps:
                self.limit = min(self.limit, self.devices(fleet))

    # Bounds ---------------------------------------------------------------------------------------------------

    def _larger(self, fleet: Fleet) -> Iterator[FleetOutcome]:
        """Yield the replays of fleets of the family that have as many workers or more in each pool."""
        for other, found in self.known.items():
            if other.family == fleet.family and _covers(other, fleet):
                yield found

    def _bound(self, fleet: Fleet) -> float:
        return min((found.goodput for found in self._larger(fleet)), default=float("inf"))

    def _may_keep(self, fleet: Fleet) -> bool:
        return all(found.keeps for found in self._larger(fleet))

    def _is_open(self, fleet: Fleet, is_of_kind: bool) -> bool:
        """Return whether the bound of a fleet is above the replays with as many devices or fewer."""
        most = self.devices(fleet)
        bound = self._bound(fleet)
        return not any(
            found.goodput >= bound
            for other, found in self.known.items()
            if self.devices(other) <= most and (not is_of_kind or len(other.counts) == len(fleet.counts))
        )

    # Fleets ---------------------------------------------------------------------------------------------------

    def _all(self, most_devices: int) -> Iterator[Fleet]:
        for place, family in enumerate(self.families):
            ranges = [range(1, most_devices // size + 1) for size in family.sizes]
            for counts in product(*ranges):
                if sum(map(int.__mul__, counts, family.sizes)) <= most_devices and counts not in family.skips:
                    yield Fleet(place, counts)

    def _is_full(self, fleet: Fleet, num_devices: int) -> bool:
        return self.devices(fleet) + min(self.families[fleet.family].sizes) > num_devices

    def _unevenness(self, fleet: Fleet) -> int:
        """Return the difference between the devices of the largest and the smallest pool."""
        devices = list(map(int.__mul__, fleet.counts, self.families[fleet.family].sizes))
        return max(devices) - min(devices)


def _covers(larger: Fleet, fleet: Fleet) -> bool:
    """Return whether `larger` has as many workers as `fleet` or more in each pool."""
    return all(map(int.__ge__, larger.counts, fleet.counts))


class FleetKind(msgspec.Struct, frozen=True):
    """Fleets that differ only in numbers of workers. `tensor_parallels`: per pool; None: as given.

    `store`: the size of a store that all workers share, if any. A worker of `data_parallel` ranks divides its experts
    over all their devices; one of `pipeline_parallel` stages, its layers.
    """

    is_apart: bool
    tensor_parallels: tuple[int | None, ...]
    router: str
    store: str | None
    data_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def name(self) -> str:
        """The kind in words."""
        sizes = " + ".join(f"TP{size}" for size in self.tensor_parallels if size is not None)
        ranks = f"DP{self.data_parallel} EP" if self.data_parallel > 1 else ""
        stages = f"PP{self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        words = ["apart" if self.is_apart else "mixed", sizes, ranks, stages, self.router, self.store]
        return " ".join(filter(None, words))


class FleetKinds:
    """The kinds of fleets of `given` settings with at most `most_devices`.

    `routers`, `stores`: those that are tried; each store in addition to none. Given settings of workers and pools
    remain as they are: a given tensor parallel size, router or store is the only one. Raise ConfigError for settings
    that the plan determines itself, without an SLO, and if no kind of fleet is possible.
    """

    def __init__(
        self,
        given: Given,
        sections: Sequence[Section],
        most_devices: int,
        *,
        routers: Sequence[str] = (),
        stores: Sequence[str] = (),
    ) -> None:
        check_whole(most_devices, "gpus", most=MOST_GPUS)
        self._given = given
        self._sections = [section for section in sections if not section.is_named]
        self._all_sections = sections
        self._known: dict[str, Setting] = {each.key: each for section in self._sections for each in section.settings}
        self.most_devices = most_devices
        self._check()
        self._check_tried(routers, stores)
        tried = [given["router"]] if "router" in given else routers or ROUTERS
        self.routers: list[str] = list(dict.fromkeys(tried))
        scopes = [f"tier.{name}.scope" for name in given.names("tier")]
        has_store = any(key in given for key in ("store.pages", "store.memory"))
        has_store = has_store or any(key in given and given.value_of(key) == "all" for key in scopes)
        if has_store and stores:
            raise SettingError("is one size already", "store_sizes", hint="Leave one of them out.")
        self.stores: list[str | None] = [None] if has_store else [None, *dict.fromkeys(stores)]
        self.kinds: list[FleetKind] = []
        self.families: list[Family] = []
        """The kinds as the search takes them, in the same order."""
        self.left_out: list[dict[str, str]] = []
        """Kinds that cannot be replayed, with the reasons."""
        self._find()
        if self.scaler is not None and not any(map(self.can_scale, self.kinds)):
            self.config(self.kinds[0], (1,) * len(self.families[0].sizes), is_scaled=True)  # raises
        self.first = workers_of(self.config(self.kinds[0], (1,) * len(self.families[0].sizes)))[0]
        """The configuration of a worker of the first kind."""
        if all(getattr(self.first.slo, field) is None for field in self.first.slo.__struct_fields__):
            raise SettingError("needs an SLO, by which requests count as goodput", "gpus", hint="Give --slo-ttft-ms.")
        self.links_are_free = "transfer.rate" not in given and any(kind.is_apart for kind in self.kinds)
        """Whether transfers of KV take no time because no rate of the links was given."""

    def _check(self) -> None:
        """Raise ConfigError for settings that the plan determines, or that it could not print in its commands."""
        given = self._given
        of_plan = {"fleets": "gpus", "plan": "gpus"}
        counts = [key for key in ("replicas", *(f"{role}.replicas" for role in APART)) if key in given]
        in_file = [key for key in given_of_fleets(given) if given.source_of(key).path is not None]
        asked = {
            "pool_tables": f"[pool.{given.names('pool')[0]}]" if given.names("pool") else next(iter(in_file), None),
            "counts": next(iter(counts), None),
            "faults": next(iter(given.in_table("faults")), None),
            "ranks": "data_parallel" if "data_parallel" in given and given["data_parallel"] > 1 else None,
        }
        for feature, key in asked.items():
            if key is None:
                continue
            try:
                check_combination({**of_plan, feature: key})
            except SettingError as error:
                raise given.named(error, ()) from error

    def _check_tried(self, routers: Sequence[str], stores: Sequence[str]) -> None:
        """Raise SettingError for a router that does not exist, or a store that is not a size."""
        for router in routers:
            try:
                ReplayConfig().routing_settings.check(router)
            except ConfigError as error:
                raise SettingError(error.what, "routers", hint=error.hint) from error
        for store in stores:
            try:
                parse_bytes(store)
            except ConfigError as error:
                raise SettingError(error.what, "store_sizes", hint=error.hint) from error

    def _find(self) -> None:
        """Find the kinds that can be replayed with one worker per pool, and the devices of these."""
        errors: list[ConfigError] = []
        alone: set[FleetKind] = set()  # kinds without their routers: single workers of each are in one family
        for kind in self._all_kinds():
            counts = (1,) * (2 if kind.is_apart else 1)
            try:
                config = self.config(kind, counts)
                if self.most_devices > len(counts):
                    self.config(kind, (2, *counts[1:]))  # which has a router
            except ConfigError as error:
                errors.append(error)
                self.left_out.append({"kind": kind.name, "why": str(error)})
                continue
            sizes = tuple(devices_of(each) * kind.data_parallel for each in workers_of(config))
            if sum(sizes) <= self.most_devices:
                self.kinds.append(kind)
                without_router = msgspec.structs.replace(kind, router="")
                self.families.append(Family(sizes, frozenset([counts] if without_router in alone else [])))
                alone.add(without_router)
        if not self.kinds:
            if errors:
                raise errors[0]
            raise SettingError("is less than one worker takes", "gpus", hint="Give {gpus} a larger number.")

    def _all_kinds(self) -> Iterator[FleetKind]:
        sizes = [size for size in TENSOR_PARALLELS if size <= self.most_devices]
        if "model" not in self._given or "device" not in self._given:
            sizes = [1]

        def tried(key: str) -> list[int | None]:
            return [None] if key in self._given or "tensor_parallel" in self._given else list(sizes)

        for router, store in product(self.routers, self.stores):
            for size in tried("tensor_parallel"):
                yield FleetKind(is_apart=False, tensor_parallels=(size,), router=router, store=store)
            if store is None:
                yield from self._larger_kinds(router)
            if self.most_devices > 1:
                for pair in product(*(tried(f"{role}.tensor_parallel") for role in APART)):
                    yield FleetKind(is_apart=True, tensor_parallels=pair, router=router, store=store)

    def _larger_kinds(self, router: str) -> Iterator[FleetKind]:
        """Yield the kinds of mixed workers of several ranks or stages, unless the given settings divide the model."""
        given = self._given
        ways = ("tensor_parallel", "data_parallel", "expert_parallel", "pipeline_parallel")
        if "model" not in given or "device" not in given or any(key in given for key in ways):
            return
        from kvarts.cost.hardware.model_config import load_geometry

        if load_geometry(given["model"]).experts is not None:
            for size, ranks in RANKS:
                if size * ranks <= self.most_devices:
                    yield FleetKind(
                        is_apart=False, tensor_parallels=(size,), router=router, store=None, data_parallel=ranks
                    )
        for size, stages in STAGES:
            if size * stages <= self.most_devices:
                yield FleetKind(
                    is_apart=False, tensor_parallels=(size,), router=router, store=None, pipeline_parallel=stages
                )

    @property
    def scaler(self) -> str | None:
        """The given policy of autoscaling."""
        given = self._given
        return given["scaling.policy"] if "scaling.policy" in given else None  # noqa: SIM401  (not a dict)

    def can_scale(self, kind: FleetKind) -> bool:
        """Return whether the scaler applies to fleets of `kind`: a script has numbers for some pools only."""
        try:
            self.config(kind, (1,) * (2 if kind.is_apart else 1), is_scaled=True)
        except ConfigError:
            return False
        return True

    def changes(self, kind: FleetKind, counts: Sequence[int], *, is_scaled: bool = False) -> Changes:
        """Return the settings of a fleet, as changes of those given: without the scaler unless it `is_scaled`."""
        pools = APART if kind.is_apart else ("",)
        changes: Changes = {} if is_scaled else dict.fromkeys(self._given.in_table("scaling"))
        if not kind.is_apart:
            changes |= {key: None for table in (*APART, "transfer") for key in self._given.in_table(table)}
        for pool, count, size in zip(pools, counts, kind.tensor_parallels, strict=True):
            prefix = f"{pool}." if pool else ""
            if kind.is_apart or count > 1:
                changes[f"{prefix}replicas"] = count
            if size is not None and size > 1:
                changes[f"{prefix}tensor_parallel"] = size
        if kind.data_parallel > 1:
            changes["data_parallel"] = kind.data_parallel
            changes["expert_parallel"] = kind.data_parallel * (kind.tensor_parallels[0] or 1)
        if kind.pipeline_parallel > 1:
            changes["pipeline_parallel"] = kind.pipeline_parallel
        if sum(counts) > len(pools) or is_scaled:
            changes["router"] = kind.router
        else:
            changes |= dict.fromkeys(("router", *self._given.in_table("routing")))
        if kind.store is not None:
            changes["store.memory"] = kind.store
        return changes

    def config(self, kind: FleetKind, counts: Sequence[int], *, is_scaled: bool = False) -> Any:
        """Return a ReplayConfig, or a FleetConfig where workers differ, share a store or are scaled.

        Raise ConfigError if the fleet cannot be replayed.
        """
        return self.config_of(self.changes(kind, counts, is_scaled=is_scaled))

    def config_of(self, changes: Changes) -> Any:
        """Return the configuration of a fleet, from its changes of the given settings; see `config`."""
        given = self._changed(changes)
        if given_of_fleets(given):
            return resolve_fleet(given, self._all_sections)
        return resolve_replay(given, self._all_sections).certain

    def _changed(self, changes: Mapping[str, Any]) -> Given:
        given = Given()
        for key, setting in self._known.items():
            if key in changes:
                if changes[key] is not None:
                    given.add(setting, changes[key], Flags())
            elif key in self._given:
                given.add(setting, self._given.value_of(key), self._given.source_of(key))
        unknown = [key for key, value in changes.items() if key not in self._known and value is not None]
        if unknown:
            raise ConfigError("needs kvarts.sim.fleet, which is not installed", field="gpus")
        return given


def given_of_fleets(given: Given) -> list[str]:
    """Return the keys of given settings that only fleets have."""
    return [key for table in OF_FLEET for key in given.in_table(table)]


def workers_of(config: Any) -> list[ReplayConfig]:
    """Return the configuration of the workers of each pool; that of all if there are no pools."""
    return [pool.each for pool in config.pools] if hasattr(config, "pools") else [config]
