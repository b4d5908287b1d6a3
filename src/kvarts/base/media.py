"""Tokens that models of a family count for images and audio; and the sizes of images, from the head of their data."""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import ceil, floor, sqrt
from struct import unpack_from

import msgspec

__all__ = ["FAMILIES", "MAX_PIXELS_PER_SIDE", "UNKNOWN_PIXELS", "MediaFamily", "family_of", "size_of"]

UNKNOWN_PIXELS = 1024
"""Width and height of an image of unknown size, such as behind a URL: nothing is fetched."""
MAX_PIXELS_PER_SIDE = 1 << 20


class MediaFamily(msgspec.Struct, frozen=True):
    """How models count media. `image`: tokens for a width, a height and a detail. `audio_per_s`: tokens per second."""

    image: Callable[[int, int, str], int]
    audio_per_s: float


def _by_tiles(width: int, height: int, detail: str) -> int:
    """Return the tokens of GPT-4o: 85, and 170 per tile of 512 pixels after scaling; 85 for low detail."""
    if detail == "low":
        return 85
    scale = min(1.0, 2048 / max(width, height))
    scale = min(scale, 768 / min(width, height))
    return 85 + 170 * max(1, ceil(width * scale / 512)) * max(1, ceil(height * scale / 512))


def _by_patches(width: int, height: int, detail: str) -> int:
    """Return the tokens of Qwen2-VL and Qwen2.5-VL: one per 28 x 28 pixels after resizing to multiples of 28, within 4
    and 16,384 tokens, and two that enclose them.
    """
    factor, least, most = 28, 4, 16_384
    wide, high = (max(factor, round(side / factor) * factor) for side in (width, height))
    if wide * high > most * factor**2:
        scale = sqrt(width * height / (most * factor**2))
        wide, high = (max(factor, floor(side / scale / factor) * factor) for side in (width, height))
    elif wide * high < least * factor**2:
        scale = sqrt(least * factor**2 / (width * height))
        wide, high = (ceil(side * scale / factor) * factor for side in (width, height))
    return wide * high // factor**2 + 2


def _by_area(width: int, height: int, detail: str) -> int:
    """Return the tokens of Claude: width x height / 750 after scaling to 1,568 pixels and about 1,600 tokens."""
    scale = min(1.0, 1568 / max(width, height))
    return max(1, min(1600, ceil(width * scale * height * scale / 750)))


def _always_256(width: int, height: int, detail: str) -> int:
    """Return the tokens of Gemma 3: 256, and two that enclose them, for any image."""
    return 258


FAMILIES = {
    "openai": MediaFamily(_by_tiles, 10.0),
    "qwen": MediaFamily(_by_patches, 25.0),
    "gemma": MediaFamily(_always_256, 6.25),
    "claude": MediaFamily(_by_area, 10.0),
}
"""Sources of the formulas. Images: OpenAI's guide on vision (GPT-4o), `smart_resize` of Qwen2-VL and
`mm_tokens_per_image` of Gemma 3 in transformers, Anthropic's guide on vision. Audio: OpenAI's guide on Realtime costs
(a token per 100 ms of input), the report on Qwen2-Audio (40 ms per frame), the guide of Gemma 3n (160 ms). Claude's
models take no audio: it is counted as OpenAI's.
"""


def family_of(model: str) -> str:
    """Return the family that a model's name begins with, else OpenAI's."""
    bare = model.rsplit("/", 1)[-1].lower()
    return next((family for family in FAMILIES if bare.startswith(family)), "openai")


def size_of(data: bytes) -> tuple[int, int] | None:
    """Return the width and height of a PNG, GIF, WebP or JPEG; None for other data."""
    try:
        size = _size_of(data)
    except (struct.error, IndexError):
        return None
    return size if size is not None and all(0 < side <= MAX_PIXELS_PER_SIDE for side in size) else None


def _size_of(data: bytes) -> tuple[int, int] | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = unpack_from(">II", data, 16)
        return width, height
    if data.startswith((b"GIF87a", b"GIF89a")):
        width, height = unpack_from("<HH", data, 6)
        return width, height
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp_size(data)
    if data.startswith(b"\xff\xd8"):
        return _jpeg_size(data)
    return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return the size in the first frame header; segments before it are skipped by their lengths."""
    place = 2
    while place + 9 <= len(data):
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
            continue
        (length,) = unpack_from(">H", data, place + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = unpack_from(">HH", data, place + 5)
            return width, height
        place += 2 + max(2, length)
    return None
