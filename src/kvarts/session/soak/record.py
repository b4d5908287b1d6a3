"""The plan of a soak and its measurements, with their file format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from kvarts.errors import ConfigError, InputError, parts_of
from kvarts.files import read_bytes, write_whole
from kvarts.limits import MOST_BYTES_PER_TOKEN, MOST_COUNT, MOST_SECONDS, MOST_SEED, check_number, check_whole

__all__ = ["VERSION", "EndedBy", "KvLayers", "Phase", "Sample", "SoakPlan", "SoakRecord", "load_record", "write_record"]

VERSION = 1
MOST_SESSIONS = 100_000

Phase = Literal["append", "turn"]
EndedBy = Literal["duration", "stopped", "error"]


class KvLayers(msgspec.Struct, frozen=True):
    """Layers with the same limit: `bytes_per_token` over all of them, and the most tokens that each keeps."""

    max_tokens: int
    bytes_per_token: int


class SoakPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run, and the criteria of its verdict. Raises ConfigError for a value out of range.

    Each turn appends `prompt_tokens` tokens to one of `num_sessions` sessions, in rotation, and generates `max_tokens`.
    Turns begin `turn_spacing_s` seconds apart, or when the previous one has ended.

    `layers`: bytes per token, if known; if empty, they are derived while sessions fill up. `max_drift`: largest
    relative increase of latency over the run; `max_rss_growth`: the same for the server's memory.
    """

    target: str
    duration_s: float
    turn_spacing_s: float = 0.0
    num_sessions: int = 4
    prompt_tokens: int = 32
    max_tokens: int = 32
    sink: int = 4
    window: int = 64
    vocab_size: int = 256
    seed: int = 0
    turn_timeout_s: float = 600.0
    layers: tuple[KvLayers, ...] = ()
    expects_rss: bool = False
    max_drift: float = 0.1
    max_rss_growth: float = 0.05

    def __post_init__(self) -> None:
        check_whole(self.num_sessions, "num_sessions", most=MOST_SESSIONS)
        at_least = {"prompt_tokens": 1, "max_tokens": 1, "window": 1, "vocab_size": 1, "sink": 0}
        for field, least in at_least.items():
            check_whole(getattr(self, field), field, least=least)
        check_whole(self.seed, "seed", least=0, most=MOST_SEED)
        for field in ("duration_s", "turn_timeout_s", "max_drift", "max_rss_growth"):
            check_number(getattr(self, field), field, above=True, most=MOST_SECONDS)
        check_number(self.turn_spacing_s, "turn_spacing_s", most=MOST_SECONDS)
        for layers in self.layers:
            check_whole(layers.max_tokens, "layers", most=MOST_COUNT)
            check_whole(layers.bytes_per_token, "layers", most=MOST_BYTES_PER_TOKEN)

    @property
    def bound_tokens(self) -> int:
        """Return how many tokens a full session keeps, in the layers that keep most."""
        return max((layers.max_tokens for layers in self.layers), default=self.sink + self.window)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of a session, after an append or after a whole turn. None: not reported by the server.

    `num_sent_tokens`: tokens sent and received by the client, its own count of the history. `at_s`: time since the run
    began. A turn also has latencies: `ttft_s` to the first token, and `itl_s`, the mean between tokens.
    """

    turn: int
    phase: Phase
    session: int
    at_s: float
    num_sent_tokens: int
    history_length: int | None = None
    kv_live_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    kv_bound_bytes: int | None = None
    inv1_violations: int | None = None
    inv2_violations: int | None = None
    rss_bytes: int | None = None
    num_generated: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None


class SoakRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run so far. `ended_by` is None while it continues; `why`: the error that ended it.

    Raises ConfigError for an invalid time.
    """

    plan: SoakPlan
    samples: list[Sample]
    duration_s: float
    ended_by: EndedBy | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        check_number(self.duration_s, "duration_s", most=MOST_SECONDS)


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    verdict: msgspec.Raw
    record: SoakRecord


def write_record(path: Path, record: SoakRecord, verdict: Any) -> None:
    """Write a run and its verdict as JSON, completely or not at all, with keys in a fixed order. Raise OutputError."""
    raw = msgspec.Raw(msgspec.json.encode(verdict))
    write_whole(path, msgspec.json.encode(_File(version=VERSION, verdict=raw, record=record)) + b"\n")


def load_record(path: Path) -> SoakRecord:
    """Return the run in a file, without its verdict. Raise MissingFileError and InputError."""
    data = read_bytes(path, hint="Give the file of kvarts soak --json.")
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != VERSION:
            raise InputError(f"has version {version}, and this kvarts reads {VERSION}", path=path)
        return msgspec.json.decode(data, type=_File).record
    except RecursionError:
        raise InputError("is no record of a soak: it is nested too deeply", path=path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        raise InputError(f"is no record of a soak: {what}", path=path, field=field) from error
    except ConfigError as error:
        raise InputError(f"is no record of a soak: {error}", path=path) from error


class _Versioned(msgspec.Struct):
    version: int
