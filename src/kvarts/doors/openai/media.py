"""Images and audio in messages to a mock: as many tokens as models of a family count, and words that depend on content.

A medium becomes words, so that the same image in a later turn is hit in the cache. Sizes are read from the head of the
data; nothing is decoded, and nothing is fetched: an image behind a URL counts as UNKNOWN_PIXELS square.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode
from binascii import Error
from collections.abc import Mapping
from hashlib import sha256
from math import ceil
from struct import unpack_from
from typing import Any

from kvarts.base.limits import brief
from kvarts.base.media import FAMILIES, UNKNOWN_PIXELS, MediaFamily, family_of, size_of
from kvarts.doors.openai.errors import ApiError, too_long
from kvarts.doors.openai.words import WORDS

__all__ = ["FAMILIES", "Media", "MediaFamily", "audio_seconds", "family_of", "image_size"]

MAX_AUDIO_S = 24 * 3600.0
_DATA = re.compile(r"data:[\w.+/;=-]*?;base64,")
_MPEG_KBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
"""Rates of MPEG-1 layer III, by the index in the header of a frame."""
_MPEG2_KBITS = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


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
    size = size_of(data)
    if size is None:
        raise ApiError(400, "the data is no PNG, JPEG, GIF or WebP with a size", param=where)
    return size


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
