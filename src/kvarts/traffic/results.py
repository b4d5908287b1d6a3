"""Readers for result files of load generators, each one JSON object: `vllm bench serve`, and GuideLLM.

vLLM (with --save-detailed): `input_lens`, `output_lens`, `start_times` in seconds, and `errors`, a text for each
request. GuideLLM: of each of `benchmarks`, `requests.successful` with `prompt_tokens`, `output_tokens` and
`request_start_time` (`start_time` in earlier versions) in seconds; several benchmarks in a file follow each other.

Neither says what was in a prompt: every prompt is unlike any other. Requests that failed are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvarts.errors import InputError, MissingFileError, parts_of
from kvarts.traffic.azure import UNIT_TOKENS, unlike_any_other
from kvarts.traffic.trace import Trace, TraceRequest

__all__ = ["load_results", "top_fields"]

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Tokens = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
KindT = TypeVar("KindT")


class _Bench(msgspec.Struct, gc=False):
    input_lens: list[Count]
    output_lens: list[Count]
    start_times: list[Seconds] | None = None
    errors: list[str | None] | None = None


class _Request(msgspec.Struct, gc=False):
    prompt_tokens: Tokens
    output_tokens: Count | None = None
    request_start_time: Seconds | None = None
    start_time: Seconds | None = None


class _Requests(msgspec.Struct, gc=False):
    successful: list[_Request]


class _Benchmark(msgspec.Struct, gc=False):
    requests: _Requests


class _Report(msgspec.Struct, gc=False):
    benchmarks: list[_Benchmark]


def top_fields(path: Path) -> set[str]:
    """Return the names of the fields of a file that is one JSON object; none where it is not."""
    try:
        return set(msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw]))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()  # and a reader says what is wrong


def load_results(path: Path | str) -> Trace:
    """Read a file of either. Raise MissingFileError, and InputError with the field for what cannot be read."""
    path = Path(path)
    rows = _bench_rows(path) if "input_lens" in top_fields(path) else _guidellm_rows(path)
    if not rows:
        raise InputError("has no request that succeeded", path=path)
    first_s = min(start_s for start_s, _, _ in rows)
    requests = [
        TraceRequest(row, round((start_s - first_s) * 1e9), unlike_any_other(row, num_prompt), num_prompt, num_output)
        for row, (start_s, num_prompt, num_output) in enumerate(rows)
    ]
    requests.sort(key=lambda request: request.arrival_ns)
    return Trace(requests, unit_tokens=UNIT_TOKENS, knows_prefixes=False, name=path.name)


def _bench_rows(path: Path) -> list[tuple[float, int, int]]:
    """Return seconds, prompt tokens and output tokens."""
    bench = _decoded(path, _Bench)
    if bench.start_times is None:
        raise InputError(
            "is missing", path=path, field="start_times", hint="Run a vllm bench that writes it, with --save-detailed."
        )
    columns: dict[str, Sequence[object] | None] = {
        "output_lens": bench.output_lens,
        "start_times": bench.start_times,
        "errors": bench.errors,
    }
    for name, column in columns.items():
        if column is not None and len(column) != len(bench.input_lens):
            raise InputError(f"has {len(column)} values, and input_lens {len(bench.input_lens)}", path=path, field=name)
    errors = bench.errors or [None] * len(bench.input_lens)
    rows = []
    every = zip(bench.start_times, bench.input_lens, bench.output_lens, errors, strict=True)
    for place, (start_s, num_prompt, num_output, error) in enumerate(every):
        if error or not num_output:
            continue
        if not num_prompt:
            raise InputError("must be at least 1, got 0", path=path, field=f"input_lens[{place}]")
        rows.append((start_s, num_prompt, num_output))
    return rows


def _guidellm_rows(path: Path) -> list[tuple[float, int, int]]:
    rows = []
    for number, benchmark in enumerate(_decoded(path, _Report).benchmarks):
        for place, request in enumerate(benchmark.requests.successful):
            start_s = request.start_time if request.request_start_time is None else request.request_start_time
            if start_s is None:
                field = f"benchmarks[{number}].requests.successful[{place}].request_start_time"
                raise InputError("is missing", path=path, field=field)
            rows.append((start_s, request.prompt_tokens, max(1, request.output_tokens or 1)))
    return rows


def _decoded(path: Path, kind: type[KindT]) -> KindT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise MissingFileError("no such file", path=path, hint="Check the path of the trace.") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", path=path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what, field = parts_of(error)
        raise InputError(what, path=path, field=field) from error
