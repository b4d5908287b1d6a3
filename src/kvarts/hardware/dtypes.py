"""Number formats, and the bits per number in each."""

from __future__ import annotations

from fractions import Fraction

from kvarts.errors import ConfigError

__all__ = ["dtype_bits", "flops_dtype", "has_block_scales"]

# int4-block: 16 bits of scale and 4 of zero point per 128, as in GPTQ and AWQ. nvfp4: 8 bits of scale per 16.
# mxfp4: 4 bits per number and 8 bits of scale per 32. fp8 in blocks: 32 bits of scale per 128 by 128.
_BITS = {
    "float32": Fraction(32),
    "bfloat16": Fraction(16),
    "float16": Fraction(16),
    "fp8": Fraction(8),
    "fp8-block": 8 + Fraction(32, 128 * 128),
    "int8": Fraction(8),
    "mxfp4": 4 + Fraction(8, 32),
    "nvfp4": 4 + Fraction(8, 16),
    "int4": Fraction(4),
    "int4-block": 4 + Fraction(16 + 4, 128),
}
_OTHER_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float8_e4m3fn": "fp8"}


def dtype_bits(name: str, *, field: str) -> Fraction:
    """Return the bits per number. Raise ConfigError, with `field`, for an unknown format."""
    name = _OTHER_NAMES.get(name, name)
    bits = _BITS.get(name)
    if bits is None:
        raise ConfigError(f"{name!r} is not known", field=field, hint=f"Use one of {', '.join(_BITS)}.")
    return bits


def flops_dtype(name: str) -> str:
    """Return the format in which a device multiplies numbers stored as `name`.

    fp8, int8 and nvfp4 are multiplied natively if the device has units for them; other narrow formats use 16 bits.
    """
    name = _OTHER_NAMES.get(name, name)
    if name == "fp8-block":
        return "fp8"
    return name if name in ("float32", "fp8", "int8", "nvfp4") else "bfloat16"


def has_block_scales(name: str) -> bool:
    """Return whether a native product in this format quantizes its input at run time: one scale per block of numbers.

    A block's scale is known only once its numbers are, so that a kernel of its own computes them before each product
    (vLLM's per_token_group_quant_fp8 and scaled_fp4_quant). fp8 with one static scale per matrix is quantized within
    the kernel before it. Formats that are expanded to 16 bits leave their inputs as they are.
    """
    return name in ("fp8-block", "nvfp4")
