"""Typed contents of the files of a run directory. A file with other contents raises InputError with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from kvarts.errors import InputError, parts_of

__all__ = [
    "About",
    "Distributions",
    "LimitedBy",
    "RequestRow",
    "RunConfig",
    "RunReport",
    "SloBounds",
    "Spread",
    "decoded",
    "decoded_lines",
]

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Real = Annotated[float, msgspec.Meta(ge=0, le=1e18)]

Value = TypeVar("Value")


class Spread(msgspec.Struct, frozen=True):
    """Mean, percentiles and maximum of a latency, in ms; None for a missing value."""

    mean: Real | None = None
    p50: Real | None = None
    p90: Real | None = None
    p95: Real | None = None
    p99: Real | None = None
    max: Real | None = None


class LimitedBy(msgspec.Struct, frozen=True):
    """Causes of waiting, and the share of each in the time spent waiting. `lane`: the channel of most loads."""

    cause: str = "nothing"
    lane: str = "-"
    share_of_waiting: dict[str, Real | None] = {}


class Goodput(msgspec.Struct, frozen=True):
    """Requests that kept the requested bounds."""

    requests_per_s: Real | None = None
    ratio: Real | None = None


class Wasted(msgspec.Struct, frozen=True):
    """Tokens computed for cancelled requests, and the number of requests sent again."""

    prompt_tokens: Count = 0
    output_tokens: Count = 0
    num_retries: Count = 0


class Moved(msgspec.Struct, frozen=True):
    """Bytes transferred between tiers, by direction."""

    bytes: dict[str, Count] = {}


class RunReport(msgspec.Struct, frozen=True):
    """The part of a report that is shown."""

    trace: str | None = None
    config: dict[str, Any] = {}
    duration_ms: Real | None = None
    num_requests: Count | None = None
    num_completed: Count | None = None
    num_rejected: Count | None = None
    num_failed: Count | None = None
    num_cancelled: Count | None = None
    cancelled: Wasted | None = None
    num_steps: Count | None = None
    num_input_tokens: Count | None = None
    num_output_tokens: Count | None = None
    num_preemptions: Count | None = None
    num_recomputed_tokens: Count | None = None
    num_evicted_pages: Count | None = None
    ttft_ms: Spread | None = None
    itl_ms: Spread | None = None
    tpot_ms: Spread | None = None
    e2e_ms: Spread | None = None
    queue_ms: Spread | None = None
    uncertainty: dict[str, Spread] = {}
    request_throughput_per_s: Real | None = None
    input_throughput_tokens_per_s: Real | None = None
    output_throughput_tokens_per_s: Real | None = None
    goodput: Goodput | None = None
    prefix_hit_ratio: Real | None = None
    prefix_hit_ratio_by_tier: dict[str, Real | None] = {}
    transfers: Moved | None = None
    peak_used_pct: Real | None = None
    mean_used_pct: Real | None = None
    working_set_pages: Count | None = None
    limited_by: LimitedBy | None = None
    advice: str | None = None
    models: dict[str, dict[str, Any]] | None = None
    """Report of each model, in a run of several."""


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """The part of a request that is shown. Times are in ms from the start; None for an event that never happened."""

    arrival_ms: Real
    first_admitted_ms: Real | None = None
    first_token_ms: Real | None = None
    last_token_ms: Real | None = None
    input_tokens: Count = 0
    output_tokens: Count = 0
    cached_tokens: Count = 0
    request_id: str = ""
    replica: Count = 0
    preemptions: Count = 0


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values up to each bound."""

    upper_ms: list[Real] = []
    counts: list[Count] = []

    def __post_init__(self) -> None:
        if len(self.upper_ms) != len(self.counts) or sorted(self.upper_ms) != self.upper_ms:
            raise ValueError("has no bound for each count, in order")


class Distributions(msgspec.Struct, frozen=True):
    """Histograms by name."""

    itl_ms: Histogram = Histogram()


class About(msgspec.Struct, frozen=True):
    """Version and command of the run."""

    kvarts: str | None = None
    command: list[str] | None = None


def decoded(path: Path, kind: type[Value]) -> Value:
    """Return the contents of a file. Raise InputError with file and field, or FileNotFoundError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        raise InputError(f"cannot be read: {error}", path=path) from error


def decoded_lines(path: Path, kind: type[Value]) -> list[Value]:
    """Return the contents of each line of a file. Raise InputError with the file, line and field."""
    decode = msgspec.json.Decoder(kind).decode
    rows = []
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):  # noqa: B007 - used in the error
                if line.strip():
                    rows.append(decode(line))
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, line=number, field=field) from error
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        raise InputError(f"cannot be read: {error}", path=path, line=number or None) from error
    return rows


class SloBounds(Protocol):
    """Bounds in milliseconds that a request must keep to count as goodput, each optional."""

    @property
    def ttft_ms(self) -> float | None:
        """Bound of the time to the first token."""

    @property
    def tpot_ms(self) -> float | None:
        """Bound of the mean time per output token after the first."""

    @property
    def e2e_ms(self) -> float | None:
        """Bound of the time to the last token."""


class RunConfig(Protocol):
    """The part of a run's configuration that a report reads."""

    @property
    def num_pages(self) -> int:
        """Pages of each replica."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def replicas(self) -> int:
        """Number of engines with this configuration."""

    @property
    def slo(self) -> SloBounds:
        """Bounds for goodput."""

    def to_builtins(self) -> dict[str, Any]:
        """Return the configuration, JSON-able, by the names that a file and the command line use."""
