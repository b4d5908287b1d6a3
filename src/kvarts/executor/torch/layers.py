"""Chooses the implementation of a model's layers: its own code, or compiled calls for standard decoders on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvarts.errors import ConfigError
from kvarts.executor.torch.compiled_layers import CompiledLayers
from kvarts.executor.torch.layer_check import prove
from kvarts.executor.torch.layer_parts import ATTENTION, MLP, UnlikeError, find_parts
from kvarts.executor.torch.metadata import AttentionBackend, AttentionParams
from kvarts.executor.torch.numba_backend import NumbaBackend
from kvarts.executor.torch.openmp import team
from kvarts.executor.torch.packing import pack_together
from kvarts.executor.torch.pools import KVPools
from kvarts.executor.torch.probe import Facts

__all__ = ["LAYERS", "open_layers"]

LAYERS = ("auto", "compiled", "model")


def open_layers(
    model: Any,
    facts: Facts,
    pools: KVPools,
    backends: Sequence[AttentionBackend],
    tables: Sequence[int],
    name: str = "auto",
) -> tuple[CompiledLayers | None, str]:
    """Return compiled layers for a model, or None for its own code, and the reason.

    `backends`: the attention backend of each page table; `tables`: the page table of each layer. `auto` chooses
    compiled layers if they compute the same as the model. Raise ConfigError for an unknown name, and for `compiled`
    if the model does not support it.
    """
    if name not in LAYERS:
        raise ConfigError(f"{name!r} is not known", field="layers", hint=f"Known: {', '.join(LAYERS)}.")
    if name == "model":
        return None, "as asked"
    try:
        return _compiled(model, facts, pools, backends, tables), "compared with the model's own code"
    except UnlikeError as error:
        if name == "compiled":
            raise ConfigError(f"compiled cannot be had: {error}", field="layers", hint="Leave it to auto.") from None
        return None, str(error)


_proven: WeakKeyDictionary[Any, dict[int, list[AttentionParams] | str]] = WeakKeyDictionary()
"""By model and page size: attention parameters of its layers, or why it cannot have compiled layers."""


def _compiled(
    model: Any, facts: Facts, pools: KVPools, backends: Sequence[AttentionBackend], tables: Sequence[int]
) -> CompiledLayers:
    if facts.states:
        raise UnlikeError(f"{len(facts.states)} layers keep a state")
    numba = [backend for backend in backends if type(backend) is NumbaBackend]
    if len(numba) < len(backends):
        raise UnlikeError("attention is not that of numba")
    if not team().has_barrier:
        raise UnlikeError("PyTorch's threads cannot be had")
    parts = find_parts(model, facts.layers)
    parameters = [
        one for module in (*(layer.module for layer in parts.layers), parts.head) for one in module.parameters()
    ]
    if any(parameter.dtype != model.dtype for parameter in (*parameters, parts.norm.weight)):
        raise UnlikeError("weights have several number formats")
    known = _proven.setdefault(model, {})
    if pools.page_size not in known:
        try:
            with torch.inference_mode():
                known[pools.page_size] = prove(model, facts, parts, pools.page_size)
        except UnlikeError as error:
            known[pools.page_size] = str(error)
    params = known[pools.page_size]
    if isinstance(params, str):
        raise UnlikeError(params)
    modules = [(layer.attention, layer.mlp) for layer in parts.layers]
    del parts  # so that a weight is in memory twice only while its layer is packed
    for attention, mlp in modules:
        pack_together(attention, ATTENTION[:3])
        pack_together(mlp, MLP[:2])
    return CompiledLayers(find_parts(model, facts.layers), pools, numba, tables, params)
