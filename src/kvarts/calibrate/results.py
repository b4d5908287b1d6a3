"""What load generators measured, request by request: rows with the names of FIELDS, for `load_measured`.

`vllm bench serve --save-detailed`: `input_lens`, `output_lens`, `start_times`, `ttfts` and `itls`, in seconds, and
`errors`. GuideLLM: of each of `benchmarks`, `requests.successful` with `request_start_time` (`start_time` in earlier
versions), `first_token_time` and `last_token_time`, in seconds. AIPerf's `profile_export.jsonl`: a line a request, with
`metadata.request_start_ns` and `metrics`. Requests that failed are left out. These are a client's times: the way there
and back counts as time of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvarts.errors import InputError, parts_of

__all__ = ["result_rows"]

Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}

Rows = list[tuple[int, dict[str, Any]]]


class _Bench(msgspec.Struct, gc=False):
    input_lens: list[Count]
    output_lens: list[Count]
    ttfts: list[Seconds]
    itls: list[list[Seconds]]
    start_times: list[Seconds]
    errors: list[str | None] | None = None


class _Request(msgspec.Struct, gc=False):
    prompt_tokens: Count
    output_tokens: Count
    first_token_time: Seconds
    last_token_time: Seconds
    request_start_time: Seconds | None = None
    start_time: Seconds | None = None


class _Requests(msgspec.Struct, gc=False):
    successful: list[_Request]


class _Benchmark(msgspec.Struct, gc=False):
    requests: _Requests


class _Report(msgspec.Struct, gc=False):
    benchmarks: list[_Benchmark]


class _Value(msgspec.Struct, gc=False):
    value: float
    unit: str = "ms"

    @property
    def seconds(self) -> float:
        return self.value * UNITS_S[self.unit]


class _Metrics(msgspec.Struct, gc=False):
    request_latency: _Value
    time_to_first_token: _Value
    input_sequence_length: _Value
    output_sequence_length: _Value | None = None
    output_token_count: _Value | None = None


class _Metadata(msgspec.Struct, gc=False):
    request_start_ns: Annotated[int, msgspec.Meta(ge=0)]
    was_cancelled: bool = False


class _Record(msgspec.Struct, gc=False):
    metadata: _Metadata
    metrics: _Metrics | None = None
    error: Any = None


def result_rows(path: Path, text: str) -> Rows | None:
    """Return the rows of a result file, with times in seconds; None if `text` is none. Raise InputError for a bad one.

    The number of a row is that of its line, or its place in a file that is one object, from 1.
    """
    first = text.lstrip().split("\n", 1)[0]
    if _has_fields(first, {"metadata", "metrics"}) or _has_fields(first, {"metadata", "error"}):
        return _aiperf(path, text)
    if _has_fields(text, {"input_lens", "output_lens"}):
        return list(_bench(path, _decoded(path, text, _Bench)))
    if _has_fields(text, {"benchmarks"}):
        return _guidellm(path, _decoded(path, text, _Report))
    return None


def _has_fields(text: str, names: set[str]) -> bool:
    try:
        return names <= msgspec.json.decode(text, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False


def _row(arrival_s: float, first_s: float, last_s: float, num_prompt: int, num_output: int) -> dict[str, Any]:
    values = (arrival_s, first_s, last_s, num_prompt, num_output)
    return dict(zip(("arrival", "first_token", "last_token", "prompt_tokens", "output_tokens"), values, strict=True))


def _bench(path: Path, bench: _Bench) -> Iterator[tuple[int, dict[str, Any]]]:
    count = len(bench.input_lens)
    columns = {name: getattr(bench, name) for name in ("output_lens", "ttfts", "itls", "start_times", "errors")}
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise InputError(f"has {len(column)} values, and input_lens {count}", path=path, field=name)
    for place, (start_s, ttft_s, gaps_s) in enumerate(zip(bench.start_times, bench.ttfts, bench.itls, strict=True)):
        if (bench.errors and bench.errors[place]) or not bench.output_lens[place]:
            continue
        first_s = start_s + ttft_s
        yield (
            place + 1,
            _row(start_s, first_s, first_s + sum(gaps_s), bench.input_lens[place], bench.output_lens[place]),
        )


def _guidellm(path: Path, report: _Report) -> Rows:
    rows: Rows = []
    for number, benchmark in enumerate(report.benchmarks):
        for place, request in enumerate(benchmark.requests.successful):
            start_s = request.start_time if request.request_start_time is None else request.request_start_time
            if start_s is None:
                field = f"benchmarks[{number}].requests.successful[{place}].request_start_time"
                raise InputError("is missing", path=path, field=field)
            counts = request.prompt_tokens, request.output_tokens
            rows.append((len(rows) + 1, _row(start_s, request.first_token_time, request.last_token_time, *counts)))
    return rows


def _aiperf(path: Path, text: str) -> Rows:
    rows: Rows = []
    for line, row in enumerate(text.splitlines(), 1):
        if not row.strip():
            continue
        record = _decoded(path, row, _Record, line)
        if record.error or record.metrics is None or record.metadata.was_cancelled:
            continue
        metrics = record.metrics
        for name in ("request_latency", "time_to_first_token"):
            unit = getattr(metrics, name).unit
            if unit not in UNITS_S:
                raise InputError(f"{unit!r} is not known", path=path, line=line, field=f"metrics.{name}.unit")
        output = metrics.output_sequence_length or metrics.output_token_count
        if output is None:
            raise InputError("is missing", path=path, line=line, field="metrics.output_sequence_length")
        start_s = record.metadata.request_start_ns / 1e9
        first_s, last_s = start_s + metrics.time_to_first_token.seconds, start_s + metrics.request_latency.seconds
        rows.append((line, _row(start_s, first_s, last_s, int(metrics.input_sequence_length.value), int(output.value))))
    return rows


def _decoded(path: Path, text: str, kind: Any, line: int | None = None) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, line=line, field=field) from error
