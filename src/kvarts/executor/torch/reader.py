"""Who reads the pages, by device and by what is installed."""

from __future__ import annotations

from collections.abc import Callable

from kvarts.errors import ConfigError
from kvarts.executor.torch.flash import FlashReader, flash_fits
from kvarts.executor.torch.flex import FlexReader, flex_fits
from kvarts.executor.torch.inplace import InPlaceReader, in_place_fits
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.sdpa import SdpaReader
from kvarts.executor.torch.step import Reader

__all__ = ["READERS", "choose_reader"]

READERS: dict[str, tuple[Callable[[KVPools], Reader], Callable[[KVPools], str | None]]] = {
    "flash": (FlashReader, flash_fits),
    "flex": (FlexReader, flex_fits),
    "numba": (InPlaceReader, in_place_fits),
    "sdpa": (SdpaReader, lambda _: None),
}
"""By name, and why they cannot read some pools; the fastest first."""
ON_CUDA = ("flash", "flex", "sdpa")
ON_OTHERS = ("numba", "sdpa")


def choose_reader(pools: KVPools, name: str = "auto") -> Reader:
    """The reader of that name; `auto`: the first of READERS that is meant for the device, and can.

    Raises ConfigError for a name that is not known, and for one that cannot read such pages.
    """
    if name == "auto":
        meant = ON_CUDA if pools.device.type == "cuda" else ON_OTHERS
        name = next(name for name in meant if READERS[name][1](pools) is None)
    if name not in READERS:
        raise ConfigError(f"{name!r} is not known", field="attention", hint=f"Known: auto, {', '.join(READERS)}.")
    make, fits = READERS[name]
    if reason := fits(pools):
        raise ConfigError(f"{name} cannot be had: {reason}", field="attention", hint="Leave it to auto.")
    return make(pools)
