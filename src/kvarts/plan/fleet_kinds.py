"""The fleets that a plan may recommend, as changes of the given settings: the options of a replay's command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from kvarts.combines import check_combination
from kvarts.errors import ConfigError
from kvarts.limits import check_whole
from kvarts.plan.fleet_search import Family
from kvarts.rooms import from_room
from kvarts.settings import Flags, Given, Section, Setting, SettingError
from kvarts.sim.config import ReplayConfig, resolve_replay
from kvarts.units import parse_bytes

__all__ = ["FleetKind", "FleetKinds", "devices_of", "given_of_fleets", "workers_of"]

MOST_GPUS = 256
TENSOR_PARALLELS = (1, 2, 4, 8)
"""Devices of a worker that are tried unless a tensor parallel size is given."""
ROUTERS = ("prefix", "least-loaded")
"""Routers that are tried by default."""
APART = ("prefill", "decode")
OF_FLEET = (*APART, "transfer", "scaling", "faults", "store", "pool")
"""Tables of settings that only fleets have."""

Changes = dict[str, Any]
"""Settings by key; None drops the given value."""


class FleetKind(msgspec.Struct, frozen=True):
    """Fleets that differ only in numbers of workers. `tensor_parallels`: per pool; None: as given.

    `store`: the size of a store that all workers share, if any.
    """

    is_apart: bool
    tensor_parallels: tuple[int | None, ...]
    router: str
    store: str | None

    @property
    def name(self) -> str:
        """The kind in words."""
        sizes = " + ".join(f"TP{size}" for size in self.tensor_parallels if size is not None)
        return " ".join(filter(None, ["apart" if self.is_apart else "mixed", sizes, self.router, self.store]))


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
        tried = [given["router"]] if "router" in given else routers or self._default_routers()
        self.routers: list[str] = list(dict.fromkeys(tried))
        has_store = any(key in given for key in ("store.pages", "store.memory"))
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

    def _default_routers(self) -> Sequence[str]:
        try:
            from_room("routers.config", "Routing", field="routers")
        except ConfigError:
            return ("round-robin",)
        return ROUTERS

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
            sizes = tuple(devices_of(each) for each in workers_of(config))
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
            if self.most_devices > 1:
                for pair in product(*(tried(f"{role}.tensor_parallel") for role in APART)):
                    yield FleetKind(is_apart=True, tensor_parallels=pair, router=router, store=store)

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
        given = self._changed(self.changes(kind, counts, is_scaled=is_scaled))
        if given_of_fleets(given):
            return from_room("fleet.config", "resolve_fleet", field="gpus")(given, self._all_sections)
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
            raise ConfigError("needs kvarts.fleet, which is not installed", field="gpus")
        return given


def given_of_fleets(given: Given) -> list[str]:
    """Return the keys of given settings that only fleets have."""
    return [key for table in OF_FLEET for key in given.in_table(table)]


def workers_of(config: Any) -> list[ReplayConfig]:
    """Return the configuration of the workers of each pool; that of all if there are no pools."""
    return [pool.each for pool in config.pools] if hasattr(config, "pools") else [config]


def devices_of(worker: ReplayConfig) -> int:
    """Return the number of devices of a worker."""
    return int(getattr(worker.cost, "tensor_parallel", 1)) * int(getattr(worker.cost, "pipeline_parallel", 1))
