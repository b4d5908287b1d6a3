from __future__ import annotations

import pytest

from kvarts.base.errors import ConfigError
from kvarts.base.units import parse_bytes, parse_duration_s, parse_rate, to_ns


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("64GiB", 64 << 30),
        ("50GB", 50_000_000_000),
        ("1.5 MiB", 3 << 19),
        ("2k", 2000),
        ("1Ki", 1024),
        ("64gb", 64_000_000_000),
        ("64gib", 64 << 30),
        ("64 g", 64_000_000_000),
        ("1kB", 1000),
    ],
)
def test_sizes_in_bytes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1iB", "1XB", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size in bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("4h", 14400), ("1h30m", 5400), ("90s", 90), ("90", 90), ("0.5s", 0.5), ("2d", 172800), ("1d 1h 1m 1s", 90061)],
)
def test_durations(text: str, duration_s: float) -> None:
    assert parse_duration_s(text) == duration_s


@pytest.mark.parametrize("text", ["", " ", "h", "-1s", "1m1h", "4x", "1 hour"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration_s(text)


@pytest.mark.parametrize("text", ["64Gb", "1Mb", "8Gib"])
def test_what_may_stand_for_bits_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="may stand for bits"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "rate"), [("50GB/s", 50_000_000_000), ("50gb/S", 50_000_000_000), ("1GiB", 1 << 30)])
def test_bandwidths(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


def test_times_of_today_in_milliseconds_and_seconds_keep_their_nanoseconds() -> None:
    """2025 in ms times a million needs 61 bits; half a millisecond is exact in the float."""
    assert to_ns(1_760_000_000_000.5, 10**6) == 1_760_000_000_000_500_000
    assert to_ns(1_760_000_000.5, 10**9) == 1_760_000_000_500_000_000
    assert to_ns(0.123456789, 10**9) == 123_456_789
    assert to_ns(7, 10**6) == 7_000_000
