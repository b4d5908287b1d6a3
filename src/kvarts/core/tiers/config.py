"""Configuration of the tiers below the device."""

from __future__ import annotations

import re
from itertools import chain, repeat
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec

from kvarts.base.errors import ConfigError
from kvarts.base.limits import (
    MOST_BYTES,
    MOST_BYTES_PER_TOKEN,
    MOST_LAYERS,
    MOST_MS,
    MOST_PAGES,
    brief,
    check_number,
    check_whole,
    whole_number,
)
from kvarts.base.settings import Section, SettingError, setting
from kvarts.base.units import meant_size, parse_bytes, parse_rate
from kvarts.core.kv.transfer import LoadKv
from kvarts.core.parts.combines import check_combination
from kvarts.core.tiers.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvarts.core.kv.groups import GroupMemory

__all__ = ["TIERS", "ChannelSpec", "LoadKv", "OffloadConfig", "TierConfig", "TierKind", "TierScope", "TierSpec"]

TierKind = Literal["memory", "files"]
TierScope = Literal["engine", "all"]
LoadOverlap = Literal["none", "layers"]
OffloadPolicy = Literal["eager", "lazy", "exclusive"]
PreemptionMode = Literal["swap", "recompute"]

Size = int | str
"""Bytes, as a number or with a unit: 64GiB."""
Rate = int | str
"""Bytes per second, as a number or with a unit: 50GB/s."""


NAMES: dict[TierKind, str] = {"memory": "host", "files": "disk"}
"""The name of a tier that has none, by its kind."""
SHARED = "store"
"""The name of the tier that all engines share."""
TAKEN = {
    *("cached", "device", "free", "input", "max", "output", "peers", "prompt", "recomputed", "reserved", "used"),
    *("cpu", "gpu", "storage"),
}
"""Names that reports and KV events have for something else."""
DEFAULTS: dict[str, tuple[str, str, float]] = {"memory": ("50GB/s", "50GB/s", 10.0), "files": ("5GB/s", "3GB/s", 100.0)}
"""Bandwidths from and to a tier, and the microseconds on top, by its kind."""
CHANNELS = {"host": ("h2d", "d2h")}
"""The names of the channels from and to a tier, by its name, where they are not `NAME_read` and `NAME_write`."""
SHORT = {
    "host": ("host_pages", "host_memory", "h2d", "d2h", "latency_us"),
    "disk": ("disk_pages", "disk_memory", "disk_read", "disk_write", "disk_latency_us"),
}
"""The settings of host memory and of files in the short form of a list, in the order of KEYS."""
KEYS = ("pages", "size", "read", "write", "latency_us")
"""The same of a tier in a list."""


class ChannelSpec(msgspec.Struct, frozen=True):
    """One direction of a connection: a latency, added to every transfer, and a bandwidth."""

    name: str
    bytes_per_s: int
    latency_us: float

    def open(self, make: type[Channel] = Channel) -> Channel:
        """Return a new channel."""
        return make(self.name, latency_us=self.latency_us, bytes_per_s=self.bytes_per_s)


class TierSpec(msgspec.Struct, frozen=True):
    """One tier. `write`: the channel to it. `is_files`: its pages are addressed by keys and outlive the process."""

    name: str
    num_pages: int
    write: ChannelSpec
    read: ChannelSpec
    is_files: bool = False


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier below a device: a table `[[tier]]`. Raises ConfigError for a value out of range.

    `name`: its name in reports; left out, `host` for memory and `disk` for files. `pages` or `size`: its size; 0 for no
    such tier. `read`, `write`: bandwidths of its channels; `latency_us` is added to every transfer; left out, they are
    those of host memory or of files. `scope`: `engine` for a tier below each engine, `all` for one that all engines
    share, which is the last; then `read` and `write` are each engine's, and `rate` is what the tier reads, and writes,
    for all of them together.
    """

    name: str = ""
    kind: Annotated[
        TierKind, setting("What it is: memory, or files, whose pages outlive a process that runs a model.", flag=None)
    ] = "memory"
    pages: Annotated[int | None, setting("Its size, in pages.", flag=None, replaces=("size",))] = None
    size: Annotated[Size | None, setting("Its size, such as 64GiB.", flag=None, replaces=("pages",))] = None
    read: Annotated[
        Rate | None, setting("Bandwidth from it.", flag=None, default="50GB/s of memory, 5GB/s of files")
    ] = None
    write: Annotated[
        Rate | None, setting("Bandwidth to it.", flag=None, default="50GB/s of memory, 3GB/s of files")
    ] = None
    latency_us: Annotated[
        float | None, setting("On top of every transfer.", flag=None, default="10 of memory, 100 of files")
    ] = None
    scope: Annotated[
        TierScope, setting("Below each engine, or all: one that all engines share, as --store.", flag=None)
    ] = "engine"
    rate: Annotated[
        Rate | None,
        setting("What a tier of scope all reads, and writes, for all engines together.", flag=None, default="80GB/s"),
    ] = None

    def __post_init__(self) -> None:
        for field, kinds in (("kind", TierKind), ("scope", TierScope)):
            if (value := getattr(self, field)) not in get_args(kinds):
                raise SettingError(f"must be {' or '.join(map(repr, get_args(kinds)))}, got {value!r}", field)
        if not isinstance(self.name, str):
            raise SettingError(f"must be a text, got {self.name!r}", "name")
        if not self.name:
            msgspec.structs.force_setattr(self, "name", SHARED if self.is_shared else NAMES[self.kind])
        if self.is_shared and self.name != SHARED:
            raise SettingError("is shared by all engines, and that tier is called store", "name", hint="Name it store.")
        if self.name == SHARED and not self.is_shared:
            what, hint = "is the name of the tier that all engines share", "Give it scope=all, or another name."
            raise SettingError(what, "name", hint=hint)
        for kind, name in NAMES.items():
            if kind != self.kind and self.name in (kind, name):
                what = f"is of {self.kind}, and has the name of the other kind"
                raise SettingError(what, "name", hint=f"Give it kind={kind}, or another name.")
        if self.name in TAKEN or re.match(r"group\d", self.name):
            what = f"cannot be {self.name!r}, which reports and KV events use for something else"
            raise SettingError(what, "name", hint=f"Not to be used: {', '.join(sorted(TAKEN))}, and group0 and so on.")
        if not re.fullmatch(r"[a-z][a-z0-9]{0,30}", self.name):
            raise SettingError(
                f"cannot be {self.name!r}",
                "name",
                hint="It is a part of names of columns: small letters and digits, a letter first.",
            )
        if (self.pages is None) == (self.size is None):
            if self.pages is not None:
                raise SettingError("is given beside {size}", "pages", hint="Keep one of them.")
            raise SettingError("has no size", "name", hint="Give it pages=N or size=64GiB.")
        if self.pages is not None:
            check_whole(self.pages, "pages", least=0, most=MOST_PAGES)
        if self.size is not None:
            check_whole(bytes_of(self.size, "size"), "size", least=0, most=MOST_BYTES)
        for field in ("read", "write", "rate"):
            if (rate := getattr(self, field)) is not None:
                check_rate(rate, field)
        if self.latency_us is not None:
            check_number(self.latency_us, "latency_us", most=MOST_MS)
        if self.is_shared and self.is_files:
            raise SettingError("has no effect on a tier that all engines share", "kind", hint="Leave it out.")
        if self.rate is not None and not self.is_shared:
            raise SettingError("is of a tier that all engines share", "rate", hint="Give {read} and {write}.")

    @property
    def is_shared(self) -> bool:
        """Whether all engines share it."""
        return self.scope == "all"

    @property
    def is_empty(self) -> bool:
        """Whether its size is 0: then there is no such tier."""
        return not self.pages and (self.size is None or not bytes_of(self.size, "size"))

    @property
    def is_files(self) -> bool:
        """Whether its pages outlive the process."""
        return self.kind == "files"


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiers below one engine: host memory, and files. Raises ConfigError for a value out of range.

    `tiers`: the list of tiers, the fastest first. Host memory alone, or with files, has a short form: `host_pages` or
    `host_memory`, the size of host memory. Without any, nothing is stored. `policy`: `eager` stores a page in the step
    after it became complete; `lazy` stores cached pages so that the next `target_free` allocated pages lose nothing
    (default: eight times the pages of a step's token budget, but at most an eighth of host memory, and at least
    twice the budget); `exclusive` does so too, and host memory that needs room releases pages that the device has
    again, so that both hold different pages; what a load evicts from the device is stored while it runs (default: half
    as many pages, and at least one and a half times the budget). If the channel needs longer than `store_within_ms` for
    the pages of a step, `exclusive` is `lazy`. `h2d`, `d2h`: bandwidth to and from the device; `latency_us`
    is added to every transfer. `kv_bytes_per_token`: bytes of a token; the default is that of Llama 3.1 8B in 16
    bits. `full_prompt_hits`: a load may cover a whole prompt; then only its last token is computed again.
    `workers`: how many must report a transfer before it is complete. `preemption_mode`: with `swap`, pages that
    only a preempted request can find, those of generated tokens without ids, are stored in host memory until it
    ends; with `recompute` they are not. `load_overlap`: with `layers`, the first step of a request computes one of
    `num_layers` layers while later ones are loaded; with `none` it waits for its whole load. `load_kv`: with
    `placed`, a request that waits for its load has a place among the running requests and all pages of its prompt;
    with `async` it has no place, and only the pages that are loaded or found, as with vLLM's `load_kv_async`; with
    `sync` it runs at once, and the step lasts as long as the load.

    `disk_pages` or `disk_memory`: the size of the files below host memory, which are written as soon as a page is in
    host memory; `disk_read`, `disk_write` and `disk_latency_us` are those of the files. `store_within_ms`: a page is
    stored once its channel could carry it within this time, and stays wanted until then. `deadline_s`: a transfer that
    an executor has not reported within this time counts as failed; in virtual time, ends are known. `fail_every`: one
    in `fail_every` transfers fails; 0: no transfer does.

    >>> from kvarts import OffloadConfig, ReplayConfig, replay
    >>> config = ReplayConfig(num_pages=2_000, page_size=512, offload=OffloadConfig(host_pages=4_000, policy="lazy"))
    >>> sorted(replay("sample:mooncake", config).summary["prefix_hit_ratio_by_tier"])
    ['device', 'host']
    """

    tiers: tuple[TierConfig, ...] = ()
    host_pages: Annotated[
        int | None,
        setting(
            "Host memory below the device of each replica, in pages.",
            flag="--host-pages",
            metavar="N",
            default="0",
            replaces=("host_memory",),
        ),
    ] = None
    host_memory: Annotated[
        Size | None,
        setting(
            "Host memory below the device of each replica: 64GiB. A page takes kv_bytes_per_token times its tokens.",
            flag="--host-memory",
            metavar="SIZE",
            replaces=("host_pages",),
        ),
    ] = None
    policy: Annotated[
        OffloadPolicy,
        setting(
            "Store a page below when it is complete, before its eviction, or also move it back when it is loaded.",
            flag="--offload",
        ),
    ] = "eager"
    target_free: Annotated[
        int | None,
        setting(
            "Lazy: so many pages can be taken without losing anything.",
            flag="--target-free",
            metavar="N",
            default="two to eight token budgets; exclusive: one and a half to eight",
        ),
    ] = None
    h2d: Annotated[Rate, setting("Bandwidth from host memory to the device.", flag="--h2d", metavar="RATE")] = "50GB/s"
    d2h: Annotated[Rate, setting("Bandwidth from the device to host memory.", flag="--d2h", metavar="RATE")] = "50GB/s"
    latency_us: Annotated[
        float,
        setting("On top of every transfer to or from host memory.", flag="--transfer-latency-us", metavar="US"),
    ] = 10.0
    kv_bytes_per_token: Annotated[
        int,
        setting(
            "What a token weighs.",
            flag="--kv-bytes-per-token",
            metavar="BYTES",
            default="131072: Llama 3.1 8B in 16 bits; with --model, what it says",
        ),
    ] = 131_072
    full_prompt_hits: Annotated[bool, setting("A load may cover a whole prompt.", flag=None)] = False
    workers: Annotated[int, setting("How many must report a transfer before it is complete.", flag=None)] = 1
    disk_pages: Annotated[
        int | None,
        setting(
            "Files below host memory, in pages.",
            flag="--disk-pages",
            metavar="N",
            default="0",
            replaces=("disk_memory",),
        ),
    ] = None
    disk_memory: Annotated[
        Size | None,
        setting("Files below host memory: 1TiB.", flag="--disk-memory", metavar="SIZE", replaces=("disk_pages",)),
    ] = None
    disk_read: Annotated[Rate, setting("Bandwidth from files.", flag="--disk-read", metavar="RATE")] = "5GB/s"
    disk_write: Annotated[Rate, setting("Bandwidth to files.", flag="--disk-write", metavar="RATE")] = "3GB/s"
    disk_latency_us: Annotated[
        float, setting("On top of every transfer to or from files.", flag="--disk-latency-us", metavar="US")
    ] = 100.0
    store_within_ms: Annotated[
        float,
        setting(
            "A page is stored once its channel would have carried it within so long; until then it stays wanted.",
            flag="--store-within",
            metavar="MS",
        ),
    ] = 500.0
    preemption_mode: Annotated[
        PreemptionMode,
        setting(
            "Store pages of generated tokens without ids when their request is preempted, or compute them again.",
            flag="--preemption-mode",
        ),
    ] = "swap"
    load_overlap: Annotated[
        LoadOverlap,
        setting(
            "Wait for whole loads, or compute layer by layer while later layers are loaded.",
            flag="--load-overlap",
        ),
    ] = "none"
    load_kv: Annotated[
        LoadKv,
        setting(
            "A request that waits for its load has a place among the running ones; none, as in vLLM with a connector "
            "that loads asynchronously; or does not wait, as with one that loads synchronously.",
            flag="--load-kv",
        ),
    ] = "placed"
    num_layers: Annotated[
        int,
        setting("Layers of the model.", flag=None, default="32, as in Llama 3.1 8B; with --model, those of the model"),
    ] = 32
    deadline_s: Annotated[
        float,
        setting("A transfer that an executor has not reported within so long counts as failed.", flag=None),
    ] = 60.0
    fail_every: Annotated[int, setting("Every so many transfers one fails; 0: none.", flag=None)] = 0

    def __post_init__(self) -> None:
        try:
            msgspec.structs.force_setattr(self, "tiers", tuple(self.tiers))
        except TypeError:
            raise SettingError(f"must be a list of TierConfig, got {brief(self.tiers)}", "tiers") from None
        for tier in self.tiers:
            if not isinstance(tier, TierConfig):
                raise SettingError(f"must be a list of TierConfig, has {brief(tier)}", "tiers")
        if self.tiers:
            self._check_list()
        for pages, memory, *_ in SHORT.values():
            count, size = getattr(self, pages), getattr(self, memory)
            if count is not None and size is not None:
                raise SettingError(f"is given beside {{{memory}}}", pages, hint="Keep one of them.")
            if count is not None:
                check_whole(count, pages, least=0, most=MOST_PAGES)
            if size is not None:
                check_whole(bytes_of(size, memory), memory, least=0, most=MOST_BYTES)
        if self.policy not in get_args(OffloadPolicy):
            raise SettingError(f"must be 'eager', 'lazy' or 'exclusive', got {self.policy!r}", "policy")
        if self.preemption_mode not in ("swap", "recompute"):
            raise SettingError(f"must be 'swap' or 'recompute', got {self.preemption_mode!r}", "preemption_mode")
        if self.load_overlap not in ("none", "layers"):
            raise SettingError(f"must be 'none' or 'layers', got {self.load_overlap!r}", "load_overlap")
        if self.load_kv not in get_args(LoadKv):
            raise SettingError(f"must be 'placed', 'async' or 'sync', got {self.load_kv!r}", "load_kv")
        check_whole(self.num_layers, "num_layers", most=MOST_LAYERS)
        if self.load_kv == "sync" and self.fail_every:
            raise SettingError(
                "does not go with synchronous loads: their requests run before they end",
                "fail_every",
                hint="Leave it at 0, or set load_kv to async.",
            )
        if self.target_free is not None:
            check_whole(self.target_free, "target_free", least=0, most=MOST_PAGES)
        for field in ("h2d", "d2h", "disk_read", "disk_write"):
            check_rate(getattr(self, field), field)
        for field in ("latency_us", "disk_latency_us"):
            check_number(getattr(self, field), field, most=MOST_MS)
        check_whole(self.kv_bytes_per_token, "kv_bytes_per_token", most=MOST_BYTES_PER_TOKEN)
        check_whole(self.workers, "workers")
        check_number(self.store_within_ms, "store_within_ms", most=MOST_MS)
        check_number(self.deadline_s, "deadline_s", most=MOST_MS)
        if not self.deadline_s:
            raise SettingError("must be above 0", "deadline_s")
        check_whole(self.fail_every, "fail_every", least=0)
        if (self.disk_pages or self.disk_memory) and self.host_pages is None and self.host_memory is None:
            raise SettingError(
                "needs host memory above it", "disk_pages", "disk_memory", of=self, hint="Give {host_pages} as well."
            )

    def _check_list(self) -> None:
        """Raise SettingError for a list of tiers that cannot be, or that is given beside its short form."""
        for field in msgspec.structs.fields(self):
            key = TIERS.instead_of.get(field.name)
            if key is not None and getattr(self, field.name) != field.default:
                hint = f"Give {key} to a TierConfig."
                raise SettingError("does not go with a list of tiers", field.name, hint=hint)
        names = [tier.name for tier in self.tiers]
        for place, tier in enumerate(self.tiers):
            if tier.name in names[:place]:
                raise SettingError(f"has two tiers with the name {tier.name}", "tiers", hint="Name each.")
            if tier.is_shared:
                what = "is a tier that all engines share, and these are the tiers of one"
                raise SettingError(
                    what,
                    f"tier.{tier.name}.scope",
                    "tiers",
                    hint="Replays and mocks of workers with one model each have it.",
                )

    @property
    def listed(self) -> tuple[TierConfig, ...]:
        """The tiers, the fastest first, in the form of a list; empty without any."""
        if self.tiers:
            return tuple(tier for tier in self.tiers if not tier.is_empty)
        found = []
        for kind, name in NAMES.items():
            pages, size, read, write, latency_us = (getattr(self, field) for field in SHORT[name])
            if pages is None and size is None:
                break
            tier = TierConfig(kind=kind, pages=pages, size=size, read=read, write=write, latency_us=latency_us)
            if tier.is_empty:
                break  # files need host memory above them
            found.append(tier)
        return tuple(found)

    @property
    def are_files(self) -> tuple[bool, ...]:
        """Whether each tier is of files, the fastest first."""
        return tuple(tier.is_files for tier in self.listed)

    @property
    def read_rates(self) -> dict[str, int]:
        """The bandwidth from each tier, by its name, the fastest first; in the short form, of both of its tiers."""
        if self.tiers:
            return {tier.name: rate_of(tier.read or DEFAULTS[tier.kind][0], "read") for tier in self.tiers}
        return {name: rate_of(getattr(self, fields[2]), fields[2]) for name, fields in SHORT.items()}

    def sizes(self, page_size: int, memory: GroupMemory | None = None) -> dict[str, int]:
        """Return the pages of each tier by its name, the fastest first; the blocks with KV groups, of `memory`.

        Raise ConfigError for options that support whole pages only.
        """
        return {spec.name: spec.num_pages for spec in self.specs(page_size, memory)}

    def specs(self, page_size: int, memory: GroupMemory | None = None) -> tuple[TierSpec, ...]:
        """Return the tiers below a device, the fastest first. `memory`: its KV groups, if it has any."""
        if memory is not None:
            given = {"kv_groups": "kv_groups"}
            if self.full_prompt_hits:
                given["full_prompt_hits"] = "full_prompt_hits"
            if self.load_overlap == "layers":
                given["layers"] = "load_overlap"
            if self.load_kv != "placed":
                given[f"{self.load_kv}_loads"] = "load_kv"
            check_combination(given)
        specs = []
        for tier in self.listed:
            num_units = self._num_units(tier, self.kv_bytes_per_token * page_size, memory)
            names = CHANNELS.get(tier.name, (f"{tier.name}_read", f"{tier.name}_write"))
            read_rate, write_rate, latency_us = DEFAULTS[tier.kind]
            latency_us = latency_us if tier.latency_us is None else tier.latency_us
            read = ChannelSpec(names[0], rate_of(tier.read or read_rate, "read"), latency_us)
            write = ChannelSpec(names[1], rate_of(tier.write or write_rate, "write"), latency_us)
            specs.append(TierSpec(tier.name, num_units, write, read, is_files=tier.is_files))
        return tuple(specs)

    def _num_units(self, tier: TierConfig, page_bytes: int, memory: GroupMemory | None) -> int:
        """Return the pages of a tier, or with KV groups its blocks. Raise SettingError for a size that holds none."""
        pages, size = SHORT.get(tier.name, KEYS)[:2]
        if self.tiers:
            pages, size = f"tier.{tier.name}.pages", f"tier.{tier.name}.size"
        unit, unit_bytes = ("page", page_bytes) if memory is None else ("block", memory.block_bytes)
        if tier.size is None:
            assert tier.pages is not None
            num_units = tier.pages if memory is None else memory.num_blocks(tier.pages)
        else:
            num_units = bytes_of(tier.size, size) // unit_bytes
            if not num_units:
                shown = f"{tier.size} bytes" if whole_number(str(tier.size).strip()) is not None else tier.size
                raise SettingError(
                    f"{shown} hold no {unit} of {unit_bytes:,} bytes", size, hint=meant_size(tier.size, unit_bytes)
                )
        if memory is not None and num_units > MOST_PAGES:
            raise SettingError(
                f"makes {num_units:,} blocks of {unit_bytes:,} bytes, more than {MOST_PAGES:,}",
                pages if tier.size is None else size,
            )
        return num_units

    @property
    def is_lazy(self) -> bool:
        """Whether stores depend on the next evictions of the device."""
        return self.policy != "eager"

    def to_builtins(self) -> dict[str, Any]:
        """Return the settings as a report has them: the list of tiers, or its short form."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        left_out = ["tiers"]
        if self.tiers:
            left_out = [name for names in SHORT.values() for name in names]
            values["tiers"] = [
                {name: value for name, value in tier.items() if value is not None} for tier in values["tiers"]
            ]
        return {name: value for name, value in values.items() if name not in left_out}

    def with_sizes(self, *sizes: int) -> OffloadConfig:
        """Return this configuration with `sizes` in bytes of its first tiers; 0 for none, and none below these."""
        of_tiers = chain(sizes, repeat(0))
        if self.tiers:
            changed = (
                msgspec.structs.replace(tier, pages=None, size=size)
                for tier, size in zip(self.tiers, of_tiers, strict=False)
            )
            return msgspec.structs.replace(self, tiers=tuple(changed))
        fields: dict[str, int | None] = {}
        for (pages, memory, *_), size in zip(SHORT.values(), of_tiers, strict=False):
            fields |= {pages: None, memory: size or None}
        return msgspec.structs.replace(self, **fields)

    def for_model(self, kv_bytes_per_token: int, num_layers: int | None = None) -> OffloadConfig:
        """Return this configuration for a model with tokens of `kv_bytes_per_token`, and `num_layers` if known."""
        num_layers = self.num_layers if num_layers is None else num_layers
        return msgspec.structs.replace(self, kv_bytes_per_token=kv_bytes_per_token, num_layers=num_layers)


def name_by_kind(table: Mapping[str, Any]) -> str:
    """Return the name of a table `[[tier]]` that has none; "" for a kind that cannot be."""
    of_kind = [name for kind, name in NAMES.items() if kind == table.get("kind", "memory")]
    return SHARED if table.get("scope") == "all" else "".join(of_kind)


TIERS = Section(
    struct=TierConfig,
    title="Host memory and files",
    table="tier",
    is_named=True,
    is_listed=True,
    into="offload.tiers",
    name_of=name_by_kind,
    instead_of={short: key for names in SHORT.values() for short, key in zip(names, KEYS, strict=True)},
)
"""The tables `[[tier]]` of a file."""


def bytes_of(size: Size, *fields: str) -> int:
    """Return a size in bytes. Raise SettingError that blames `fields`."""
    return size if isinstance(size, int) else _parsed(parse_bytes, size, "64GiB", fields)


def rate_of(rate: Rate, *fields: str) -> int:
    """Return a bandwidth in bytes per second. Raise SettingError that blames `fields`."""
    return rate if isinstance(rate, int) else _parsed(parse_rate, rate, "50GB/s", fields)


def check_rate(rate: Rate, field: str) -> None:
    """Raise SettingError for a bandwidth out of range."""
    if rate_of(rate, field) < 1:
        raise SettingError(f"must be at least one byte a second, got {rate}", field)
    check_whole(rate_of(rate, field), field, most=MOST_BYTES)


def _parsed(parse: Callable[[str], int], text: str, example: str, fields: tuple[str, ...]) -> int:
    if not isinstance(text, str):
        raise SettingError(f"must be a whole number or a text such as {example}, got {brief(text)}", *fields)
    try:
        return parse(text)
    except ConfigError as error:
        raise SettingError(error.what, *fields, hint=error.hint) from error
