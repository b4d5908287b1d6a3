"""Images and audio to a mock: tokens by the formulas of families, the same for the same content."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarts.doors.openai.errors import ApiError
from kvarts.doors.openai.media import FAMILIES, Media, audio_seconds, family_of, image_size
from kvarts.doors.openai.prompts import WordText
from kvarts.doors.openai.running import RunningServer

from builders.http_client import call

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def png(width: int, height: int, text: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)) + text


def jpeg(width: int, height: int) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", 3002) + bytes(3000)
    table = b"\xff\xc4" + struct.pack(">H", 5) + bytes(3)
    return b"\xff\xd8" + exif + b"\xff" + table + b"\xff\xc2" + struct.pack(">HBHH", 11, 8, height, width) + bytes(9)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(3)


def webps(width: int, height: int) -> list[bytes]:
    lossy = b"VP8 " + bytes(10) + struct.pack("<HH", width | 0x4000, height)
    bits = struct.pack("<I", (width - 1) | (height - 1) << 14)
    extended = b"VP8X" + bytes(8) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return [b"RIFF\0\0\0\0WEBP" + each for each in (lossy, b"VP8L" + bytes(5) + bits, extended)]


def wav(seconds: float, rate: int = 8000, length: int | None = None) -> bytes:
    data = bytes(round(seconds * rate * 2))
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    head = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", 16) + form + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    return head + b"data" + struct.pack("<I", len(data) if length is None else length) + data


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


@given(width=st.integers(1, 16_000), height=st.integers(1, 16_000))
def test_sizes_are_read_from_every_format(width: int, height: int) -> None:
    for data in (png(width, height), jpeg(width, height), gif(width, height), *webps(width, height)):
        assert image_size(data, "x") == (width, height)


@given(
    st.binary(max_size=60), st.sampled_from([b"", b"\xff\xd8", b"RIFF0000WEBPVP8 ", b"RIFF0000WAVE", b"ID3", b"GIF89a"])
)
def test_any_bytes_are_read_or_refused(data: bytes, head: bytes) -> None:
    for read in (image_size, audio_seconds):
        with suppress(ApiError):
            read(head + data, "field")


# By the pages that FAMILIES names: examples of OpenAI and Anthropic, and what the processors of transformers give.
@pytest.mark.parametrize(
    ("family", "size", "detail", "tokens"),
    [
        ("openai", (1024, 1024), "high", 765),
        ("openai", (2048, 4096), "auto", 1105),
        ("openai", (4096, 8192), "low", 85),
        ("claude", (200, 200), "auto", 54),
        ("claude", (1000, 1000), "auto", 1334),
        ("claude", (1092, 1092), "auto", 1590),
        ("claude", (4000, 3000), "auto", 1600),
        ("gemma", (10, 5000), "auto", 258),
        ("qwen", (28, 28), "auto", 6),
        ("qwen", (1036, 1036), "auto", 1371),
        ("qwen", (8204, 1092), "auto", 11_429),
    ],
)
def test_images_count_as_their_makers_say(family: str, size: tuple[int, int], detail: str, tokens: int) -> None:
    assert FAMILIES[family].image(*size, detail) == tokens


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
def test_images_of_qwen_count_as_transformers_does(width: int, height: int) -> None:
    module = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
        reason="needs transformers and Pillow",
        exc_type=ImportError,
    )
    if max(width, height) > 200 * min(width, height):
        return  # refused there
    high, wide = module.smart_resize(height, width, 28, 56 * 56, 16_384 * 28 * 28)
    assert FAMILIES["qwen"].image(width, height, "auto") == high * wide // 28**2 + 2


def test_audio_counts_by_its_duration() -> None:
    assert audio_seconds(wav(3.5), "x") == audio_seconds(wav(3.5, 44_100, length=0xFFFFFFFF), "x") == 3.5
    tagged = b"ID3\4\0\0" + bytes([0, 0, 1, 2]) + bytes(130)
    for tag in (b"", tagged):
        assert audio_seconds(tag + b"\xff\xfb\x90\x00" + bytes(15_996), "x") == pytest.approx(1.0)  # 128 kbit/s
    for data in (b"", b"\xff\xfb\xf0\x00", b"\xff\xfb\x00\x00", b"OggS"):
        with pytest.raises(ApiError, match="WAV or MP3"):
            audio_seconds(data, "x")


@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 3000), st.integers(1, 3000))
def test_words_are_as_many_tokens_as_the_formula_says(family: str, width: int, height: int) -> None:
    part = {"type": "image_url", "image_url": {"url": url(png(width, height))}}
    text = Media(FAMILIES[family], 1 << 20).text_of(part, "x")
    assert text is not None
    assert len(WordText().encode(f"a{text}", most=1 << 20)) == 1 + FAMILIES[family].image(width, height, "auto")


def test_families_are_found_by_names() -> None:
    names = ["Qwen/Qwen2.5-VL-7B", "gemma-3-27b", "claude-opus", "gpt-5", "mock"]
    assert [family_of(name) for name in names] == ["qwen", "gemma", "claude", "openai", "openai"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(pages=4096, media="gemma", answers=[{"message": "*look*", "text": "seen"}]) as running:
        yield running
        running.assert_conserved()


def prompt_tokens(server: RunningServer, path: str, content: list[Any]) -> int:
    field = "input" if path == RESPONSES else "messages"
    body: dict[str, Any] = {field: [{"role": "user", "content": content}], "max_tokens": 4, "max_output_tokens": 4}
    reply = call(server.url, path, body)
    assert reply.status == 200, reply.payload
    usage = reply.json["usage"]
    return int(usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def test_every_api_takes_images_and_chats_take_audio(server: RunningServer) -> None:
    image = url(png(800, 600, b"one"))
    data = image.partition(",")[2]
    for path, part in (
        (CHAT, {"type": "image_url", "image_url": {"url": image, "detail": "low"}}),
        (RESPONSES, {"type": "input_image", "image_url": image}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}),
        (MESSAGES, {"type": "image", "source": {"type": "url", "url": "https://elsewhere.example/a.png"}}),
    ):
        text = {"type": "input_text" if path == RESPONSES else "text", "text": "Please look."}
        once = prompt_tokens(server, path, [text, part])
        assert once > 258 and prompt_tokens(server, path, [text, part, part]) - once == 258
    audio = {"type": "input_audio", "input_audio": {"data": b64encode(wav(2.0)).decode(), "format": "wav"}}
    text = {"type": "text", "text": "Please listen."}
    once = prompt_tokens(server, CHAT, [text, audio])
    assert prompt_tokens(server, CHAT, [text, audio, audio]) - once == 13
    body = {"messages": [{"role": "user", "content": [text, audio]}]}
    assert call(server.url, "/tokenize", body).json["count"] > 13


def test_the_same_image_hits_and_another_does_not(server: RunningServer) -> None:
    def cached(image: bytes) -> int:
        content = [{"type": "image_url", "image_url": {"url": url(image)}}, {"type": "text", "text": "?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        return int(call(server.url, CHAT, body).json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(png(9, 9, text)) > 200 for text in (b"a", b"b", b"a", b"b")] == [False, False, True, True]


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,####"}}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": url(b"no image")}}, ".image_url"),
        ({"type": "image_url", "image_url": 3}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, ".image_url"),
        ({"type": "image", "source": {"type": "base64", "data": "AA=="}}, ".source"),
        ({"type": "input_audio", "input_audio": {"data": "AA=="}}, ".input_audio"),
        ({"type": "audio_url", "audio_url": {"url": "https://elsewhere.example/a.wav"}}, ".audio_url"),
        ({"type": "video_url", "video_url": {"url": "https://elsewhere.example/a.mp4"}}, ""),
        ([], ""),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_field(server: RunningServer, part: Any, field: str) -> None:
    reply = call(server.url, CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})
    assert (reply.status, reply.error["param"]) == (400, f"messages[0].content[1]{field}")


def test_many_images_end_at_the_context() -> None:
    with RunningServer(pages=4096, media="qwen") as server:
        part = {"type": "image_url", "image_url": {"url": url(png(1_000_000, 5_000))}}
        reply = call(server.url, CHAT, {"messages": [{"role": "user", "content": [part] * 2000}]})
        assert reply.status == 400 and "maximum context length" in reply.error["message"]
