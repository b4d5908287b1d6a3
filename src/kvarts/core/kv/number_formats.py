"""Number formats of weights and of KV: bits per number, and of the scales stored with them."""

from __future__ import annotations

import re
from fractions import Fraction

from kvarts.base.errors import ConfigError

__all__ = ["dtype_bits", "flops_dtype", "has_block_scales", "is_fp8", "kv_bits", "whole_bytes"]

# int4-block: 16 bits of scale and 4 of zero point per 128, as in GPTQ and AWQ. nvfp4: 8 bits of scale per 16.
# mxfp4: 4 bits per number and 8 bits of scale per 32, mxfp8 likewise. fp8 in blocks: 32 bits of scale per 128 by 128.
_BITS = {
    "float32": Fraction(32),
    "bfloat16": Fraction(16),
    "float16": Fraction(16),
    "fp8": Fraction(8),
    "fp8-block": 8 + Fraction(32, 128 * 128),
    "mxfp8": 8 + Fraction(8, 32),
    "int8": Fraction(8),
    "mxfp4": 4 + Fraction(8, 32),
    "nvfp4": 4 + Fraction(8, 16),
    "int4": Fraction(4),
    "int4-block": 4 + Fraction(16 + 4, 128),
}
_OTHER_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float8_e4m3fn": "fp8"}
_OTHER_NAMES |= {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "int8_per_token_head": "int8"}
_GROUPED = re.compile(r"int([2-8])-g([1-9]\d{0,5})")
SCALED_KV = {"int8": 32, "fp8_per_token_head": 32}
"""Formats of KV with a scale per head and token, for keys and for values; bits of the scale."""


def dtype_bits(name: str, *, field: str) -> Fraction:
    """Return the bits per number; `int4-g32` is 4 bits, and 16 of scale per 32. Raise ConfigError for other names."""
    name = _OTHER_NAMES.get(name, name)
    bits = _BITS.get(name)
    if bits is None and (grouped := _GROUPED.fullmatch(name)):
        bits = int(grouped[1]) + Fraction(16, int(grouped[2]))
    if bits is None:
        raise ConfigError(f"{name!r} is not known", field=field, hint=f"Use one of {', '.join(_BITS)}.")
    return bits


def kv_bits(name: str) -> tuple[Fraction, int]:
    """Return the bits per number of KV, and those of the scale of a key, a value or a latent, per token and head.

    int8 has the scales of vLLM's `int8_per_token_head`, which the engine of kvarts stores as well.
    """
    name = _OTHER_NAMES.get(name, name)
    if name == "fp8_per_token_head":
        return Fraction(8), SCALED_KV[name]
    return dtype_bits(name, field="kv_dtype"), SCALED_KV.get(name, 0)


def is_fp8(name: str) -> bool:
    """Return whether KV in this format is 8-bit floating point without scales of its own."""
    return _OTHER_NAMES.get(name, name) == "fp8"


def flops_dtype(name: str) -> str:
    """Return the format in which a device multiplies numbers stored as `name`.

    fp8, int8 and nvfp4 are multiplied natively if the device has units for them; other narrow formats use 16 bits.
    """
    name = _OTHER_NAMES.get(name, name)
    if name in ("fp8-block", "mxfp8"):
        return "fp8"
    return name if name in ("float32", "fp8", "int8", "nvfp4") else "bfloat16"


def has_block_scales(name: str) -> bool:
    """Return whether a native product in this format quantizes its input at run time: one scale per block of numbers.

    A block's scale is known only once its numbers are, so that a kernel of its own computes them before each product
    (vLLM's per_token_group_quant_fp8 and scaled_fp4_quant). fp8 with one static scale per matrix is quantized within
    the kernel before it. Formats that are expanded to 16 bits leave their inputs as they are.
    """
    return name in ("fp8-block", "mxfp8", "nvfp4")


def whole_bytes(bits: Fraction) -> int:
    """Return the number of bytes that hold `bits` bits."""
    return -(-bits.numerator // (8 * bits.denominator))
