"""Configuration of a fleet: pools of workers, and the links that carry KV between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from kvarts.base.errors import ConfigError
from kvarts.base.limits import MOST_BYTES, MOST_MS, MOST_PAGES, brief, check_number, check_whole, whole_number
from kvarts.base.settings import INLINE, AtLeastOne, Given, Section, Setting, SettingError, Within, setting, settings_of
from kvarts.base.units import meant_size, parse_bytes, parse_rate
from kvarts.core.parts.combines import check_combination
from kvarts.core.tiers.config import OffloadConfig
from kvarts.proof.audit.opening import not_followed_in_handoffs
from kvarts.sim.config import ReplayConfig, Slo, check_token_bytes, resolve_replay
from kvarts.sim.fleet.faults import Fault
from kvarts.sim.fleet.scaling import Scaler, Scripted, Thresholds, parse_scaler
from kvarts.sim.hardware import DeviceSettings, ModelSettings
from kvarts.sim.routers.config import ages_read_by

__all__ = [
    "SECTIONS",
    "FleetConfig",
    "FleetWorker",
    "ModelPools",
    "PoolConfig",
    "Role",
    "StoreSettings",
    "TransferMode",
    "TransferSettings",
    "is_of_fleet",
    "key_of_fleet",
]
__all__ += ["resolve_fleet"]

MOST_STARTUP_S = MOST_HOLD_S = 86_400.0
MOST_LAYERS = 10_000
MOST_PRICE = 1e9
"""Price of a device for an hour."""
BYTES_OF_PAGE = ("page_bytes", "kv_bytes_per_token")
"""Facts of a configuration from which its pages have their size in memory."""
TOKEN_BYTES = 131_072
"""Bytes of the KV of a token without a model: those of Llama 3.1 8B in 16 bits."""

Role = Literal["mixed", "prefill", "decode"]
TransferMode = Literal["full-prompt", "missing", "layer-wise"]
Sharing = Literal["none", "worker", "pool"]


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links from workers that compute prompts to workers that generate."""

    rate: Annotated[
        str | None,
        setting(
            "Bytes a second of each transfer of KV, such as 25GB/s.",
            flag=INLINE,
            metavar="RATE",
            default="transfers take their latency alone",
        ),
    ] = None
    latency_ms: Annotated[float, setting("Milliseconds of each transfer beside that.", flag=INLINE, metavar="MS")] = 0.0
    mode: Annotated[
        TransferMode,
        setting(
            "What is sent: the whole prompt; only pages that the receiver does not have; or the whole prompt, each "
            "layer of a step once it is computed.",
            flag=INLINE,
        ),
    ] = "full-prompt"
    layers: Annotated[
        int | None,
        setting(
            "Layers of which each is sent once it is computed, with mode layer-wise.",
            flag=INLINE,
            metavar="N",
            default="those of the model",
        ),
    ] = None
    sharing: Annotated[
        Sharing,
        setting(
            "Whether each transfer has the rate for itself, or each worker sends and receives at that rate, and its "
            "transfers share it, or those of all workers of a pool do.",
            flag=INLINE,
        ),
    ] = "none"
    least_remote: Annotated[
        int | None,
        setting(
            "A decode worker is chosen first, and computes the prompt itself unless it lacks at least so many tokens.",
            flag="--remote-prefill-from",
            metavar="N",
            default="prefill workers compute every prompt",
        ),
    ] = None
    pull: Annotated[
        bool,
        setting(
            "Workers read pages that they lack from the host memory of others over these links, instead of computing "
            "them, if that is sooner.",
            flag="--pull-from-peers",
        ),
    ] = False
    token_bytes: Annotated[
        int | None,
        setting("Bytes of KV of a token on a link.", flag=INLINE, metavar="N", default="those of the model"),
    ] = None
    hold_s: Annotated[
        float,
        setting(
            "Seconds that a worker of a mock holds the pages of a prompt until a request names them.",
            flag=None,
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        check_number(self.latency_ms, "latency_ms", most=MOST_MS)
        check_number(self.hold_s, "hold_s", most=MOST_HOLD_S)
        if self.mode not in get_args(TransferMode):
            modes = "'full-prompt', 'missing' or 'layer-wise'"
            raise SettingError(f"must be {modes}, got {self.mode!r}", "mode")
        if self.pull and self.rate is None:
            raise SettingError("does not say how long it takes", "pull", hint="Give {rate} as well.")
        if self.mode == "layer-wise" and self.rate is None:
            raise SettingError("has no effect on transfers that take no time", "mode", hint="Give {rate} as well.")
        if self.layers is not None:
            check_whole(self.layers, "layers", most=MOST_LAYERS)
            if self.mode != "layer-wise":
                raise SettingError("has no effect without layer-wise transfers", "layers", hint="Leave it out.")
        if self.sharing not in get_args(Sharing):
            raise SettingError(f"must be 'none', 'worker' or 'pool', got {self.sharing!r}", "sharing")
        if self.sharing != "none" and self.rate is None:
            raise SettingError("shares no rate", "sharing", hint="Give {rate} as well.")
        if self.token_bytes is not None:
            check_whole(self.token_bytes, "token_bytes")
        if self.least_remote is not None:
            check_whole(self.least_remote, "least_remote")
        if self.rate is not None and not self.bytes_per_s:
            raise SettingError("must be above 0", "rate", hint="Leave it out for transfers that take no time.")

    @property
    def bytes_per_s(self) -> int | None:
        """The rate as a number. Raise SettingError if it is not a rate."""
        if self.rate is None:
            return None
        try:
            return parse_rate(self.rate)
        except ConfigError as error:
            raise SettingError(error.what, "rate", hint=error.hint) from error


class ScalingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Autoscaling: the number of workers over time."""

    policy: Annotated[
        str | None,
        setting(
            "What adds and takes away workers: script,30s=3:1,90s=1:3 for numbers of prefill and decode workers from "
            "times on; queue,target=4 or kv,target=70 by requests that wait or percent of pages in use, as an HPA "
            "does; dynamo,context=32768, llm-d or llm-d-v2, as these do. All but the script take every=15s, least=1 "
            "and most=8.",
            flag="--scaler",
            metavar="POLICY",
        ),
    ] = None
    startup_s: Annotated[float, setting("Seconds that a new worker starts.", flag="--startup-time", metavar="S")] = 0.0

    def __post_init__(self) -> None:
        check_number(self.startup_s, "startup_s", most=MOST_STARTUP_S)
        if self.policy is not None:
            try:
                parse_scaler(self.policy)
            except ConfigError as error:
                raise SettingError(error.what, "policy", hint=error.hint) from error


class FaultSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failures of workers and links."""

    script: Annotated[
        str | None,
        setting(
            "What fails, and when: down:1=60s-90s for worker 1, cut:1=60s-90s for its link, slow:1:10=60s for a link "
            "that takes ten times as long from then on; several with commas between.",
            flag="--faults",
            metavar="SCRIPT",
        ),
    ] = None

    def __post_init__(self) -> None:
        try:
            _ = self.faults
        except ConfigError as error:
            raise SettingError(error.what, "script", hint=error.hint) from error

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The script, parsed."""
        if self.script is None:
            return ()
        from kvarts.sim.fleet.faults import parse_faults  # a replay without faults imports nothing of them

        return parse_faults(self.script)


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A store of pages that all workers share, below their own tiers."""

    pages: Annotated[
        int | None,
        setting(
            "A store that all workers share, in pages.", flag=INLINE, metavar="N", default="none", replaces=("memory",)
        ),
    ] = None
    memory: Annotated[
        int | str | None,
        setting(
            "A store that all workers share: 1TiB.", flag=INLINE, metavar="SIZE", default="none", replaces=("pages",)
        ),
    ] = None
    rate: Annotated[
        str,
        setting(
            "Bytes a second that the store reads, and that it writes, for all workers together.",
            flag=INLINE,
            metavar="RATE",
        ),
    ] = "80GB/s"
    worker_rate: Annotated[
        str,
        setting(
            "Bytes a second that each worker reads from the store, and that it writes.", flag=INLINE, metavar="RATE"
        ),
    ] = "10GB/s"
    worker_write_rate: Annotated[
        str | None,
        setting("Bytes a second that each worker writes to it.", flag=INLINE, metavar="RATE", default="as it reads"),
    ] = None
    latency_us: Annotated[
        float, setting("On top of every transfer to or from the store.", flag=INLINE, metavar="US")
    ] = 100.0

    def __post_init__(self) -> None:
        if self.pages is not None and self.memory is not None:
            raise SettingError("is given beside {memory}", "pages", hint="Keep one of them.")
        if self.pages is not None:
            check_whole(self.pages, "pages", most=MOST_PAGES)
        if self.memory is not None:
            check_whole(self._parsed(parse_bytes, "memory"), "memory", most=MOST_BYTES)
        for field in ("rate", "worker_rate", *(() if self.worker_write_rate is None else ("worker_write_rate",))):
            check_whole(self._parsed(parse_rate, field), field, most=MOST_BYTES)
        check_number(self.latency_us, "latency_us", most=MOST_MS)

    @property
    def bytes_per_s(self) -> tuple[int, int, int]:
        """The rates of the store, of a worker that reads, and of one that writes."""
        written = "worker_rate" if self.worker_write_rate is None else "worker_write_rate"
        return (
            self._parsed(parse_rate, "rate"),
            self._parsed(parse_rate, "worker_rate"),
            self._parsed(parse_rate, written),
        )

    @property
    def latency_ns(self) -> int:
        """The time on top of every transfer."""
        return round(self.latency_us * 1e3)

    def to_builtins(self) -> dict[str, Any]:
        """Return the settings as a report has them."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        if self.worker_write_rate is None:
            del values["worker_write_rate"]
        return values

    def num_units(self, unit_bytes: int, unit: str = "page") -> int:
        """Return the pages, or blocks, of the store. Raise SettingError for a size that holds none."""
        if self.pages is not None:
            return self.pages
        size = self._parsed(parse_bytes, "memory")
        if size < unit_bytes:
            hint = meant_size(str(self.memory), unit_bytes)
            raise SettingError(f"{self.memory} hold no {unit} of {unit_bytes:,} bytes", "memory", hint=hint)
        return min(MOST_PAGES, size // unit_bytes)

    def _parsed(self, parse: Callable[[str], int], field: str) -> int:
        value = getattr(self, field)
        if isinstance(value, int):
            return value
        try:
            return parse(value)
        except ConfigError as error:
            raise SettingError(error.what, field, hint=error.hint) from error


class PriceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of devices, for the costs in a report."""

    gpu_hour: Annotated[
        float | str | None,
        setting(
            "Price of a device for an hour, in any currency: 2.5; or by pool, prefill=2.5,decode=4. The report then "
            "has the cost of the fleet.",
            flag="--gpu-price",
            metavar="PRICE",
            default="none",
        ),
    ] = None

    def __post_init__(self) -> None:
        for price in self.by_pool.values():
            check_number(price, "gpu_hour", most=MOST_PRICE)

    @property
    def by_pool(self) -> dict[str, float]:
        """The price by the name of a pool; "" for all pools. Raise SettingError for anything else."""
        if self.gpu_hour is None:
            return {}
        prices: dict[str, float] = {}
        for part in str(self.gpu_hour).split(","):
            name, equals, price = part.rpartition("=")
            name = name.strip()
            try:
                value = float(price)
            except ValueError:
                hint = "Write 2.5, or prefill=2.5,decode=4."
                raise SettingError(f"{brief(part)} is not a price", "gpu_hour", hint=hint) from None
            if name in prices or bool(name) is not bool(equals):
                raise SettingError(f"{brief(part)} is not the price of one pool", "gpu_hour")
            prices[name] = value
        if "" in prices and len(prices) > 1:
            raise SettingError("has a price for all pools, and one for a pool", "gpu_hour", hint="Keep one of them.")
        return prices

    def of_pools(self, names: Sequence[str]) -> list[float | None]:
        """Return the price of each pool; None without any. Raise SettingError if they are not those of these pools."""
        prices = self.by_pool
        if "" in prices:
            return [prices[""]] * len(names)
        if prices and (other := sorted(prices.keys() ^ set(names))):
            what = f"has {'a' if other[0] in prices else 'no'} price for {other[0]}"
            raise SettingError(what, "gpu_hour", hint=f"The pools are {', '.join(names)}.")
        return [prices.get(name) for name in names]


OF_POOL = (
    "replicas",
    "device",
    "tensor_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "kv_memory",
    "memory_fraction",
    "pages",
    "max_batched_tokens",
    "max_seqs",
    "cost",
    "router",
    "host_pages",
    "host_memory",
)
"""Settings that a pool can set differently from the rest of the fleet, by key."""


def of_workers() -> dict[str, Setting]:
    """Return the settings of workers by their keys, as they are declared for all; those of tiers without a table."""
    known = {each.key: each for struct in (ModelSettings, DeviceSettings, ReplayConfig) for each in settings_of(struct)}
    for each in Section(struct=OffloadConfig, title="", table="offload").settings:
        known.setdefault(each.key.removeprefix("offload."), each)
    return known


def pool_settings(what: str, keys: Sequence[str] = OF_POOL) -> type[msgspec.Struct]:
    """Return a struct of the settings with `keys`, as they are declared for all workers, with None as their default.

    `what`: describes the workers in the help.
    """
    known = of_workers()
    fields = []
    for key in keys:
        if key not in known:
            continue  # its room is not installed
        each = known[key]
        words = setting(
            f"Of workers that {what}: {each.help[0].lower()}{each.help[1:]}",
            flag=INLINE,
            metavar=each.metavar,
            default="none" if key == "replicas" else f"that of {each.flag}",
            kind=each.kind,
        )
        fields.append((key, Annotated[Any, words], None))
    return msgspec.defstruct(f"Settings of workers that {what}", fields, frozen=True, kw_only=True)


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a pool that only a table `[[pool]]` has, next to those of each of its workers."""

    role: Annotated[Role, setting("What its workers do: prefill, decode, or mixed for both.", flag=None)] = "mixed"
    replicas: Annotated[AtLeastOne, setting("Number of workers.", flag=None)] = 1
    served_model_name: Annotated[
        str | None, setting("Name by which requests ask for its model.", flag=None, default="that of the model")
    ] = None
    tiers: Annotated[
        list[str] | None, setting("Names of the [[tier]] tables that its workers have.", flag=None, default="all")
    ] = None


TIERS = ("target_free", "h2d", "d2h", "disk_pages", "disk_memory", "disk_read", "disk_write")
IN_TABLE = (*OF_POOL[1:], "model", "engine", "async_scheduling", "cost_factor", *TIERS)
"""Settings that a table `[[pool]]` can have of its workers."""

POOL = "pool"
TIER = "tier"
OF_STORE = {
    "pages": "pages",
    "size": "memory",
    "read": "worker_rate",
    "write": "worker_write_rate",
    "rate": "rate",
    "latency_us": "latency_us",
}
"""The settings of a store, by those of a tier of scope `all`."""

SECTIONS = (
    Section(struct=pool_settings("compute prompts"), title="Prefill and decode apart", table="prefill"),
    Section(struct=pool_settings("generate"), title="Prefill and decode apart", table="decode"),
    Section(struct=TransferSettings, title="Prefill and decode apart", table="transfer"),
    Section(struct=ScalingSettings, title="Prefill and decode apart", table="scaling"),
    Section(struct=FaultSettings, title="Prefill and decode apart", table="faults"),
    Section(struct=PriceSettings, title="Prefill and decode apart", table="price"),
    Section(struct=StoreSettings, title="A store that workers share", table="store"),
    Section(struct=PoolSettings, title="Prefill and decode apart", table=POOL, is_named=True, is_listed=True),
    Section(
        struct=pool_settings("are in this pool", IN_TABLE),
        title="Prefill and decode apart",
        table=POOL,
        is_named=True,
        is_listed=True,
    ),
)
"""Settings of a fleet, in addition to those of each worker."""

STORE = "store"
"""The name of a store among the tiers of a worker."""
PEERS = "peers"
"""The name of the host memory of other workers among the tiers of a worker."""
ROLES: tuple[Role, ...] = ("prefill", "decode")


def is_of_fleet(given: Given) -> bool:
    """Return whether a setting of pools, of the links between them, or of a shared store was given."""
    return key_of_fleet(given) is not None


def key_of_fleet(given: Given) -> str | None:
    """Return the first setting, or name of a table, of pools, links or a shared store; None without any."""
    shared = (f"{TIER}.{name}.scope" for name in _shared_tiers(given))
    pools = (f"[{POOL}.{name}]" for name in given.names(POOL))
    return next(chain(shared, *(given.in_table(section.table) for section in SECTIONS), pools), None)


def resolve_fleet(given: Given, sections: Sequence[Section]) -> FleetConfig:
    """Build a FleetConfig from the given settings: those of all workers, of each pool, and of links.

    Raise ConfigError that names the setting and its source.
    """
    given = _with_store(given, sections)
    of_all = Given()
    for section in sections:
        if section in SECTIONS or (section.is_named and not section.into):
            continue
        settings = () if section.is_named else section.settings
        for name in given.names(section.table) if section.into else ():
            of_all.add_name(section.table, name, given.source_of(f"[{section.table}.{name}]"))
            settings = (*settings, *settings_of(section.struct, f"{section.table}.{name}"))
        for each in settings:
            if each.key in given:
                of_all.add(each, given.value_of(each.key), given.source_of(each.key))
    tables = _tables(given, of_all)
    ages = _ages_by_router(given, of_all, [table for _, _, table in tables])
    pools = []
    for place, (name, role, table) in enumerate(tables):
        served = given.build(PoolSettings, table).served_model_name if table not in ("", *ROLES) else None
        config = _resolve_pool(given, table, of_all.without(ages[place]), sections)
        pools.append(PoolConfig(name=name, role=role, each=config, served_model_name=served))
    check_token_bytes(given, [pool.each for pool in pools])
    transfer = given.build(TransferSettings, "transfer")
    if given.in_table("transfer") and not transfer.pull and all(pool.role == "mixed" for pool in pools):
        raise given.error(given.in_table("transfer")[0], "has no effect: mixed workers send nothing")
    if given.in_table("store") and not _sizes_of_store(given):
        raise given.error(
            given.in_table("store")[0],
            "says how, and not how much",
            hint="Give its size as well: --store memory=1TiB.",
        )
    scaling = given.build(ScalingSettings, "scaling")
    policy = scaling.policy
    roles = [pool.role for pool in pools]
    name_of: dict[str, str] = {pool.role: pool.name for pool in pools if roles.count(pool.role) == 1}
    scaler = None if policy is None else parse_scaler(policy, name_of)
    if isinstance(scaler, Scripted) and (missing := scaler.pools - {pool.name for pool in pools}):
        raise given.error(
            "scaling.policy",
            f"has numbers for a pool {sorted(missing)[0]}, which is not there",
            hint=f"There are: {', '.join(pool.name for pool in pools)}.",
        )
    if isinstance(scaler, Thresholds):
        try:
            for pool in pools:
                scaler.limits_of(pool.role)
        except ConfigError as error:
            raise given.error("scaling.policy", error.what, hint=error.hint) from error
    pools, token_bytes = _with_token_bytes(given, pools, transfer)
    layers = _layers_sent(given, pools, transfer)
    prices = given.build(PriceSettings, "price")
    try:
        of_pools = prices.of_pools([pool.name for pool in pools])
        return FleetConfig(
            pools=tuple(replace(pool, gpu_price=price) for pool, price in zip(pools, of_pools, strict=True)),
            bytes_per_s=transfer.bytes_per_s,
            latency_ms=transfer.latency_ms,
            transfer=transfer.mode,
            layers=layers,
            sharing=transfer.sharing,
            least_remote=transfer.least_remote,
            hold_s=transfer.hold_s,
            pulls=transfer.pull,
            token_bytes=token_bytes,
            scaler=None if policy is None else partial(parse_scaler, policy, name_of),
            scaling=policy or "",
            startup_s=scaling.startup_s,
            store=given.build(StoreSettings, "store") if _sizes_of_store(given) else None,
            faults=given.build(FaultSettings, "faults").faults,
        )
    except ConfigError as error:
        of_tables = [
            each for section in sections if section.table and not section.is_named for each in section.settings
        ]
        raise given.named(error, of_tables) from error


def _with_token_bytes(
    given: Given, pools: list[PoolConfig], transfer: TransferSettings
) -> tuple[list[PoolConfig], int]:
    """Return the pools with the bytes of a token's KV in each, and those that a transfer carries per token."""
    if transfer.token_bytes is not None or transfer.rate is None:
        return pools, transfer.token_bytes or 0
    carrying = [pool for pool in pools if pool.role != "mixed" or transfer.pull]
    known = {pool.model_name: _token_bytes(pool.each) for pool in reversed(carrying)}
    token_bytes = None if None in known.values() else known[carrying[0].model_name]
    if token_bytes is None:
        raise given.error(
            "transfer.rate",
            "does not say how long a transfer takes: nothing says what the KV of a token weighs",
            hint="Give a model and a device, or --transfer token_bytes=N.",
        )
    return [replace(pool, token_bytes=_token_bytes(pool.each)) for pool in pools], token_bytes


def _layers_sent(given: Given, pools: list[PoolConfig], transfer: TransferSettings) -> int:
    """Return the number of layers that are sent one by one; 0 if the transfer is not layer-wise and names none."""
    if transfer.layers is not None or transfer.mode != "layer-wise":
        return transfer.layers or 0
    counts = list(dict.fromkeys(_num_layers(pool.each) for pool in pools if pool.role != "mixed"))
    if len(counts) > 1:
        raise given.error(
            "transfer.mode", "is of models that differ in their layers", hint="Give --transfer layers=N for all."
        )
    if not counts or counts[0] is None:
        raise given.error(
            "transfer.mode",
            "does not say when a layer is computed: nothing says how many layers there are",
            hint="Give a model and a device, or --transfer layers=N.",
        )
    return counts[0]


def _shared_tiers(given: Given) -> list[str]:
    """Return the names of the tiers of scope `all`."""
    scopes = {name: f"{TIER}.{name}.scope" for name in given.names(TIER)}
    return [name for name, key in scopes.items() if key in given and given.value_of(key) == "all"]


def _with_store(given: Given, sections: Sequence[Section]) -> Given:
    """Return the settings with a tier of scope `all` as the store that it is."""
    shared = _shared_tiers(given)
    if not shared:
        return given
    name, *others = shared
    if others:
        hint = "Keep one of them."
        raise given.error(f"[{TIER}.{others[0]}]", "is a second tier that all engines share", hint=hint)
    below = given.names(TIER)[given.names(TIER).index(name) + 1 :]
    listed_in = given.source_of(f"{TIER}.{name}.scope").path
    if any(given.source_of(f"[{TIER}.{each}]").path == listed_in for each in below):  # others are added to a list
        raise given.error(f"[{TIER}.{name}]", "is shared by all engines, and is not the last", hint="Put it last.")
    if keys := given.in_table("store"):
        raise given.error(keys[0], "says what a tier of scope all says", hint="Keep one of them.")
    (tiers,) = (section for section in sections if section.table == TIER)
    given.build_named(tiers.struct, TIER, name)  # raises if it cannot be
    store = {each.field: each for each in settings_of(StoreSettings, "store")}
    as_store = given.without({f"[{TIER}.{name}]", *given.in_table(f"{TIER}.{name}")})
    of_tier = {each.field: each for each in settings_of(tiers.struct, f"{TIER}.{name}")}
    said = {store[of_store].key: of_tier[field] for field, of_store in OF_STORE.items()}
    for field, each in of_tier.items():
        if each.key in given and field in OF_STORE:
            value = given.value_of(each.key)
            value = str(value) if field in ("read", "write", "rate") else value
            as_store.add(store[OF_STORE[field]], value, Within(given.source_of(each.key), each, others=said))
    return as_store


def _tables(given: Given, of_all: Given) -> list[tuple[str, Role, str]]:
    """Return the name and role of each pool, and the table of its own settings; "" for none."""
    names = given.names(POOL)
    is_apart = not (names or "transfer.pull" in given)
    short = [key for table in (*ROLES, *(("transfer",) if is_apart else ())) for key in given.in_table(table)]
    if names:
        if short or "replicas" in of_all:
            raise given.error(
                "replicas" if "replicas" in of_all else short[0],
                "does not go with tables of pools",
                hint=f"Say it in [[{POOL}]].",
            )
        tables = [(name, f"{POOL}.{name}") for name in names]
        roles: list[Role] = [given.build(PoolSettings, table).role for _, table in tables]
        # Pools without a name of their own have that of their role, if no other has it.
        return [
            (role if whole_number(name) is not None and roles.count(role) == 1 else name, role, table)
            for (name, table), role in zip(tables, roles, strict=True)
        ]
    if not short:
        return [("mixed", "mixed", "")]
    if "replicas" in of_all:
        raise given.error(
            "replicas", "says nothing of pools", hint="Give --prefill replicas=N and --decode replicas=N."
        )
    for role in ROLES:
        if f"{role}.replicas" not in given:
            hint = "Give --prefill replicas=N and --decode replicas=N."
            raise given.error(short[0], f"needs {role} workers as well", hint=hint)
    return [(role, role, role) for role in ROLES]


def _ages_by_router(given: Given, of_all: Given, tables: Sequence[str]) -> list[set[str]]:
    """Return, for the router of each pool, the given ages that have no effect on it but on that of another pool."""
    keys = {f"routing.{field}": field for field in ("staleness", "event_lag") if f"routing.{field}" in of_all}
    if not keys:
        return [set()] * len(tables)
    read: list[set[str]] = []
    for table in tables:
        key = f"{table}.router"
        router = given.value_of(key) if key in given else of_all.value_of("router") if "router" in of_all else ""
        read.append(set())
        with suppress(ConfigError):  # it is named where the pool is resolved
            read[-1] = ages_read_by(router or "round-robin")
    of_any = set().union(*read)
    return [{key for key, field in keys.items() if field in of_any - mine} for mine in read]


def _resolve_pool(given: Given, table: str, of_all: Given, sections: Sequence[Section]) -> ReplayConfig:
    """Build the configuration of the workers of a pool, from its own settings and those for all."""
    known = of_workers()
    own = Given()
    of_all = _with_tiers_of(given, table, of_all)
    for key in given.in_table(table) if table else ():
        inner = key.removeprefix(f"{table}.")
        if inner in known:
            own.add(
                known[inner], given.value_of(key), Within(given.source_of(key), given.setting_of(key), is_alike=True)
            )
    asked = {"fleet": "pools", **dict.fromkeys(["store"] if (sizes := _sizes_of_store(given)) else [], *sizes[:1])}
    asked |= {"pulls": "transfer.pull"} if "transfer.pull" in given and given.value_of("transfer.pull") else {}
    try:
        return resolve_replay(own.over(of_all), sections, asked=asked)
    except ConfigError as error:
        raise given.named(error, ()) from error  # it may name a setting of the fleet


def _with_tiers_of(given: Given, table: str, of_all: Given) -> Given:
    """Return the settings of all workers with those tiers only that a pool names."""
    key = f"{table}.tiers"
    if not table or key not in given:
        return of_all
    names: list[str] = given[key]
    if not of_all.names(TIER):
        raise given.error(key, "names tables [[tier]], and there are none", hint="Add a [[tier]].")
    known = of_all.names(TIER)
    if other := [name for name in names if name not in known]:
        hint = f"The tiers of workers are {', '.join(known)}."
        raise given.error(key, f"has no [[tier]] {brief(other[0])}", hint=hint)
    left_out = [name for name in known if name not in names]
    keys = {key for name in left_out for key in (f"[{TIER}.{name}]", *of_all.in_table(f"{TIER}.{name}"))}
    return of_all.without(keys)


def _sizes_of_store(given: Given) -> list[str]:
    return [key for key in ("store.pages", "store.memory") if key in given]


def _stored_token_bytes(config: ReplayConfig) -> int:
    """Return the bytes of the KV of a token in a store."""
    if config.placement is None:
        return int(getattr(config.offload, "kv_bytes_per_token", TOKEN_BYTES))
    return _token_bytes(config) or TOKEN_BYTES


def _token_bytes(config: ReplayConfig) -> int | None:
    """Return the bytes of a token's KV over all devices of a worker; None if the config names no model."""
    if config.placement is None:
        return None
    return config.placement.kv_bytes_per_token * _num_ways(config)


def _num_ways(config: ReplayConfig) -> int:
    """Return the number of devices among which a worker divides a page."""
    return int(getattr(config.cost, "tensor_parallel", 1)) * int(getattr(config.cost, "pipeline_parallel", 1))


def _model_of(config: ReplayConfig) -> str | None:
    """Return the model of a worker; None if the config names none."""
    return None if config.placement is None else config.placement.model


def _parts_of(config: ReplayConfig) -> str:
    """Return what must be the same where engines share parts of pages: their layers, and their sizes in the store."""
    if config.kv_groups == "off":
        return ""
    memory = config.memory
    return f"{memory.to_builtins()['kv_groups']} {memory.block_bytes * _num_ways(config)}"


def _num_layers(config: ReplayConfig) -> int | None:
    """Return the layers of a worker's model; None if the config names no model."""
    if config.placement is None:
        return None
    from kvarts.cost.hardware.model_config import load_geometry  # imported only for transfers that depend on layers

    return load_geometry(config.placement.model).num_layers


def _have_unlike_routers(pools: Sequence[PoolConfig]) -> bool:
    """Return whether pools that would be behind one router name different ones."""
    routers = {(pool.role == "decode", repr(pool.each.router), repr(pool.each.routing)) for pool in pools}
    return len(routers) > len({is_second for is_second, _, _ in routers})


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Identical workers: as many as `each` has replicas. `name`: left out, its role.

    `gpu_price`: the price of a device for an hour, for the costs in the report.
    `served_model_name`: the name by which requests ask for the model of its workers; left out, that of the model.
    `token_bytes`: bytes of the KV of a token on a link, if that is not the same in the whole fleet.

    >>> from kvarts import PoolConfig, ReplayConfig
    >>> PoolConfig(role="mixed", each=ReplayConfig(replicas=4, num_pages=2_000)).name
    'mixed'
    """

    role: Role
    each: ReplayConfig
    name: str = ""
    gpu_price: float | None = None
    served_model_name: str | None = None
    token_bytes: int | None = None

    def left_out_by_audit(self, *, shares_memory: bool) -> str:
        """Return what the ledger of an audit does not follow in its workers: laws are asserted. Empty if nothing.

        `shares_memory`: tiers below a worker share memory with others.
        """
        if not self.each.audit:
            return ""
        return not_followed_in_handoffs(
            self.each,
            has_groups=self.each.kv_groups != "off",
            has_tiers=shares_memory or self.each.offload is not None,
            plans_ahead=self.each.async_scheduling and self.each.profile == "default",
        )

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise SettingError(f"must be 'mixed', 'prefill' or 'decode', got {self.role!r}", "role")
        if self.gpu_price is not None:
            check_number(self.gpu_price, "gpu_price", most=MOST_PRICE)
        if not self.name:
            msgspec.structs.force_setattr(self, "name", self.role)

    @property
    def model_name(self) -> str:
        """The name by which requests ask for its model; "" without a name."""
        if self.served_model_name is not None:
            return self.served_model_name
        return _model_of(self.each) or ""


class ModelPools(msgspec.Struct, frozen=True):
    """The pools that requests for one model are sent to; with None, requests for any model."""

    model: str | None
    pools: tuple[PoolConfig, ...]

    @property
    def first(self) -> ReplayConfig:
        """The configuration of the engines of its first pool."""
        return self.pools[0].each

    @property
    def num_host_pages(self) -> int:
        """Pages of the host memory of all workers."""
        return sum(pool.each.replicas * next(iter(pool.each.tiers.values()), 0) for pool in self.pools)

    @property
    def stored_unit_bytes(self) -> int:
        """The bytes of a page in a store, or with KV groups of a block: those on all devices of a worker."""
        first = self.first
        if first.kv_groups == "off":
            return _stored_token_bytes(first) * first.page_size
        return first.memory.block_bytes * _num_ways(first)

    def store_size(self, store: StoreSettings) -> int:
        """Return the pages of a store, or with KV groups its blocks. Raise SettingError for a size that holds none."""
        if self.first.kv_groups == "off":
            return store.num_units(self.stored_unit_bytes)
        if store.pages is None:
            return store.num_units(self.stored_unit_bytes, "block")
        num_blocks = self.first.memory.num_blocks(store.pages)
        if num_blocks > MOST_PAGES:
            raise SettingError(f"makes {num_blocks:,} blocks, more than {MOST_PAGES:,}", "pages")
        return num_blocks

    def check_shares(self, field: str, verb: str) -> None:
        """Raise SettingError if its workers cannot share KV. `verb`: the action of `field`, for the error."""
        if len({(_model_of(pool.each), _stored_token_bytes(pool.each)) for pool in self.pools}) > 1:
            raise SettingError(f"{verb} pools with different models", field, hint="KV is of one model.")
        if len({_parts_of(pool.each) for pool in self.pools}) > 1:
            what = f"{verb} pools that divide pages into different parts"
            raise SettingError(what, field, hint="Give them the same {kv_groups}, or set it to off.")


class FleetWorker(msgspec.Struct, frozen=True):
    """A worker, as it is named to those that observe it. `index`: its number in the report."""

    index: int
    pool: PoolConfig


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One replay on a fleet: pools of mixed workers, or some that compute prompts and some that generate, or all three.

    `bytes_per_s`: per transfer, or per worker or pool with `sharing`; with None, a transfer takes only `latency_ms`.
    `layers`: their number, if `transfer` is layer-wise.
    `least_remote`: a worker that generates computes prompts of which it lacks fewer tokens itself. `hold_s`: how long a
    worker holds a prompt that its client has left there, until another request fetches it. `pulls`: workers read pages
    from the host memory of others. `scaler`:
    makes the scaler, which decides the number of workers; with None, that number is fixed by the pools. `scaling`: the
    scaler's name, for reports. `startup_s`: time from adding a worker until it is ready. `store`: the
    store that all workers share below their own tiers, if any. `faults`: failures and their times.

    >>> from kvarts import FleetConfig, PoolConfig, ReplayConfig, replay
    >>> each = ReplayConfig(num_pages=2_000, page_size=512)
    >>> pools = (PoolConfig(role="prefill", each=each), PoolConfig(role="decode", each=each))
    >>> replay("sample:mooncake", FleetConfig(pools=pools)).summary["num_completed"]
    1000
    """

    pools: tuple[PoolConfig, ...]
    bytes_per_s: float | None = None
    latency_ms: float = 0.0
    transfer: TransferMode = "full-prompt"
    layers: int = 0
    sharing: Sharing = "none"
    least_remote: int | None = None
    hold_s: float = 30.0
    pulls: bool = False
    token_bytes: int = 0
    scaler: Callable[[], Scaler] | None = None
    scaling: str = ""
    startup_s: float = 0.0
    store: StoreSettings | None = None
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        self._check_values()
        roles = {pool.role for pool in self.pools}
        if not roles or ("prefill" in roles) is not ("decode" in roles):
            raise SettingError(
                f"leaves a fleet of {' and '.join(sorted(roles)) or 'no'} workers only",
                "pool",
                hint="Give mixed pools, or at least one prefill and one decode, or all three.",
            )
        if len({pool.name for pool in self.pools}) < len(self.pools):
            raise SettingError("two pools have the same name", "pool")
        if any(_have_unlike_routers(of_model.pools) for of_model in self.of_models):
            raise SettingError("pools behind one router name different routers", "pool")
        for of_model in self.of_models:
            apart = {pool.role: None for pool in of_model.pools if pool.role != "mixed"}
            models = {_model_of(pool.each) for pool in of_model.pools if pool.role != "mixed"}
            if len(apart) == 1 or len(models) > 1:
                hint = "KV is of one model: each that has prefill workers needs decode workers, too."
                raise SettingError("prefill and decode workers have different models", "pool", hint=hint)
        for fault in self.faults:
            if fault.worker < 0 or (self.scaler is None and fault.worker >= self.replicas):
                raise SettingError(
                    f"names worker {fault.worker}, which is not there",
                    "faults.script",
                    hint=f"There are workers 0 to {self.replicas - 1}.",
                )
            if fault.kind != "down" and "prefill" not in roles and not self.pulls:
                raise SettingError(
                    f"has {fault.kind}:{fault.worker}, and mixed workers send nothing",
                    "faults.script",
                    hint="Only down:N=... has an effect here.",
                )
        if len({pool.each.page_size for pool in self.pools}) > 1:
            raise SettingError("pools have pages of different sizes", "pool", hint="KV goes from page to page.")
        if self.least_remote is not None and self.first.profile == "mocker":
            raise SettingError("is not in Dynamo's mocker", "transfer.least_remote", hint="Take another profile.")
        if self.transfer == "layer-wise":
            if self.first.profile == "mocker":
                raise SettingError("is not in Dynamo's mocker", "transfer.mode", hint="Take another profile.")
            if self.layers < 1 or self.bytes_per_s is None:
                raise SettingError("needs a rate and a number of layers", "transfer.mode")
        if len({pool.each.profile for pool in self.pools}) > 1:
            raise SettingError("pools have different profiles", "pool")
        for pool in self.pools:
            of_fleet = {"fleet": "pools"} if self.store is None else {"fleet": "pools", "store": "store.pages"}
            of_fleet |= {"pulls": "transfer.pull"} if self.pulls else {}
            check_combination({**pool.each.features, **of_fleet})
            if int(getattr(pool.each.cost, "num_ranks", 1)) > 1:
                raise SettingError("is not modelled in a fleet yet", "data_parallel", hint="Leave it out.")

        if self.store is not None:
            self._check_store(self.store)
        if self.pulls:
            self._check_pulls()

    def _check_values(self) -> None:
        """Raise ConfigError for a value out of range."""
        if self.bytes_per_s is not None:
            check_number(self.bytes_per_s, "bytes_per_s", above=True, most=MOST_BYTES)
        check_number(self.latency_ms, "latency_ms", most=MOST_MS)
        check_number(self.hold_s, "hold_s", most=MOST_HOLD_S)
        check_number(self.startup_s, "startup_s", most=MOST_STARTUP_S)
        check_whole(self.token_bytes, "token_bytes", least=0)
        check_whole(self.layers, "layers", least=0, most=MOST_LAYERS)
        if self.least_remote is not None:
            check_whole(self.least_remote, "least_remote")
        for field, kind in (("transfer", TransferMode), ("sharing", Sharing)):
            if (value := getattr(self, field)) not in get_args(kind):
                raise SettingError(f"must be one of {', '.join(get_args(kind))}, got {value!r}", field)
        if self.faults:
            from kvarts.sim.fleet.faults import check_faults  # a replay without faults imports nothing of them

            check_faults(self.faults)

    def _check_pulls(self) -> None:
        """Raise SettingError if workers cannot read from the host memory of others."""
        if self.bytes_per_s is None or not self.token_bytes:
            raise SettingError("does not say how long it takes", "transfer.pull", hint="Give {transfer.rate} as well.")
        if self.transfer == "layer-wise":
            what = "goes over links that carry the layers of prompts"
            raise SettingError(what, "transfer.pull", hint="Leave {transfer.mode} out.")
        if self.first.profile == "mocker":
            raise SettingError("is not in Dynamo's mocker", "transfer.pull", hint="Take another profile.")
        if not all(pool.each.tiers for pool in self.pools):
            known = [pool.each.offload.to_builtins() for pool in self.pools if pool.each.offload is not None]
            has_list = any("tiers" in each for each in known)
            hint = "Give a [[tier]] with a size to each." if has_list else "Give {offload.host_memory} as well."
            raise SettingError("needs workers with host memory", "transfer.pull", hint=hint)
        for of_model in self.of_models:
            of_model.check_shares("transfer.pull", "is among")

    def _check_store(self, store: StoreSettings) -> None:
        """Raise SettingError for a store that the pools cannot share."""
        for of_model in self.of_models:
            of_model.check_shares("store.pages", "is shared by")
        for pool in self.pools:
            if pool.each.offload is not None and pool.each.offload.is_lazy:
                raise SettingError(
                    f"is {pool.each.offload.policy}, and what goes to a store goes there once it is complete",
                    "offload.policy",
                    hint="Leave it out.",
                )
        try:
            for of_model in self.of_models:
                of_model.store_size(store)
        except SettingError as error:
            what, hint = error.texts
            raise SettingError(what, *(f"store.{field}" for field in error.fields), hint=hint) from error

    @property
    def of_models(self) -> list[ModelPools]:
        """The pools of each model that requests can ask for, in the order of the first pool of each."""
        names = dict.fromkeys(pool.model_name for pool in self.pools)
        return [ModelPools(name, tuple(pool for pool in self.pools if pool.model_name == name)) for name in names]

    @property
    def tier_names(self) -> list[str]:
        """The names of the tiers below any worker."""
        names = list(dict.fromkeys(name for pool in self.pools for name in pool.each.tiers))
        names += [PEERS] if self.pulls else []
        return names if self.store is None else [*names, STORE]

    @property
    def shares_memory(self) -> bool:
        """Whether workers read pages from a store, or from the memory of others."""
        return self.pulls or self.store is not None

    @property
    def asks_for_models(self) -> bool:
        """Whether every request must name its model: its router is known by that, or the workers that it is KV for."""
        if len(self.of_models) == 1:
            return False
        kinds = {(_model_of(pool.each), _stored_token_bytes(pool.each), _parts_of(pool.each)) for pool in self.pools}
        is_apart = any(pool.role != "mixed" for pool in self.pools)
        return is_apart or _have_unlike_routers(self.pools) or (self.shares_memory and len(kinds) > 1)

    def behind_routers(self, *, by_model: bool) -> list[ModelPools]:
        """Return the pools behind each pair of routers: one for all requests, or one for each model."""
        return self.of_models if by_model else [ModelPools(None, self.pools)]

    def token_bytes_of(self, of_model: ModelPools) -> int:
        """Return the bytes of the KV of a token of a model on a link."""
        pools = [pool for pool in of_model.pools if pool.role != "mixed" or self.pulls]
        known = (pool.token_bytes for pool in pools if pool.token_bytes is not None)
        return next(known, self.token_bytes)

    @property
    def first(self) -> ReplayConfig:
        """The configuration of the engines at which requests arrive."""
        return self.pools[0].each

    @property
    def num_pages(self) -> int:
        """Pages of one worker of the last pool."""
        return self.pools[-1].each.num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.first.page_size

    @property
    def replicas(self) -> int:
        """Workers in all pools."""
        return sum(pool.each.replicas for pool in self.pools)

    @property
    def workers(self) -> list[FleetWorker]:
        """The workers that are there from the beginning, in order."""
        pools = [pool for pool in self.pools for _ in range(pool.each.replicas)]
        return [FleetWorker(index, pool) for index, pool in enumerate(pools)]

    @property
    def slo(self) -> Slo:
        """The objective for goodput."""
        return self.first.slo

    def to_builtins(self) -> dict[str, Any]:
        """Return the configuration as the report contains it.

        At its top it is that of the last pool, without the bytes of a page if these differ.
        """
        of_pools = [pool.each.to_builtins() for pool in self.pools]
        last = of_pools[-1]
        if any(each.get(key) != last.get(key) for each in of_pools for key in BYTES_OF_PAGE):
            last = {key: value for key, value in last.items() if key not in BYTES_OF_PAGE}
        return {
            **last,
            "replicas": self.replicas,
            "pools": [
                {
                    "name": pool.name,
                    "role": pool.role,
                    **({} if pool.gpu_price is None else {"gpu_price": pool.gpu_price}),
                    **({} if pool.served_model_name is None else {"served_model_name": pool.served_model_name}),
                    **({} if pool.token_bytes is None else {"token_bytes": pool.token_bytes}),
                    **of_pool,
                }
                for pool, of_pool in zip(self.pools, of_pools, strict=True)
            ],
            "transfer": {
                "bytes_per_s": self.bytes_per_s,
                "latency_ms": self.latency_ms,
                "mode": self.transfer,
                **({"layers": self.layers} if self.transfer == "layer-wise" else {}),
                "sharing": self.sharing,
                **({} if self.least_remote is None else {"least_remote": self.least_remote}),
                **({"pull": True} if self.pulls else {}),
                "token_bytes": self.token_bytes,
            },
            **({"scaler": self.scaling, "startup_s": self.startup_s} if self.scaler is not None else {}),
            **({"store": self.store.to_builtins()} if self.store is not None else {}),
        }
