"""Devices: memory, bandwidth and arithmetic throughput, from the makers' specifications or from a file.

A file describes a device in TOML::

    memory = "96GiB"
    bandwidth = "1597GB/s"
    link = "64GB/s"          # one way, to another such device
    link_kind = "pcie"       # without peer access; pcie-peer with it; nvlink for any dedicated link
    source = "where these are stated"
    [tflops]                 # dense, 10^12 operations per second
    bfloat16 = 503.8
    fp8 = 1007.6
"""

from __future__ import annotations

from math import isfinite, prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from kvarts.base.errors import ConfigError, InputError, did_you_mean, parts_of
from kvarts.base.files import read_toml
from kvarts.base.limits import MOST_COUNT
from kvarts.base.units import parse_bytes, parse_rate
from kvarts.core.kv.number_formats import dtype_bits, flops_dtype

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Device", "device_names", "load_device", "preset_name"]

GIB = 1 << 30
CPU_FIELDS = {"cores": "2", "bandwidth": "20GB/s", "memory": "16GiB", "ghz": "2.5", "flops_per_cycle": "32"}

SHORT_NAMES = {
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "h200": "h200-141gb",
    "b200": "b200-180gb",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
}
"""Common short names of presets."""

LinkKind = Literal["nvlink", "pcie-peer", "pcie"]


class Device(msgspec.Struct, frozen=True):
    """One device. `tflops`: dense matrix arithmetic by number format, in 10^12 operations per second.

    `link_bytes_per_s`: one-way bandwidth to peer devices; 0 if the device has no link. `link_kind`: `nvlink` for a
    dedicated link of any maker; `pcie-peer` for PCIe with peer access, `pcie` without. `capability`: NVIDIA's compute
    capability, without its minor number; 0 if unknown. `usable_gib`: the memory that the driver offers, at least and at
    most.
    """

    name: str
    source: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    tflops: dict[str, float]
    link_bytes_per_s: float = 0.0
    link_kind: LinkKind = "nvlink"
    capability: int = 0
    usable_gib: tuple[float, float] | None = None

    @property
    def usable_bytes(self) -> tuple[int, int]:
        """The memory that the driver offers to programs, at least and at most."""
        if self.usable_gib is not None:
            low, high = self.usable_gib
            return round(low * GIB), round(high * GIB)
        return self.memory_bytes * 93 // 100, self.memory_bytes

    @property
    def vendor(self) -> str:
        """The maker, as the source names it first: NVIDIA, AMD, Google."""
        return self.source.partition(" ")[0]

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, which does not launch kernels."""
        return self.name.startswith("cpu:")

    def flops_per_s(self, dtype: str) -> float:
        """Return operations per second on numbers stored as `dtype`. Formats without dedicated units use 16 bits."""
        return (self.tflops.get(flops_dtype(dtype)) or self.tflops["bfloat16"]) * 1e12


def device_names() -> list[str]:
    """Return the names of the device presets."""
    return list(_presets())


def preset_name(name: str) -> str:
    """Return the name of the preset that `name` or a short name such as H200 stands for; any other name as it is."""
    lower = SHORT_NAMES.get(name.lower(), name.lower())
    return lower if lower in _presets() else name


def load_device(name: str) -> Device:
    """Return a preset, by its name or short name (h200), a device described by a TOML file, or a CPU.

    A CPU is `cpu:cores=8,bandwidth=80GB/s`. It also has `memory` (16GiB), `ghz` (2.5) and `flops_per_cycle`, per core
    (32: two 256-bit multiply-adds in 32 bits).

    Raise ConfigError for anything else, MissingFileError and InputError for the file.
    """
    kind, _, rest = name.partition(":")
    if kind.lower() == "cpu":
        return _cpu(name, rest)
    if name.lower().endswith(".toml"):
        from pathlib import Path

        return _from_file(Path(name))
    name = preset_name(name)
    preset = _presets().get(name)
    if preset is None:
        raise ConfigError(
            f"{name!r} is not known",
            field="device",
            hint=did_you_mean(name, device_names())
            or f"Use one of {', '.join(device_names())}, a file my.toml, or cpu:cores=8,bandwidth=80GB/s.",
        )
    return Device(
        name,
        preset["source"],
        preset["memory_gib"] * GIB,
        preset["bandwidth_gb_per_s"] * 1e9,
        preset["tflops"],
        preset["link_gb_per_s"] * 1e9,
        preset.get("link", "nvlink"),
        preset.get("capability", 0),
        tuple(preset["usable_gib"]) if "usable_gib" in preset else None,
    )


class _File(msgspec.Struct, forbid_unknown_fields=True):
    memory: str
    bandwidth: str
    tflops: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1e9)]]
    link: str | None = None
    link_kind: LinkKind = "pcie"
    name: str | None = None
    source: str = ""


def _from_file(path: Path) -> Device:
    values = read_toml(path, hint="Check the path of the device.")
    try:
        file = msgspec.convert(values, _File)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
    rates = {}
    for field in ("memory", "bandwidth", "link"):
        text = getattr(file, field)
        if text is None:
            continue
        try:
            rates[field] = float(parse_bytes(text) if field == "memory" else parse_rate(text))
        except ConfigError as error:
            raise InputError(error.what, path=path, field=field) from error
        if not rates[field] >= 1 or not isfinite(rates[field]):
            raise InputError(f"must be above 0, got {text}", path=path, field=field)
    for dtype in file.tflops:
        try:
            dtype_bits(dtype, field="tflops")
        except ConfigError as error:
            raise InputError(error.what, path=path, field=f"tflops.{dtype}") from error
    if "bfloat16" not in file.tflops:
        raise InputError("is missing", path=path, field="tflops.bfloat16")
    return Device(
        file.name or path.stem,
        file.source or str(path),
        int(rates["memory"]),
        rates["bandwidth"],
        file.tflops,
        rates.get("link", 0.0),
        file.link_kind,
    )


def _cpu(name: str, text: str) -> Device:
    values = dict(CPU_FIELDS)
    said = set()
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key in said:
            raise ConfigError(f"has {key} twice", field="device", hint="Keep one of them.")
        said.add(key)
        if key not in values or not value:
            raise ConfigError(f"{part!r} is not understood", field="device", hint=f"A CPU has {', '.join(values)}.")
        values[key] = value
    try:
        numbers = [float(values[name]) for name in ("cores", "ghz", "flops_per_cycle")]
    except ValueError:
        raise ConfigError(f"{text!r} has a value that is not a number", field="device") from None
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
    from pkgutil import get_data  # `importlib.resources` would take longer than a short replay

    text = get_data("kvarts.cost.hardware", "presets/devices.json")
    assert text is not None
    presets: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return presets
