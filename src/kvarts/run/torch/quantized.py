"""Linear layers with 8-bit or 4-bit weights: fewer bytes to read per step, and a slightly different model.

Weights are rounded without training; activations are unchanged. `quantize` measures the cost on the model at hand: the
error of its weights, and the change of its next tokens.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch

from kvarts.base.errors import ConfigError
from kvarts.run.torch.attention import is_absorbed

__all__ = ["SCHEMES", "Quantization", "check_scheme", "quantization_of", "quantize"]

SCHEMES = ("int8", "int4")
"""int8 has a scale per row; int4 a scale and an offset per 32 weights of a row."""
GROUP_SIZE = 32
NUM_COLUMNS, NUM_ROWS = 32, 16
"""The kernels require multiples of these: in_features of the first, out_features of the second."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Ranges to try for a group, as shares of the full range: clipping a few weights may cost less than coarse steps."""
ROWS_AT_ONCE = 4096
"""Rows of a matrix rounded at a time, in float32."""
FEW_ROWS = 8
"""Up to this many rows, 8-bit weights are multiplied directly; for more, converting them to 16 bits first pays."""
NUM_SEQUENCES, LENGTH = 4, 64
"""Random tokens for measuring the loss."""


class Quantization(msgspec.Struct, frozen=True):
    """The quantization of a model, and its cost.

    `num_linears` layers were quantized; `num_left` were not, since the kernels do not support their shapes.
    `num_bytes`: size of the quantized weights with their scales; `num_bytes_before`: their size before. `weight_error`:
    root mean square of the weights' errors, relative to that of the weights. Over `num_tokens` random tokens:
    `same_share`, the share of places with the same likeliest next token; `kl_nats`, the mean Kullback-Leibler
    divergence of the next-token distribution from the original model's.
    """

    scheme: str
    num_linears: int
    num_left: int
    num_bytes: int
    num_bytes_before: int
    weight_error: float
    num_tokens: int
    same_share: float
    kl_nats: float

    def __str__(self) -> str:
        left = f", {self.num_left} left as they were" if self.num_left else ""
        return (
            f"{self.num_linears} linear layers in {self.scheme}{left}: {self.num_bytes / 2**20:,.1f} MiB instead of "
            f"{self.num_bytes_before / 2**20:,.1f}, weights off by {self.weight_error:.2%}; after {self.num_tokens} "
            f"random tokens, the likeliest next one is the same at {self.same_share:.1%}, and the divergence is "
            f"{self.kl_nats:.2g} nats"
        )


def quantization_of(model: Any) -> Quantization | None:
    """Return the quantization of a model; None if it is not quantized."""
    return _known.get(model)


def check_scheme(scheme: str | None) -> None:
    """Raise ConfigError for an unknown scheme."""
    if scheme is not None and scheme not in SCHEMES:
        raise ConfigError(f"must be {' or '.join(SCHEMES)}, got {scheme!r}", field="quantization")


def quantize(model: Any, scheme: str) -> Quantization:
    """Replace the linear layers of a model on a CPU by 8-bit or 4-bit ones; return the cost.

    The output head has 8 bits in both schemes. Experts that are not linear layers stay unquantized. Raise ConfigError
    for an unknown scheme, for a model that is not on a CPU, and for one without a layer that can be quantized.
    """
    check_scheme(scheme)
    if model.device.type != "cpu":
        raise ConfigError(f"{scheme} is for models on a CPU", field="quantization", hint="Leave it out.")
    linears = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is torch.nn.Linear and not is_absorbed(module, name)
    ]
    fitting = [place for place in linears if _fits(place[2])]
    if not fitting:
        raise ConfigError(
            f"no linear layer has multiples of {NUM_COLUMNS} inputs and {NUM_ROWS} outputs",
            field="quantization",
            hint="Leave it out.",
        )
    tokens = _random_tokens(model)
    before = _next_logprobs(model, tokens)
    head = model.get_output_embeddings()
    made: dict[torch.nn.Linear, _QuantizedLinear] = {}
    for module, name, linear in fitting:
        if linear not in made:
            made[linear] = (Int8Linear if scheme == "int8" or linear is head else Int4Linear)(linear)
            del linear.weight  # so that the model is never in memory twice
        setattr(module, name, made[linear])
    after = _next_logprobs(model, tokens)
    squares = [(one.error_squares, one.weight_squares) for one in made.values()]
    _known[model] = Quantization(
        scheme=scheme,
        num_linears=len(made),
        num_left=len({linear for _, _, linear in linears}) - len(made),
        num_bytes=sum(one.num_bytes for one in made.values()),
        num_bytes_before=sum(one.num_bytes_before for one in made.values()),
        weight_error=math.sqrt(sum(one for one, _ in squares) / max(sum(of for _, of in squares), 1e-30)),
        num_tokens=tokens.numel(),
        same_share=float((before.argmax(-1) == after.argmax(-1)).float().mean()),
        kl_nats=max(0.0, float((before.exp() * (before - after)).sum(-1).mean())),
    )
    return _known[model]


class _QuantizedLinear(torch.nn.Module):  # type: ignore[misc]  # PyTorch's types are not checked, see pyproject.toml
    """Computes `linear` with rounded weights. Holds its weights in a separate tensor.

    `num_bytes`: size of its weights; `num_bytes_before`: size of those of `linear`. `error_squares` and
    `weight_squares`: sums over all weights.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.error_squares = self.weight_squares = 0.0
        weight = linear.weight.detach()
        parts = []
        for rows in weight.split(ROWS_AT_ONCE):
            error_squares, *rounded = self._rounded(rows.float(), weight.dtype)
            self.error_squares += float(error_squares)
            self.weight_squares += float(rows.float().square().sum())
            parts.append(rounded)
        self._weight, self._scales = self._laid_out(*map(torch.cat, zip(*parts, strict=True)))
        self.num_bytes = self._weight.nbytes + self._scales.nbytes
        self.num_bytes_before = weight.nbytes

    def _rounded(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the sum of squared errors, and the stored tensors, row by row."""
        raise NotImplementedError

    def _laid_out(self, *kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and scales of all rows in the kernel's layout."""
        raise NotImplementedError

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out_features] for `inputs` [..., in_features]."""
        outputs = self._product(inputs.reshape(-1, self.in_features).contiguous())
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.view(*inputs.shape[:-1], self.out_features)


class Int8Linear(_QuantizedLinear):
    """8-bit weights with a scale per row."""

    def _rounded(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        # Weights are rounded with the stored scale, which is not 0 even for a row of zeros.
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        steps = scales.float()[:, None]
        numbers = (weight / steps).round().clamp(-127, 127)
        return (numbers * steps - weight).square().sum(), numbers.to(torch.int8), scales

    def _laid_out(self, *kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = kept
        return numbers, scales

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) <= FEW_ROWS:
            outputs: torch.Tensor = torch.ops.aten._weight_int8pack_mm(rows, self._weight, self._scales)
            return outputs
        return torch.nn.functional.linear(rows, self._weight.to(rows.dtype)) * self._scales


class Int4Linear(_QuantizedLinear):
    """4-bit weights with a scale and an offset per 32 weights of a row."""

    def _rounded(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        groups = weight.reshape(len(weight), -1, GROUP_SIZE)
        best, *others = (_rounded_to_4_bits(groups, shrink, dtype) for shrink in SHRINKS)
        for tried in others:
            is_better = tried[0] < best[0]
            best = tuple(torch.where(_like(is_better, a), a, b) for a, b in zip(tried, best, strict=True))
        error_squares, numbers, scales, offsets = best
        return error_squares.sum(), numbers.to(torch.uint8), torch.stack([scales, offsets], -1).to(dtype)

    def _laid_out(self, *kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = kept
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.flatten(1).to(torch.int32), 1)
        return packed, scales.transpose(0, 1).contiguous()

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._weight, GROUP_SIZE, self._scales)
        return outputs


def _rounded_to_4_bits(groups: torch.Tensor, shrink: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return per group [rows, groups] its squared error, numbers from 0 to 15, scale and offset.

    A weight is (number - 8) x scale + offset, with both rounded to `dtype`.
    """
    least_of, most_of = groups.amin(2), groups.amax(2)
    middle, half = (least_of + most_of) / 2, (most_of - least_of) / 2 * shrink
    scales = (half * 2 / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype).float()
    offsets = (middle + scales / 2).to(dtype).float()
    numbers = ((groups - offsets[..., None]) / scales[..., None] + 8).round().clamp(0, 15)
    rounded = (numbers - 8) * scales[..., None] + offsets[..., None]
    return (rounded - groups).square().sum(2), numbers, scales, offsets


def _like(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return flags[..., None] if tensor.dim() > flags.dim() else flags


def _fits(linear: torch.nn.Linear) -> bool:
    return bool(linear.in_features % NUM_COLUMNS == 0 and linear.out_features % NUM_ROWS == 0)


def _random_tokens(model: Any) -> torch.Tensor:
    text = model.config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    length = min(LENGTH, most) if isinstance(most, int) and most > 0 else LENGTH
    return torch.randint(text.vocab_size, (NUM_SEQUENCES, length), generator=torch.Generator().manual_seed(11))


def _next_logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.log_softmax(logits.float(), -1)


_known: WeakKeyDictionary[Any, Quantization] = WeakKeyDictionary()
