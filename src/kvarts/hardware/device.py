"""Devices: memory, bandwidth and arithmetic throughput, as stated by their makers."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from kvarts.errors import ConfigError
from kvarts.hardware.dtypes import flops_dtype
from kvarts.limits import MOST_COUNT
from kvarts.units import parse_bytes, parse_rate

__all__ = ["Device", "device_names", "load_device"]

GIB = 1 << 30
CPU_FIELDS = {"cores": "2", "bandwidth": "20GB/s", "memory": "16GiB", "ghz": "2.5", "flops_per_cycle": "32"}


class Device(msgspec.Struct, frozen=True):
    """One device. `tflops`: dense matrix arithmetic by number format, in 10^12 operations a second.

    `link_bytes_per_s`: one-way bandwidth to peer devices; 0 if the device has no link.
    """

    name: str
    source: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    tflops: dict[str, float]
    link_bytes_per_s: float = 0.0

    def flops_per_s(self, dtype: str) -> float:
        """Return operations a second on numbers stored as `dtype`; formats without a unit of their own use 16 bits."""
        return (self.tflops.get(flops_dtype(dtype)) or self.tflops["bfloat16"]) * 1e12


def device_names() -> list[str]:
    """Return the names of the device presets."""
    return list(_presets())


def load_device(name: str) -> Device:
    """Return a preset by its name, or a CPU: `cpu:cores=8,bandwidth=80GB/s`. Raise ConfigError for anything else.

    A CPU has `memory` (16GiB), `ghz` (2.5) and `flops_per_cycle` a core (32: two 256-bit multiply-adds in 32 bits).
    """
    kind, _, rest = name.partition(":")
    if kind.lower() == "cpu":
        return _cpu(name, rest)
    preset = _presets().get(name.lower())
    if preset is None:
        raise ConfigError(
            f"{name!r} is not known",
            field="device",
            hint=f"Use one of {', '.join(device_names())}, or cpu:cores=8,bandwidth=80GB/s.",
        )
    return Device(
        name.lower(),
        preset["source"],
        preset["memory_gib"] * GIB,
        preset["bandwidth_gb_per_s"] * 1e9,
        preset["tflops"],
        preset["link_gb_per_s"] * 1e9,
    )


def _cpu(name: str, text: str) -> Device:
    values = dict(CPU_FIELDS)
    said = set()
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key in said:
            raise ConfigError(f"says {key} twice", field="device", hint="Keep one of them.")
        said.add(key)
        if key not in values or not value:
            raise ConfigError(f"{part!r} is not understood", field="device", hint=f"A CPU has {', '.join(values)}.")
        values[key] = value
    try:
        numbers = [float(values[name]) for name in ("cores", "ghz", "flops_per_cycle")]
    except ValueError:
        raise ConfigError(f"{text!r} has a value that is no number", field="device") from None
    operations = prod(numbers) * 1e9
    if not all(0 < number < MOST_COUNT for number in numbers):
        raise ConfigError(f"{text!r} has no arithmetic", field="device", hint="All numbers must be above 0.")
    tflops = dict.fromkeys(("float32", "bfloat16", "int8"), operations / 1e12)
    try:
        bandwidth, memory_bytes = parse_rate(values["bandwidth"]), parse_bytes(values["memory"])
    except ConfigError as error:
        raise ConfigError(error.what, field="device", hint=error.hint) from error
    if bandwidth < 1:
        raise ConfigError(f"{text!r} has no bandwidth", field="device", hint="The bandwidth must be above 0.")
    return Device(name.lower(), "as described", memory_bytes, bandwidth, tflops)


def _presets() -> dict[str, dict[str, Any]]:
    from importlib.resources import files  # most runs name no preset

    text = files("kvarts.hardware").joinpath("presets/devices.json").read_bytes()
    presets: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return presets
