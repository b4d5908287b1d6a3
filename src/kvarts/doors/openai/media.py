"""Images and audio in messages to a mock: as many tokens as models of a family count, and words that depend on content.

A medium becomes words, so that the same image in a later turn is hit in the cache. Sizes are read from the head of the
data; nothing is decoded, and nothing is fetched: an image behind a URL counts as UNKNOWN_PIXELS square.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode
from binascii import Error
from collections.abc import Callable, Mapping
from hashlib import sha256
from math import ceil, floor, sqrt
from struct import unpack_from
from typing import Any

import msgspec

from kvarts.base.limits import brief
from kvarts.doors.openai.errors import ApiError, too_long
from kvarts.doors.openai.words import WORDS

__all__ = ["FAMILIES", "Media", "MediaFamily", "audio_seconds", "family_of", "image_size"]

UNKNOWN_PIXELS = 1024
MAX_PIXELS_PER_SIDE = 1 << 20
MAX_AUDIO_S = 24 * 3600.0
_DATA = re.compile(r"data:[\w.+/;=-]*?;base64,")
_MPEG_KBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
"""Rates of MPEG-1 layer III, by the index in the header of a frame."""
_MPEG2_KBITS = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


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


class Media:
    """The media of one request. `most`: tokens of all of them. For one thread."""

    def __init__(self, family: MediaFamily, most: int) -> None:
        self._family = family
        self._most = most
        self._num_tokens = 0

    def text_of(self, part: Mapping[str, Any], where: str) -> str | None:
        """Return the words for a part of a message; None if the part is neither an image nor audio. Raise ApiError."""
        kind = part.get("type")
        if kind in ("image_url", "input_image", "image"):
            url, detail, at = _image_of(part, where)
            payload = _data_of(url, at)
            width, height = (UNKNOWN_PIXELS, UNKNOWN_PIXELS) if payload is None else image_size(payload, at)
            return self._words(url, self._family.image(width, height, detail), at)
        if kind in ("input_audio", "audio_url"):
            at = f"{where}.{kind}"
            given = part.get(kind)
            payload = None
            if isinstance(given, dict):
                text = given.get("data") if kind == "input_audio" else given.get("url")
                payload = _data_of(f"data:audio;base64,{text}" if kind == "input_audio" else text, at)
            if payload is None:
                raise ApiError(400, "audio is base64, or a data URL: a mock fetches nothing", param=at)
            seconds = audio_seconds(payload, at)
            return self._words(str(text), max(1, ceil(seconds * self._family.audio_per_s)), at)
        return None

    def _words(self, content: str, count: int, where: str) -> str:
        self._num_tokens += count
        if self._num_tokens > self._most:
            raise too_long(self._most, None, 0, param=where)
        digest = sha256(content.encode(errors="surrogatepass")).digest()
        step = 1 + int.from_bytes(digest[:4], "little") % (len(WORDS) - 1)
        place = int.from_bytes(digest[4:8], "little")
        numbers = (place + step * number + digest[number % 32] for number in range(count))
        return "".join(f" {WORDS[number % len(WORDS)]}" for number in numbers)


def _image_of(part: Mapping[str, Any], where: str) -> tuple[str, str, str]:
    """Return the URL, the detail and the field of an image in the form of any API."""
    source, at = part.get("image_url"), f"{where}.image_url"
    detail = str(part.get("detail") or "auto")
    if part.get("type") == "image":
        source, at = part.get("source"), f"{where}.source"
        if isinstance(source, dict) and source.get("type") == "base64":
            source = {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}
    if isinstance(source, dict):
        detail = str(source.get("detail") or detail)
        source = source.get("url")
    if not isinstance(source, str) or not source.startswith(("data:", "http://", "https://")):
        raise ApiError(400, f"is neither a data URL nor a URL of HTTP: {brief(source)}", param=at)
    return source, detail, at


def _data_of(url: Any, where: str) -> bytes | None:
    """Return the data of a data URL; None for another URL. Raise ApiError for invalid base64."""
    if not isinstance(url, str) or not url.startswith("data:"):
        return None
    match = _DATA.match(url)
    try:
        if match is None:
            raise ValueError("it is not base64")
        return b64decode(url[match.end() :], validate=True)
    except (Error, ValueError) as error:
        raise ApiError(400, f"the data cannot be read: {error}", param=where) from error


def image_size(data: bytes, where: str) -> tuple[int, int]:
    """Return the width and height of a PNG, GIF, WebP or JPEG. Raise ApiError for other data."""
    try:
        size = _size_of(data)
    except (struct.error, IndexError):
        size = None
    if size is None or not all(0 < side <= MAX_PIXELS_PER_SIDE for side in size):
        raise ApiError(400, "the data is no PNG, JPEG, GIF or WebP with a size", param=where)
    return size


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


def audio_seconds(data: bytes, where: str) -> float:
    """Return the duration of a WAV or, by its first frame's rate, of an MP3. Raise ApiError for other data."""
    try:
        seconds = _wav_seconds(data) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else _mp3_seconds(data)
    except (struct.error, IndexError, ZeroDivisionError):
        seconds = None
    if seconds is None or not 0 <= seconds <= MAX_AUDIO_S:
        raise ApiError(400, "the data is no WAV or MP3 with a duration", param=where)
    return seconds


def _wav_seconds(data: bytes) -> float | None:
    place, bytes_per_s = 12, 0
    while place + 8 <= len(data):
        kind, (length,) = data[place : place + 4], unpack_from("<I", data, place + 4)
        if kind == b"fmt ":
            (bytes_per_s,) = unpack_from("<I", data, place + 16)
        elif kind == b"data":  # a recorder that streams writes no length, or the largest
            return float(min(length, len(data) - place - 8) / bytes_per_s)
        place += 8 + length + length % 2
    return None


def _mp3_seconds(data: bytes) -> float | None:
    place = 0
    if data[:3] == b"ID3":
        sizes = data[6:10]
        place = 10 + (sizes[0] << 21 | sizes[1] << 14 | sizes[2] << 7 | sizes[3])
    if data[place] != 0xFF or data[place + 1] & 0xE6 != 0xE2:
        return None
    rates = _MPEG_KBITS if data[place + 1] & 0x18 == 0x18 else _MPEG2_KBITS
    return 8e-3 * (len(data) - place) / rates[data[place + 2] >> 4]
