"""Attention backends by name, and the choice of one for a device, a number format and a page size."""

from __future__ import annotations

from collections.abc import Callable

from kvarts.errors import ConfigError
from kvarts.executor.torch.flash import FlashBackend, flash_fits
from kvarts.executor.torch.metadata import AttentionBackend
from kvarts.executor.torch.numba_backend import NumbaBackend, numba_fits
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.sdpa import SdpaBackend
from kvarts.executor.torch.triton_backend import TritonBackend, triton_fits

__all__ = ["BACKENDS", "CAPTURED", "backend_name", "choose_backend"]

BACKENDS: dict[str, tuple[Callable[[KVPools], AttentionBackend], Callable[[KVPools], str | None]]] = {
    "flash": (FlashBackend, flash_fits),
    "numba": (NumbaBackend, numba_fits),
    "sdpa": (SdpaBackend, lambda _: None),
    "triton": (TritonBackend, triton_fits),
}
"""By name: the backend, and a function that returns why it does not fit some pools, or None."""
ON_CUDA = ("triton", "flash", "sdpa")
ON_OTHERS = ("numba", "sdpa")
CAPTURED = ("triton",)
"""Backends whose kernels read all that changes from step to step from the device's memory, as CUDA graphs demand."""


def backend_name(pools: KVPools, *more: KVPools, name: str = "auto") -> str:
    """Return `name`, or for `auto` the device's first backend that fits all pools.

    Raise ConfigError for an unknown name, or a backend that does not fit these pools.
    """
    every = (pools, *more)
    if name == "auto":
        meant = ON_CUDA if pools.device.type == "cuda" else ON_OTHERS
        return next(name for name in meant if all(_refusal(name, one) is None for one in every))
    if name not in BACKENDS:
        raise ConfigError(f"{name!r} is not known", field="attention", hint=f"Known: auto, {', '.join(BACKENDS)}.")
    for one in every:
        if reason := _refusal(name, one):
            raise ConfigError(f"{name} cannot be had: {reason}", field="attention", hint="Leave it to auto.")
    return name


def _refusal(name: str, pools: KVPools) -> str | None:
    if pools.kv_dtype != "auto" and name != "sdpa":
        return f"it reads no KV in {pools.kv_dtype}"
    return BACKENDS[name][1](pools)


def choose_backend(pools: KVPools, name: str = "auto") -> AttentionBackend:
    """Return the backend that `backend_name` chooses. Raises ConfigError as it does."""
    make, _ = BACKENDS[backend_name(pools, name=name)]
    return make(pools)
