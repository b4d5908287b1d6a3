"""What the tiers below the device are built from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from kvarts.config import EngineConfig
from kvarts.errors import ConfigError
from kvarts.kv.eviction import EvictionOrder
from kvarts.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from kvarts.offload.opening import TiersToOpen
    from kvarts.offload.pagefiles import PageFiles

__all__ = ["FilesBelow", "OffloadConfig", "OffloadPolicy"]

OffloadPolicy = Literal["eager", "lazy"]

Size = int | str
"""Bytes, or as people write them: 64GiB."""
Rate = int | str
"""Bytes a second, or as people write them: 50GB/s."""


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host memory, and files, below one engine. Raises ConfigError for a value out of range.

    `host_pages` or `host_memory`: how much host memory; none of both, no tier. `policy`: `eager` stores a page in the
    step after it became complete; `lazy` stores cached pages so that the next `target_free` pages that are taken lose
    nothing (left out: twice the pages of a step's token budget). `h2d`, `d2h`: bandwidth towards and from the device;
    `latency_us` comes on top of every transfer. `kv_bytes_per_token`: what a token weighs; the default is that of
    Llama 3.1 8B in 16 bits. `full_prompt_hits`: a load may cover a whole prompt; then its last token alone is computed
    again. `workers`: how many must report a transfer before it is complete.

    `disk_pages` or `disk_memory`: files below host memory, which are written as soon as a page is in host memory;
    `disk_read`, `disk_write` and `disk_latency_us` are theirs. `fail_every`: every so many transfers one fails; 0:
    none.
    """

    host_pages: int | None = None
    host_memory: Size | None = None
    policy: OffloadPolicy = "eager"
    target_free: int | None = None
    h2d: Rate = "50GB/s"
    d2h: Rate = "50GB/s"
    latency_us: float = 10.0
    kv_bytes_per_token: int = 131_072
    full_prompt_hits: bool = False
    workers: int = 1
    disk_pages: int | None = None
    disk_memory: Size | None = None
    disk_read: Rate = "5GB/s"
    disk_write: Rate = "3GB/s"
    disk_latency_us: float = 100.0
    fail_every: int = 0

    def __post_init__(self) -> None:
        for pages, memory in (("host_pages", "host_memory"), ("disk_pages", "disk_memory")):
            count, size = getattr(self, pages), getattr(self, memory)
            if count is not None and size is not None:
                raise ConfigError(f"is given beside {memory}", field=pages, hint="Keep one of them.")
            if count is not None and count < 0:
                raise ConfigError(f"must be at least 0, got {count}", field=pages)
            if size is not None and self._bytes(memory) < 0:
                raise ConfigError(f"must be at least 0, got {size}", field=memory)
        if self.policy not in ("eager", "lazy"):
            raise ConfigError(f"must be 'eager' or 'lazy', got {self.policy!r}", field="policy")
        if self.target_free is not None and self.target_free < 0:
            raise ConfigError(f"must be at least 0, got {self.target_free}", field="target_free")
        for field in ("h2d", "d2h", "disk_read", "disk_write"):
            if self.bytes_per_s(field) < 1:
                raise ConfigError(f"must be at least one byte a second, got {getattr(self, field)}", field=field)
        for field in ("latency_us", "disk_latency_us"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise ConfigError(f"must be a finite number, at least 0, got {getattr(self, field)}", field=field)
        for field in ("kv_bytes_per_token", "workers"):
            if getattr(self, field) < 1:
                raise ConfigError(f"must be at least 1, got {getattr(self, field)}", field=field)
        if self.fail_every < 0:
            raise ConfigError(f"must be at least 0, got {self.fail_every}", field="fail_every")
        if (self.disk_pages or self.disk_memory) and self.host_pages is None and self.host_memory is None:
            raise ConfigError("needs host memory above it", field="disk_pages", hint="Give host_pages as well.")

    def num_host_pages(self, page_size: int) -> int:
        """Pages of host memory, of `page_size` tokens each."""
        return self._num_pages("host_pages", "host_memory", page_size)

    def num_disk_pages(self, page_size: int) -> int:
        """Pages in files, of `page_size` tokens each."""
        return self._num_pages("disk_pages", "disk_memory", page_size)

    def tiers(self, page_size: int) -> dict[str, int]:
        """Pages of each tier below the device, the fastest first, by its name."""
        sizes = {"host": self.num_host_pages(page_size), "disk": self.num_disk_pages(page_size)}
        return {name: num_pages for name, num_pages in sizes.items() if num_pages} if sizes["host"] else {}

    def prepare(
        self,
        config: EngineConfig,
        make_order: Callable[[], EvictionOrder],
        *,
        known_keys: Iterable[bytes] = (),
        namespace: str = "",
    ) -> TiersToOpen | None:
        """Prepare the tiers below an engine of `config`; None for none. `known_keys` and `namespace`: see FileTier."""
        if not self.tiers(config.page_size):
            return None
        from kvarts.offload.opening import TiersToOpen  # only engines with tiers pay for it

        return TiersToOpen(self, config, make_order, known_keys=known_keys, namespace=namespace)

    def bytes_per_s(self, field: str) -> int:
        """The bandwidth that is called `field`."""
        value: Rate = getattr(self, field)
        return value if isinstance(value, int) else _parsed(parse_rate, value, field)

    def _num_pages(self, pages: str, memory: str, page_size: int) -> int:
        count: int | None = getattr(self, pages)
        if count is not None:
            return count
        if getattr(self, memory) is None:
            return 0
        return self._bytes(memory) // (self.kv_bytes_per_token * page_size)

    def _bytes(self, field: str) -> int:
        value: Size = getattr(self, field)
        return value if isinstance(value, int) else _parsed(parse_bytes, value, field)

    def for_model(self, kv_bytes_per_token: int) -> OffloadConfig:
        """Return the same for a model whose tokens weigh `kv_bytes_per_token`."""
        return msgspec.structs.replace(self, kv_bytes_per_token=kv_bytes_per_token)

    def open_files(self, directory: Path | str, page_size: int) -> PageFiles:
        """Return the files of the tier below host memory, with those that are already in `directory`.

        Raise OutputError for a directory that cannot hold them.
        """
        from kvarts.offload.pagefiles import HEAD, PageFiles

        page_bytes = HEAD.size + self.kv_bytes_per_token * page_size
        return PageFiles(directory, max_bytes=self.num_disk_pages(page_size) * page_bytes)

    def with_known(self, known_keys: Iterable[bytes], namespace: str) -> FilesBelow:
        """Return these tiers with the pages in files that an earlier run has left."""
        return FilesBelow(config=self, known_keys=tuple(known_keys), namespace=namespace)


class FilesBelow(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers whose files some other run has left: `known_keys` are theirs, in `namespace`; see FileTier."""

    config: OffloadConfig
    known_keys: tuple[bytes, ...] = ()
    namespace: str = ""

    def prepare(self, config: EngineConfig, make_order: Callable[[], EvictionOrder]) -> TiersToOpen | None:
        """Prepare the tiers below an engine of `config`; None for none."""
        return self.config.prepare(config, make_order, known_keys=self.known_keys, namespace=self.namespace)


def _parsed(parse: object, text: str, field: str) -> int:
    try:
        parsed: int = parse(text)  # type: ignore[operator]
    except ConfigError as error:
        raise ConfigError(error.what, field=field, hint=error.hint) from error
    return parsed
