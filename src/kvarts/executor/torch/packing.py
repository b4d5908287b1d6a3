"""Linear layers with weights laid out once for oneDNN, instead of in every call."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PackedLinear", "pack_linears"]


class PackedLinear(torch.nn.Module):  # type: ignore[misc]  # its types are not read, see pyproject.toml
    """What `linear` computes, on a CPU in bfloat16. Keeps a weight of its own."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out_features] for `inputs` [..., in_features]."""
        flat = inputs.reshape(-1, self.in_features)
        outputs = torch.ops.mkldnn._linear_pointwise(flat, self._weight, self.bias, "none", [], "")
        return outputs.view(*inputs.shape[:-1], self.out_features)


def pack_linears(model: Any) -> int:
    """Replace the linear layers of a model on a CPU in bfloat16, where that can be done; return how many."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return 0
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(module, name, PackedLinear(child))
                count += 1
    return count
