"""Linear layers with weights that are laid out for oneDNN once instead of in every call, and merged if they share an
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kvarts.run.torch.attention import is_absorbed

__all__ = ["PackedLinear", "PackedPart", "is_packed", "pack_linears", "pack_together", "products"]


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # PyTorch's types are not checked, see pyproject.toml
    """A linear layer with `weight` [out_features, in_features], on a CPU in bfloat16. Holds a copy of the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out_features] for `inputs` [..., in_features]."""
        flat = inputs.reshape(-1, self.in_features)
        outputs = torch.ops.mkldnn._linear_pointwise(flat, self._weight, self.bias, "none", [], "")
        return outputs.view(*inputs.shape[:-1], self.out_features)

    def weight(self) -> torch.Tensor:
        """Return the weight in its original layout, [out_features, in_features]."""
        dense: torch.Tensor = self._weight.to_dense()
        return dense


class PackedPart(torch.nn.Module):  # type: ignore[misc]
    """Some outputs of a PackedLinear that merges several linear layers of one input.

    Called alone it returns its outputs but also computes the others'; `products` computes all in one call.
    """

    def __init__(self, whole: PackedLinear, first: int, last: int, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, last - first
        self.bias = bias
        self._whole = [whole]  # no child: a model names each of its modules once
        self._outputs = slice(first, last)

    @property
    def whole(self) -> PackedLinear:
        """The merged layer."""
        return self._whole[0]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out_features] for `inputs` [..., in_features]."""
        return self.of_whole(self.whole(inputs)).contiguous()

    def of_whole(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return its part of the merged layer's outputs."""
        return outputs[..., self._outputs]


def products(matrices: Sequence[Any], rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the products of `rows` [rows, in_features] and each matrix, [rows, out_features].

    Elements of a row are contiguous, rows need not be: merged matrices are multiplied in one call.
    """
    if isinstance(matrices[0], PackedPart):
        outputs = matrices[0].whole(rows)
        return [matrix.of_whole(outputs) for matrix in matrices]
    return [matrix(rows).contiguous() for matrix in matrices]


def pack_together(module: Any, names: Sequence[str]) -> None:
    """Merge the layers `names` of `module` into one PackedLinear if all are packed; `module` keeps them as parts."""
    linears = [getattr(module, name) for name in names]
    if not all(type(linear) is PackedLinear for linear in linears):
        return
    biases = [linear.bias for linear in linears]
    bias = None
    if any(one is not None for one in biases):
        like = next(one for one in biases if one is not None)
        bias = torch.cat(
            [like.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        )
    whole = PackedLinear(torch.cat([linear.weight() for linear in linears]), bias)
    ends = list(accumulate(linear.out_features for linear in linears))
    for name, linear, end in zip(names, linears, ends, strict=True):
        setattr(module, name, PackedPart(whole, end - linear.out_features, end, linear.bias))


def is_packed(dtype: torch.dtype) -> bool:
    """Return whether `pack_linears` packs the linear layers of a model in `dtype` on a CPU."""
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: Any) -> int:
    """Replace the linear layers of a bfloat16 model on a CPU, if oneDNN supports it; return how many."""
    if model.device.type != "cpu" or not is_packed(model.dtype):
        return 0
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if is_absorbed(module, name):
                continue
            if type(child) is torch.nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(module, name, PackedLinear(child.weight, child.bias))
                count += 1
    return count
