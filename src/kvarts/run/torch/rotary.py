"""The rotation that a model applies to queries and keys, for keys that are stored before rotation."""

from __future__ import annotations

import sys
from inspect import signature
from typing import Any

import torch

from kvarts.base.errors import ConfigError
from kvarts.run.torch.attention import AttentionCall, Rotate, attending
from kvarts.run.torch.probe import examine

__all__ = ["ModelRotary", "TorchRotation"]

PROBED_POSITIONS = (3, 11)


class TorchRotation:
    """Rotation of queries and keys in attention, instead of before it. `rotate` is None until it is enabled."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rotate: Rotate | None = None

    def enable(self) -> None:
        """Find the rotation of the model, and check it against the model."""
        if self.rotate is None:
            rotary = ModelRotary(self._model)
            rotary.check()
            self.rotate = rotary.rotate


class ModelRotary:
    """Applies the rotation of `model` to queries and keys rotated at position 0.

    Raises ConfigError if no rotation is found in the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        decoder = model.get_decoder()
        self._embedding: Any = getattr(decoder, "rotary_emb", None)
        layers = getattr(decoder, "layers", ())
        modules = [getattr(layer, "self_attn", None) for layer in layers]
        self._apply: list[Any] = [
            getattr(sys.modules.get(type(module).__module__), "apply_rotary_pos_emb", None) for module in modules
        ]
        if self._embedding is None or not self._apply or None in self._apply:
            raise _no_rotation(model, "its layers have no rotary embedding that is known")
        facts = examine(model)
        if len(facts.layers) != len(modules):
            raise _no_rotation(model, f"its {len(modules)} layers attend {len(facts.layers)} times")
        if any(layer.is_latent for layer in facts.layers):
            raise _no_rotation(model, "its layers keep latents, which contain rotated keys")
        if facts.switch is not None:
            raise _no_rotation(model, "its rotation depends on how long a sequence is")
        has_types = "layer_type" in signature(self._embedding.forward).parameters
        types = model.config.get_text_config(decoder=True).layer_types if has_types else [None] * len(modules)
        self._types: list[str | None] = list(types)
        self._tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def rotate(self, layer: int, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return `states` [tokens, heads, head_dim] as the layer rotates them at `positions` [tokens]."""
        cos, sin = (table[positions] for table in self._table(self._types[layer], int(positions.max()) + 1, states))
        # The transformers functions take [sequences, heads, tokens, head_dim], and queries and keys together.
        packed = states.transpose(0, 1)[None]
        rotated: torch.Tensor = self._apply[layer](packed, packed[:, :1], cos[None], sin[None])[0]
        return rotated[0].transpose(0, 1)

    def check(self) -> None:
        """Compare with the model, layer by layer. Raise ConfigError if it rotates differently."""
        plain, rotated = _Keys(), _Keys()
        device = self._model.device
        for keys, positions in ((plain, (0, 0)), (rotated, PROBED_POSITIONS)):
            with torch.inference_mode(), attending(keys):
                self._model(
                    input_ids=torch.zeros((1, 2), dtype=torch.long, device=device),
                    position_ids=torch.tensor([positions], device=device),
                    use_cache=False,
                )
        where = torch.tensor(PROBED_POSITIONS, device=device)
        tolerance = 1e-4 if self._model.dtype == torch.float32 else 3e-2
        with torch.inference_mode():
            for layer, keys in plain.of_layer.items():
                mine = self.rotate(layer, keys, where)
                scale = float(keys.float().abs().max())
                if float((mine - rotated.of_layer[layer]).float().abs().max()) > tolerance * max(scale, 1e-6):
                    raise _no_rotation(self._model, f"layer {layer} rotates keys in a way that is not known")

    def _table(self, kind: str | None, count: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [positions, rotated elements] of at least `count` positions."""
        known = self._tables.get(kind)
        if known is None or len(known[0]) < count:
            positions = torch.arange(max(count, 2 * len(known[0]) if known else 256), device=states.device)[None]
            arguments = (states, positions) if kind is None else (states, positions, kind)
            cos, sin = (table[0] for table in self._embedding(*arguments))
            # Some rotations also scale; inputs rotated at position 0 are scaled already.
            known = self._tables[kind] = cos / cos[0], sin / cos[0]
        return known


class _Keys:
    """An Attention that records the keys of each layer, and returns zeros."""

    keeps_latents = False

    def __init__(self) -> None:
        self.of_layer: dict[int, torch.Tensor] = {}

    def called(self, call: AttentionCall) -> torch.Tensor:
        """Record the keys."""
        self.of_layer[call.number] = call.key[0].transpose(0, 1).clone()
        _, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_zeros(num_tokens, num_heads, call.value.shape[-1])

    def mask(self, **_: Any) -> None:
        """Return no mask."""


def _no_rotation(model: Any, why: str) -> ConfigError:
    return ConfigError(
        f"'cache' cannot be had with a model of type {model.config.model_type}: {why}",
        field="positions",
        hint="Leave it to 'global'.",
    )
