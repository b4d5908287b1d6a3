"""What each layer of a model keeps, from what it hands to attention: no config says it for all models alike."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvarts.errors import ConfigError
from kvarts.executor.torch.attention import ATTENTION_KEYWORD
from kvarts.executor.torch.metadata import AttentionParams
from kvarts.executor.torch.pools import LayerShape

__all__ = ["layer_shapes"]


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shape of each layer. A model is run once, on two tokens, with its attention watched.

    Raise ConfigError for a model with layers that are not all attention over everything that came before.
    """
    if model in _known:
        return _known[model]
    probe = _Probe()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    device = model.device
    with torch.inference_mode():
        model(
            input_ids=torch.zeros((1, 2), dtype=torch.long, device=device),
            position_ids=torch.arange(2, device=device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor([1], device=device),
            **{ATTENTION_KEYWORD: probe},
        )
    kind = model.config.model_type
    if sorted(probe.shapes) != list(range(count)):
        raise ConfigError(
            f"{kind} has {count} layers, and {len(probe.shapes)} of them are attention",
            field="model_type",
            hint="Every layer must keep keys and values, or read those of another.",
        )
    return _known.setdefault(model, [probe.shapes[layer] for layer in range(count)])


_known: WeakKeyDictionary[Any, list[LayerShape]] = WeakKeyDictionary()


class _Probe:
    """An Attention that notes the shapes it is given, and returns zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self._seen: list[tuple[int, torch.Tensor]] = []
        """Layers that keep something, and their keys, which are kept so that no other tensor gets their address."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        if keys.shape != values.shape or queries.shape[0] != keys.shape[0] or queries.shape[2] != keys.shape[2]:
            shapes = ", ".join(str(list(states.shape)) for states in (queries, keys, values))
            raise ConfigError(
                f"layer {layer} has queries, keys and values of unlike shapes: {shapes}", field="model_type"
            )
        owner = next((other for other, known in self._seen if known.data_ptr() == keys.data_ptr()), layer)
        if owner == layer:
            self._seen.append((layer, keys))
        self.shapes[layer] = LayerShape(queries.shape[1], keys.shape[1], keys.shape[2], owner)
        return torch.zeros_like(queries, memory_format=torch.contiguous_format)
