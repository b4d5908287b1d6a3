"""Attention to latents (MLA) as they are, without expanding them to keys and values of every head.

A model of transformers with latents expands them in `expand_kv` of its attention modules, right before it asks for
attention. With an Attention that keeps latents, `expand_kv` returns the latents instead, and what the expansion would
do to keys and values is done to queries and outputs: score and sum are linear in both, so that the results are the
same, except for rounding (DeepSeek-V2, section 2.1.3; the matrices are "absorbed").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

__all__ = ["LatentShape", "find_latent", "is_absorbed", "keep_latents"]

SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


class LatentShape(msgspec.Struct, frozen=True):
    """Sizes of a layer's attention to latents, in elements: of the parts of a head's key that come from the latent and
    from the rotation, of a head's value, and of the latent.
    """

    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int

    @property
    def head_dim(self) -> int:
        """The elements that are kept of a token: its latent, and the rotated part of its keys, which heads share."""
        return self.rank + self.rope_dim

    def absorbed(self, module: Any, queries: torch.Tensor) -> torch.Tensor:
        """Return `queries` [tokens, heads, nope_dim + rope_dim] for latents, [tokens, heads, rank + rope_dim]."""
        keys, _ = self._matrices(module)
        nope, rotated = queries.split([self.nope_dim, self.rope_dim], dim=-1)
        return torch.cat((torch.einsum("thn,hnr->thr", nope, keys), rotated), dim=-1)

    def expanded(self, module: Any, attended: torch.Tensor) -> torch.Tensor:
        """Return the sums of values [tokens, heads, value_dim] that `attended` [tokens, heads, rank + rope_dim] are."""
        _, values = self._matrices(module)
        return torch.einsum("thr,hvr->thv", attended[..., : self.rank], values)

    def is_that_of(self, module: Any) -> bool:
        """Return whether `expand_kv` of `module` multiplies latents with these matrices, tested on random latents."""
        keys_of, values_of = self._matrices(module)
        weight, generator = module.kv_b_proj.weight, torch.Generator().manual_seed(0)
        latents, rotated = (
            torch.randn(1, 1, 5, size, generator=generator).to(weight) for size in (self.rank, self.rope_dim)
        )
        try:
            keys, values = (states[0] for states in type(module).expand_kv(module, latents, rotated))
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return False
        expected = torch.einsum("tr,hnr->htn", latents[0, 0].float(), keys_of.float())
        shared = rotated[0].float().expand(len(expected), -1, -1)
        pairs = (
            (keys, torch.cat((expected, shared), dim=-1)),
            (values, torch.einsum("tr,hvr->htv", latents[0, 0].float(), values_of.float())),
        )
        most = 1e-4 if weight.dtype == torch.float32 else 0.02
        return all(
            mine.shape == theirs.shape and bool((mine.float() - theirs).abs().max() <= most * theirs.abs().max())
            for mine, theirs in pairs
        )

    def _matrices(self, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of keys and values, [heads, nope_dim or value_dim, rank]."""
        weight = module.kv_b_proj.weight.view(-1, self.nope_dim + self.value_dim, self.rank)
        keys, values = weight.split([self.nope_dim, self.value_dim], dim=1)
        return keys, values


def find_latent(module: Any) -> LatentShape | None:
    """Return the sizes of an attention module that expands latents; None for any other."""
    projection = getattr(module, "kv_b_proj", None)
    sizes = [size for name in SIZES if isinstance(size := getattr(module, name, None), int)]
    if not callable(getattr(module, "expand_kv", None)) or len(sizes) < len(SIZES):
        return None
    nope, rope, value, rank = sizes
    weight = getattr(projection, "weight", None)
    if weight is None or getattr(projection, "bias", None) is not None or weight.dim() != 2:
        return None
    if type(projection) is not torch.nn.Linear or weight.shape[1] != rank or weight.shape[0] % (nope + value):
        return None
    return LatentShape(nope, rope, value, rank)


def is_absorbed(module: Any, name: str) -> bool:
    """Return whether the layer `name` of `module` is the matrix that expands latents, which must remain readable."""
    return name == "kv_b_proj" and find_latent(module) is not None


def keep_latents(model: Any, takes_latents: Callable[[], bool]) -> None:
    """Have the attention modules of `model` return latents from `expand_kv` while `takes_latents` returns True."""
    for module in model.modules():
        if "expand_kv" not in vars(module) and find_latent(module) is not None:
            module.expand_kv = partial(_latents_or_expanded, module, type(module).expand_kv, takes_latents)


def _latents_or_expanded(
    module: Any, own: Any, takes_latents: Callable[[], bool], latents: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all heads, or of one: the latents with the rotated part, and the latents."""
    if not takes_latents():
        expanded: tuple[torch.Tensor, torch.Tensor] = own(module, latents, rotated)
        return expanded
    kept = torch.cat((latents, rotated), dim=-1)
    return kept, kept
