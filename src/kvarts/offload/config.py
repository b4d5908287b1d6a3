"""Configuration of the tiers below the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

import msgspec

from kvarts.combines import check_combination
from kvarts.errors import ConfigError
from kvarts.kv.transfer import LoadKv
from kvarts.limits import MOST_BYTES, MOST_BYTES_PER_TOKEN, MOST_LAYERS, MOST_MS, MOST_PAGES, check_number, check_whole
from kvarts.offload.channel import ChannelSpec, TierSpec
from kvarts.settings import SettingError, setting
from kvarts.units import meant_size, parse_bytes, parse_rate

if TYPE_CHECKING:
    from kvarts.kv.groups import GroupMemory

__all__ = ["LoadKv", "OffloadConfig"]

LoadOverlap = Literal["none", "layers"]
OffloadPolicy = Literal["eager", "lazy"]
PreemptionMode = Literal["swap", "recompute"]

Size = int | str
"""Bytes, as a number or with a unit: 64GiB."""
MOST_SLOWDOWN = 100.0
Rate = int | str
"""Bytes per second, as a number or with a unit: 50GB/s."""


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host memory, and files, below one engine. Raises ConfigError for a value out of range.

    `host_pages` or `host_memory`: the size of host memory; without either, nothing is stored. `policy`: `eager` stores
    a page in the step after it became complete; `lazy` stores cached pages so that the next `target_free` allocated
    pages lose nothing (default: eight times the pages of a step's token budget, but at most an eighth of host memory,
    and at least twice the budget). `h2d`, `d2h`: bandwidth to and from the device; `latency_us` is added to every
    transfer. `bus`: a bandwidth that all channels share evenly. `kv_bytes_per_token`: bytes of a token; the default is
    that of Llama 3.1 8B in 16 bits.
    `full_prompt_hits`: a load may cover a whole prompt; then only its last token is computed again. `workers`: how many
    must report a transfer before it is complete. `preemption_mode`: with `swap`, pages that only a preempted request
    can find, those of generated tokens without ids, are stored in host memory until it ends; with `recompute` they are
    not. `load_overlap`: with `layers`, the first step of a request computes one of `num_layers` layers while later ones
    are loaded; with `none` it waits for its whole load. `load_kv`: with `placed`, a request that waits for its load has
    a place among the running requests and all pages of its prompt; with `async` it has no place, and only the pages
    that are loaded or found, as with vLLM's `load_kv_async`; with `sync` it runs at once, and the step lasts as long as
    the load. `copy_slowdown`: a step takes 1 + this times as long while
    pages are copied from or to the device.

    `disk_pages` or `disk_memory`: the size of the files below host memory, which are written as soon as a page is in
    host memory; `disk_read`, `disk_write` and `disk_latency_us` are those of the files. `store_within_ms`: a page is
    stored once its channel could carry it within this time, and stays wanted until then. `deadline_s`: a transfer that
    an executor has not reported within this time counts as failed; in virtual time, ends are known. `fail_every`: one
    in `fail_every` transfers fails; 0: no transfer does.
    """

    opened_by: ClassVar[str] = "kvarts.offload.opening:prepare_tiers"

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
            "Host memory below the device of each replica: 64GiB. A page takes --kv-bytes-per-token times its tokens.",
            flag="--host-memory",
            metavar="SIZE",
            replaces=("host_pages",),
        ),
    ] = None
    policy: Annotated[
        OffloadPolicy,
        setting(
            "Store a page below as soon as it is complete, or when its eviction comes near.",
            flag="--offload",
        ),
    ] = "eager"
    target_free: Annotated[
        int | None,
        setting(
            "Lazy: so many pages can be taken without losing anything.",
            flag="--target-free",
            metavar="N",
            default="two to eight token budgets",
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
    bus: Annotated[
        Rate | None,
        setting(
            "Bandwidth that all channels share, of a PCIe switch or host memory.",
            flag="--bus",
            metavar="RATE",
            default="each has its own",
        ),
    ] = None
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
    copy_slowdown: Annotated[
        float,
        setting(
            "A step takes 1 + X times as long while pages are copied from or to the device.",
            flag="--copy-slowdown",
            metavar="X",
        ),
    ] = 0.0
    deadline_s: Annotated[
        float,
        setting("A transfer that an executor has not reported within so long counts as failed.", flag=None),
    ] = 60.0
    fail_every: Annotated[int, setting("Every so many transfers one fails; 0: none.", flag=None)] = 0

    def __post_init__(self) -> None:
        for pages, memory in (("host_pages", "host_memory"), ("disk_pages", "disk_memory")):
            count, size = getattr(self, pages), getattr(self, memory)
            if count is not None and size is not None:
                raise SettingError(f"is given beside {{{memory}}}", pages, hint="Keep one of them.")
            if count is not None:
                check_whole(count, pages, least=0, most=MOST_PAGES)
            if size is not None:
                check_whole(self._bytes(memory), memory, least=0, most=MOST_BYTES)
        if self.policy not in ("eager", "lazy"):
            raise SettingError(f"must be 'eager' or 'lazy', got {self.policy!r}", "policy")
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
        for field in ("h2d", "d2h", "disk_read", "disk_write", *(() if self.bus is None else ("bus",))):
            if self.bytes_per_s(field) < 1:
                raise SettingError(f"must be at least one byte a second, got {getattr(self, field)}", field)
            check_whole(self.bytes_per_s(field), field, most=MOST_BYTES)
        for field in ("latency_us", "disk_latency_us"):
            check_number(getattr(self, field), field, most=MOST_MS)
        check_whole(self.kv_bytes_per_token, "kv_bytes_per_token", most=MOST_BYTES_PER_TOKEN)
        check_whole(self.workers, "workers")
        check_number(self.copy_slowdown, "copy_slowdown", most=MOST_SLOWDOWN)
        check_number(self.store_within_ms, "store_within_ms", most=MOST_MS)
        check_number(self.deadline_s, "deadline_s", most=MOST_MS)
        if not self.deadline_s:
            raise SettingError("must be above 0", "deadline_s")
        check_whole(self.fail_every, "fail_every", least=0)
        if (self.disk_pages or self.disk_memory) and self.host_pages is None and self.host_memory is None:
            raise SettingError(
                "needs host memory above it", "disk_pages", "disk_memory", of=self, hint="Give {host_pages} as well."
            )

    def num_host_pages(self, page_size: int) -> int:
        """Return the pages of host memory, of `page_size` tokens each."""
        return self._num_pages("host_pages", "host_memory", page_size)

    def num_disk_pages(self, page_size: int) -> int:
        """Return the pages in files, of `page_size` tokens each."""
        return self._num_pages("disk_pages", "disk_memory", page_size)

    def tiers(self, page_size: int) -> dict[str, int]:
        """Return the pages of each lower tier, the fastest first, by its name."""
        return {spec.name: spec.num_pages for spec in self.tier_specs(page_size)}

    def tier_specs(self, page_size: int) -> tuple[TierSpec, ...]:
        """Return the lower tiers, the fastest first; empty without host memory."""
        host = self.num_host_pages(page_size)
        return self._specs(host, self.num_disk_pages(page_size)) if host else ()

    def _specs(self, host: int, disk: int) -> tuple[TierSpec, ...]:
        """Return host memory of `host` pages or blocks, and files of `disk` pages or blocks unless that is 0."""
        write = ChannelSpec("d2h", self.bytes_per_s("d2h"), self.latency_us)
        read = ChannelSpec("h2d", self.bytes_per_s("h2d"), self.latency_us)
        specs = (TierSpec("host", host, write, read),)
        if not disk:
            return specs
        write = ChannelSpec("disk_write", self.bytes_per_s("disk_write"), self.disk_latency_us)
        read = ChannelSpec("disk_read", self.bytes_per_s("disk_read"), self.disk_latency_us)
        return (*specs, TierSpec("disk", disk, write, read, is_files=True))

    def specs(self, page_size: int, memory: GroupMemory | None = None) -> tuple[TierSpec, ...]:
        """Return the tiers below a device, the fastest first. `memory`: its KV groups, if it has any."""
        return self.tier_specs(page_size) if memory is None else self.group_specs(memory, page_size)

    @property
    def is_lazy(self) -> bool:
        """Whether stores depend on the next evictions of the device."""
        return self.policy == "lazy"

    def group_tiers(self, memory: GroupMemory, page_size: int) -> dict[str, int]:
        """Return the blocks of each tier below a device with the KV groups of `memory`, by its name.

        Raise ConfigError for options that support whole pages only.
        """
        return {spec.name: spec.num_pages for spec in self.group_specs(memory, page_size)}

    def group_specs(self, memory: GroupMemory, page_size: int) -> tuple[TierSpec, ...]:
        """Return the tiers below a device with the KV groups of `memory`, in blocks, the fastest first."""
        given = {"kv_groups": "kv_groups"}
        if self.full_prompt_hits:
            given["full_prompt_hits"] = "full_prompt_hits"
        if self.load_overlap == "layers":
            given["layers"] = "load_overlap"
        if self.load_kv != "placed":
            given[f"{self.load_kv}_loads"] = "load_kv"
        check_combination(given)
        host = self._num_blocks("host_pages", "host_memory", memory)
        return self._specs(host, self._num_blocks("disk_pages", "disk_memory", memory)) if host else ()

    def _num_blocks(self, pages: str, size: str, memory: GroupMemory) -> int:
        """Return the blocks of a tier, of the option `pages` or `size`; 0 for no tier."""
        count: int | None = getattr(self, pages)
        if count is not None:
            num_blocks = memory.num_blocks(count)
        elif getattr(self, size) is None:
            num_blocks = 0
        else:
            self._refuse_less_than(memory.block_bytes, size, "block")
            num_blocks = self._bytes(size) // memory.block_bytes
        if num_blocks > MOST_PAGES:
            raise SettingError(
                f"makes {num_blocks:,} blocks of {memory.block_bytes:,} bytes, more than {MOST_PAGES:,}",
                pages,
                size,
                of=self,
            )
        return num_blocks

    def bytes_per_s(self, field: str) -> int:
        """Return the bandwidth of option `field`."""
        value: Rate = getattr(self, field)
        return value if isinstance(value, int) else _parsed(parse_rate, value, field)

    def _num_pages(self, pages: str, memory: str, page_size: int) -> int:
        count: int | None = getattr(self, pages)
        if count is not None:
            return count
        if getattr(self, memory) is None:
            return 0
        page_bytes = self.kv_bytes_per_token * page_size
        self._refuse_less_than(page_bytes, memory, "page")
        return self._bytes(memory) // page_bytes

    def _refuse_less_than(self, least_bytes: int, memory: str, what: str) -> None:
        """Raise SettingError for a size smaller than one unit, unless it is 0, which means no tier."""
        if 0 < self._bytes(memory) < least_bytes:
            size = getattr(self, memory)
            shown = f"{size} bytes" if str(size).strip().isdecimal() else size
            raise SettingError(
                f"{shown} hold no {what} of {least_bytes:,} bytes", memory, hint=meant_size(size, least_bytes)
            )

    def _bytes(self, field: str) -> int:
        value: Size = getattr(self, field)
        return value if isinstance(value, int) else _parsed(parse_bytes, value, field)

    def for_model(self, kv_bytes_per_token: int, num_layers: int | None = None) -> OffloadConfig:
        """Return this configuration for a model with tokens of `kv_bytes_per_token`, and `num_layers` if known."""
        num_layers = self.num_layers if num_layers is None else num_layers
        return msgspec.structs.replace(self, kv_bytes_per_token=kv_bytes_per_token, num_layers=num_layers)


def _parsed(parse: object, text: str, field: str) -> int:
    try:
        parsed: int = parse(text)  # type: ignore[operator]
    except ConfigError as error:
        raise SettingError(error.what, field, hint=error.hint) from error
    return parsed
