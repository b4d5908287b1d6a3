"""A model and a device, instead of numbers: what they say about the cost of steps, pages and bytes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvarts.config import EngineConfig
from kvarts.errors import ConfigError
from kvarts.executor.cost import CostSpec, parse_cost
from kvarts.executor.roofline import RooflineCost
from kvarts.units import parse_bytes

__all__ = ["HARDWARE_FIELDS", "resolve_hardware"]


class _Hardware(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What may be said beside the fields of ReplayConfig.

    `model`, `device`: see load_geometry and load_device. `kv_memory`: `auto`, or bytes on each device.
    `memory_fraction`: of the device, for `auto`.
    """

    model: str | None = None
    device: str | None = None
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1)] | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    kv_memory: str | int | None = None
    memory_fraction: float | None = None


HARDWARE_FIELDS = _Hardware.__struct_fields__


def resolve_hardware(values: dict[str, Any]) -> dict[str, Any]:
    """Values of ReplayConfig by their file names, with what model and device say filled in where nothing else does.

    The cost of steps becomes a roofline; one that was given, from a calibration, keeps its coefficients. Pages become
    those that fit. Raises ConfigError for what is not known, contradicts itself, or does not fit.
    """
    given = {name: values[name] for name in HARDWARE_FIELDS if name in values}
    rest = {name: value for name, value in values.items() if name not in given}
    cost = rest.get("cost")
    if isinstance(cost, str):
        cost = rest["cost"] = parse_cost(cost)
    elif isinstance(cost, dict):
        cost = rest["cost"] = msgspec.convert(cost, CostSpec)
    if not given:
        return rest
    from kvarts.hardware import fit_memory, load_device, load_geometry  # only those who name a model pay for it
    from kvarts.hardware.fit import local_kv_bytes_per_token

    hardware = msgspec.convert(given, _Hardware)
    roofline = cost if isinstance(cost, RooflineCost) else None
    model = hardware.model or (roofline.llm if roofline else None)
    device = hardware.device or (roofline.device if roofline else None)
    if model is None or device is None:
        missing = "model" if model is None else "device"
        raise ConfigError("is missing", field=missing, hint="Model and device go together: --model NAME --device NAME.")
    weight_dtype = hardware.weight_dtype or (roofline.weight_dtype if roofline else None)
    geometry = load_geometry(model).stored_as(weight_dtype)
    tensor_parallel = hardware.tensor_parallel or (roofline.tensor_parallel if roofline else 1)
    kv_dtype = hardware.kv_dtype or (roofline.kv_dtype if roofline else None)
    facts = {
        "llm": model,
        "device": device,
        "tensor_parallel": tensor_parallel,
        "weight_dtype": weight_dtype,
        "kv_dtype": kv_dtype,
    }
    if roofline is not None:
        rest["cost"] = msgspec.structs.replace(roofline, **facts)
    elif cost is None:
        rest["cost"] = RooflineCost(**facts)  # type: ignore[arg-type]
    limits = {name: rest[name] for name in ("page_size", "max_batched_tokens", "max_seqs") if name in rest}
    engine = msgspec.convert(limits, EngineConfig)
    page_size = engine.page_size
    token_bytes = local_kv_bytes_per_token(geometry, tensor_parallel, kv_dtype)
    if "pages" in rest:
        if hardware.kv_memory is not None:
            raise ConfigError("is given beside pages", field="kv_memory", hint="Keep one of them.")
    elif hardware.kv_memory in (None, "auto"):
        rest["pages"] = fit_memory(
            geometry,
            load_device(device),
            page_size=page_size,
            tensor_parallel=tensor_parallel,
            memory_fraction=0.9 if hardware.memory_fraction is None else hardware.memory_fraction,
            kv_dtype=kv_dtype,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
        ).num_pages
    else:
        size = hardware.kv_memory
        num_bytes = parse_bytes(size) if isinstance(size, str) else size
        rest["pages"] = num_bytes // (page_size * token_bytes)
        if rest["pages"] < 1:
            raise ConfigError(f"{size} hold no page of {page_size * token_bytes:,} bytes", field="kv_memory")
    offload = rest.get("offload")
    if isinstance(offload, dict) and "kv_bytes_per_token" not in offload:
        rest["offload"] = {**offload, "kv_bytes_per_token": token_bytes}
    return rest
