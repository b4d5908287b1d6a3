"""A file with the KV of the layers of any model, for models whose config is not understood."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from kvarts.base.errors import ConfigError, InputError, parts_of
from kvarts.base.files import read_toml
from kvarts.base.limits import MOST_BYTES, MOST_COUNT, MOST_LAYERS
from kvarts.base.units import parse_bytes
from kvarts.core.kv.layers import KvLayer
from kvarts.core.kv.number_formats import dtype_bits
from kvarts.cost.hardware.geometry import Geometry

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EXAMPLE", "load_layout"]

EXAMPLE = """\
weights = "54GB"
layers = [
    {count = 10, kind = "full", heads = 16, head_dim = 128},
    {count = 52, kind = "window", window = 1024, heads = 16, head_dim = 128},
]"""
"""An example of a file. Latent layers have `width`, and states `state_bytes`."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]


class _Kind(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    kind: Literal["full", "window", "chunk", "latent", "state", "none"]
    heads: Count | None = None
    head_dim: Count | None = None
    value_dim: Count | None = None
    width: Count | None = None
    window: Count | None = None
    state_bytes: Annotated[int, msgspec.Meta(ge=1, le=MOST_BYTES)] | None = None
    extra_bytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)] = 0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    layers: list[_Kind]
    weights: str | None = None
    dtype: str = "bfloat16"
    hidden_size: Count = 1
    vocab_size: Count = 1


def load_layout(name: str, path: Path) -> Geometry:
    """Return the geometry of model `name` as a file states it; missing parts count as 0.

    Raise MissingFileError for a missing file, InputError for one that is not understood.
    """
    hint = "A file has lines such as: " + " | ".join(line.strip() for line in EXAMPLE.splitlines())
    values = read_toml(path, hint=hint)
    try:
        file = msgspec.convert(values, _File)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field, hint=hint) from error
    layers: list[KvLayer] = []
    for index, one in enumerate(file.layers):
        layers += [_layer(one, f"layers[{index}]", path)] * one.count
    if len(layers) > MOST_LAYERS:
        raise InputError(f"has {len(layers):,} layers, more than {MOST_LAYERS:,}", path=path, field="layers")
    if not any(layer.keeps_tokens for layer in layers):
        raise InputError("has no layer that keeps tokens", path=path, field="layers")
    try:
        dtype_bits(file.dtype, field="dtype")
        weights = 0 if file.weights is None else parse_bytes(file.weights)
    except ConfigError as error:
        raise InputError(error.what, path=path, field=error.field or "weights", hint=error.hint) from error
    heads = next((layer.num_heads for layer in layers if layer.keeps_tokens), 1)
    return Geometry(
        name=name,
        source=str(path),
        hidden_size=file.hidden_size,
        vocab_size=file.vocab_size,
        layers=tuple(layers),
        num_heads=max(layer.num_heads for layer in layers),
        num_kv_heads=heads,
        head_dim=1,
        intermediate_size=0,
        ties_embeddings=True,
        dtype=file.dtype,
        weight_dtype=file.dtype,
        expert_dtype=file.dtype,
        total_bytes=weights,
        counts_weights=False,
        notes=("weights and KV as the layout file states them",),
    )


def _layer(one: _Kind, field: str, path: Path) -> KvLayer:
    needed = {
        "full": ("heads", "head_dim"),
        "window": ("heads", "head_dim", "window"),
        "chunk": ("heads", "head_dim", "window"),
        "latent": ("width",),
        "state": ("state_bytes",),
        "none": (),
    }[one.kind]
    for name in needed:
        if getattr(one, name) is None:
            raise InputError(f"is missing for kind {one.kind!r}", path=path, field=f"{field}.{name}")
    if one.kind == "none":
        return KvLayer(kind="none")
    if one.kind == "state":
        return KvLayer(kind="state", state_bytes=one.state_bytes or 0)
    if one.kind == "latent":
        return KvLayer(
            kind="latent", num_heads=1, head_numbers=one.width or 0, num_vectors=1, fixed_bytes=one.extra_bytes
        )
    numbers = (one.head_dim or 0) + (one.value_dim or one.head_dim or 0)
    return KvLayer(
        kind=one.kind, num_heads=one.heads or 0, head_numbers=numbers, span=one.window, fixed_bytes=one.extra_bytes
    )
