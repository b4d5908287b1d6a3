"""Who reads the pages, by device and by what is installed."""

from __future__ import annotations

from collections.abc import Callable

from kvarts.errors import ConfigError
from kvarts.executor.torch.flash import FlashReader, flash_fits
from kvarts.executor.torch.flex import FlexReader, flex_fits
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.sdpa import SdpaReader
from kvarts.executor.torch.step import Reader

__all__ = ["READERS", "choose_reader"]

READERS: dict[str, tuple[Callable[[KVPools], Reader], Callable[[KVPools], str | None]]] = {
    "flash": (FlashReader, flash_fits),
    "flex": (FlexReader, flex_fits),
    "sdpa": (SdpaReader, lambda _: None),
}
"""By name, and why they cannot read some pools; the fastest on CUDA first."""


def choose_reader(pools: KVPools, name: str = "auto") -> Reader:
    """The reader of that name; `auto`: on CUDA the first of READERS that can, elsewhere `sdpa`.

    Raises ConfigError for a name that is not known, and for one that cannot read such pages.
    """
    if name == "auto":
        fitting = (make for make, fits in READERS.values() if fits(pools) is None)
        return next(fitting)(pools) if pools.device.type == "cuda" else SdpaReader(pools)
    if name not in READERS:
        raise ConfigError(f"{name!r} is not known", field="attention", hint=f"Known: auto, {', '.join(READERS)}.")
    make, fits = READERS[name]
    if reason := fits(pools):
        raise ConfigError(f"{name} cannot be had: {reason}", field="attention", hint="Leave it to auto.")
    return make(pools)
