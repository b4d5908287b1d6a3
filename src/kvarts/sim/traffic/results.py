"""Reads per-request results of load generators, as traffic to replay and as measurements to fit a cost model.

- `vllm bench serve --save-detailed` and SGLang's `bench_serving --output-details`: `input_lens`, `output_lens`,
  `start_times` (not in SGLang), `ttfts` and `itls` in seconds, `errors`.
- GuideLLM: in each of `benchmarks`, `requests.successful` with `prompt_tokens`, `output_tokens`, `request_start_time`
  (`start_time` in earlier versions), `first_token_time`, `last_token_time`, or the `info.timings` of version 2, in
  seconds.
- AIPerf's `profile_export.jsonl`: `metadata.request_start_ns` (`timestamp_ns` until October 2025), and in `metrics`
  `input_sequence_length`, `output_sequence_length`, `time_to_first_token` (`ttft`) and `request_latency`; where the
  server reported its own counts, `usage_prompt_tokens` and `usage_completion_tokens` replace those of the client.
- evalscope's `benchmark_data.db` (SQLite): the table `result` with `start_time`, `first_chunk_latency` and
  `inter_token_latencies` in seconds, `prompt_tokens`, `completion_tokens`, `success`.
- inference-perf's `per_request_lifecycle_metrics.json`: `start_time`, and in `info` `input_tokens` and
  `response_metrics` with `output_token_times` in seconds, `output_tokens` and `server_usage`.

Numbers of tokens are those of the server's usage where the file has them. Generators define TTFT and TPOT differently:
`Results.notes` names the definition of the file, what is read instead, and statistics that cannot be trusted. None of
them records the contents of prompts. Failed and warm-up requests are left out and counted. So are cancelled
ones, except where AIPerf records the length of the prompt (`error_isl`) and the time of cancellation
(`cancellation_time_ns`): these become requests that their clients abandon after the same time. Their output length is
not recorded; the longest output of the file is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvarts.base.columns import percentile_rank
from kvarts.base.decoders import UNDECODED, decode_json
from kvarts.base.errors import InputError, parts_of, problem_of
from kvarts.base.units import to_ns
from kvarts.sim.traffic.bounds import Count, DateNs, DateSeconds, Tokens
from kvarts.sim.traffic.graph import NO_OUTPUT
from kvarts.sim.traffic.trace import Trace, TraceRequest
from kvarts.sim.traffic.trace_file import SKIP_HINT, UNIT_TOKENS, TraceFile, by_arrival, nothing_left, unlike_any_other

__all__ = ["RESULT_FIELDS", "Result", "Results", "load_results", "read_results"]

RESULT_FIELDS = (
    frozenset({"metadata", "metrics"}),
    frozenset({"metadata", "error"}),
    frozenset({"input_lens", "output_lens"}),
    frozenset({"benchmarks"}),
    frozenset({"start_time", "end_time", "info"}),
)
"""A file with all fields of one of these sets is a result file."""

CANCELLED = "metadata.cancellation_time_ns"
NS_PER_S = 1_000_000_000
MOST_NAMED = 4
NO_TOKENS = "counted as successes by the generator, without the time of a token"
WITH_ERROR = "counted as successes by the generator, with an error in the stream"
CUT = "counted as successes by the generator, cut before the end of the stream"
DEFINITIONS = {
    "bench": "TTFT and TPOT of the bench are those of its first and last chunk: read as they are",
    "bench-chat": "TTFT of vllm bench serve ends at the first chunk of a chat, and its TPOT counts from there: not "
    "converted, as the file does not tell whether that chunk had text",
    "guidellm": "TPOT of GuideLLM is (last token - start) / tokens: converted to (last - first token) / (tokens - 1)",
    "aiperf": "TTFT of AIPerf ends at the first chunk with content, its inter-token latency is (last - first) / "
    "(tokens - 1): read as they are",
    "evalscope": "latency and TPOT of evalscope end at the chunk of usage: converted, they end at the last one of text",
    "inference-perf": "latency of inference-perf ends with the stream: converted, it ends at the last chunk of text",
}
"""What the generators call the times of a request, and what is read."""

UNITS_NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": NS_PER_S, "sec": NS_PER_S}

KindT = TypeVar("KindT")


class Result(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One successful request. Times are in nanoseconds of the file's clock; None if not recorded.

    `line`: line in the file, or index among its requests from 1. `token_field`: name of the field with its token times.
    """

    line: int
    start_ns: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    token_field: str = ""
    session_id: str | None = None


class Results(msgspec.Struct):
    """Requests of a result file, in file order, with counts and warnings.

    `rate`: requests sent per second. `concurrency`: most of them at once, if that was limited.
    """

    rows: list[Result]
    left_out: Counter[str]
    cancelled: list[Result] = []
    """Requests that were cancelled, at `last_token_ns`."""
    warnings: list[str] = []
    notes: list[str] = []
    """The definition of the file's times, what is read instead, and statistics that cannot be trusted."""
    rate: float = inf
    concurrency: int | None = None
    num_skipped: int = 0


class _Bench(msgspec.Struct, gc=False):
    input_lens: list[Count]
    output_lens: list[Count]
    start_times: list[DateSeconds] | None = None
    ttfts: list[DateSeconds] | None = None
    itls: list[list[DateSeconds]] | None = None
    errors: list[str | None] | None = None
    request_rate: float | str | None = None
    max_concurrency: Count | None = None
    backend: str | None = None

    @property
    def rate(self) -> float:
        rate = self.request_rate
        return float(rate) if isinstance(rate, int | float) and rate > 0 else inf


class _Timings(msgspec.Struct, gc=False):
    request_start: DateSeconds | None = None
    first_token_iteration: DateSeconds | None = None
    last_token_iteration: DateSeconds | None = None


class _Info(msgspec.Struct, gc=False):
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _Request(msgspec.Struct, gc=False):
    prompt_tokens: Tokens
    output_tokens: Count | None = None
    request_start_time: DateSeconds | None = None
    start_time: DateSeconds | None = None
    first_token_time: DateSeconds | None = None
    last_token_time: DateSeconds | None = None
    info: _Info = msgspec.field(default_factory=_Info)


class _Requests(msgspec.Struct, gc=False):
    successful: list[_Request]
    incomplete: list[msgspec.Raw] | None = None
    errored: list[msgspec.Raw] | None = None


class _Totals(msgspec.Struct, gc=False):
    successful: Count | None = None


class _Benchmark(msgspec.Struct, gc=False):
    requests: _Requests
    metrics: dict[str, Any] = {}


class _Report(msgspec.Struct, gc=False):
    benchmarks: list[_Benchmark]


class _Value(msgspec.Struct, gc=False):
    value: Annotated[float, msgspec.Meta(ge=0, lt=1 << 53)]
    unit: str = "ms"


class _Length(msgspec.Struct, gc=False):
    value: Annotated[float, msgspec.Meta(ge=0, lt=1 << 31)]


class _Metrics(msgspec.Struct, gc=False):
    input_sequence_length: _Length | None = None
    output_sequence_length: _Length | None = None
    output_token_count: _Length | None = None
    usage_prompt_tokens: _Length | None = None
    usage_completion_tokens: _Length | None = None
    error_isl: _Length | None = None
    time_to_first_token: _Value | None = None
    ttft: _Value | None = None
    request_latency: _Value | None = None


class _Metadata(msgspec.Struct, gc=False):
    request_start_ns: DateNs | None = None
    timestamp_ns: DateNs | None = None
    benchmark_phase: str | None = None
    credit_phase: str | None = None
    was_cancelled: bool = False
    cancellation_time_ns: DateNs | None = None
    conversation_id: str | None = None
    x_correlation_id: str | None = None
    turn_index: Count | None = None


class _Failure(msgspec.Struct, gc=False):
    type: str | None = None


class _Record(msgspec.Struct, gc=False):
    metadata: _Metadata
    metrics: _Metrics | None = None
    error: _Failure | str | None = None


class _Eval(msgspec.Struct, gc=False):
    """A row of evalscope's table `result`."""

    start_time: DateSeconds
    success: Count
    first_chunk_latency: DateSeconds | None = None
    inter_token_latencies: list[DateSeconds] | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class _Response(msgspec.Struct, gc=False):
    output_tokens: Count | None = None
    server_usage: _Usage | None = None
    output_token_times: list[DateSeconds] | None = None


class _LifecycleInfo(msgspec.Struct, gc=False):
    input_tokens: Count | None = None
    response_metrics: _Response | None = None


class _Lifecycle(msgspec.Struct, gc=False):
    """A request of inference-perf."""

    start_time: DateSeconds
    info: _LifecycleInfo
    response: str | None = None
    error: Any = None


def load_results(path: Path | str | TraceFile, *, skip_bad_lines: bool = False, run: int | None = None) -> Trace:
    """Read a result file as traffic. Raise MissingFileError, or InputError with line and field.

    Requests without start times are spaced evenly at the rate at which they were sent, with a warning, or sent by as
    many clients as the run had at once if it had no rate.
    """
    file = TraceFile.of(path)
    results = read_results(file, skip_bad_lines=skip_bad_lines, run=run)
    if not results.rows and not results.cancelled:
        raise nothing_left(file, results.left_out, results.num_skipped)
    warnings = list(results.warnings)
    concurrency = None
    if results.rows and results.rows[0].start_ns is None:
        spread = f"evenly, {results.rate:g} per second" if results.rate < inf else "all at once"
        if results.concurrency is not None and results.rate == inf:
            concurrency = results.concurrency
            spread = f"as others end, {concurrency:,} at once"
        warnings.append(f"the results have no start times: requests arrive {spread}")
    if results.concurrency is not None and concurrency is None:
        warnings.append(f"the run had at most {results.concurrency:,} requests at once, as --concurrency has")
    longest = max((row.num_output_tokens for row in results.rows), default=1)
    rows = sorted(
        [
            *((row, row.num_output_tokens, None) for row in results.rows),
            *((row, longest, (row.last_token_ns or 0) - (row.start_ns or 0)) for row in results.cancelled),
        ],
        key=lambda each: each[0].line,
    )
    requests = [
        TraceRequest(
            index,
            round(index / results.rate * NS_PER_S) if row.start_ns is None else row.start_ns,
            unlike_any_other(index, row.num_prompt_tokens),
            row.num_prompt_tokens,
            num_output,
            session_id=row.session_id,
            cancel_after_ns=cancel_after_ns,
        )
        for index, (row, num_output, cancel_after_ns) in enumerate(rows)
    ]
    trace = Trace(
        by_arrival(requests, file),
        unit_tokens=UNIT_TOKENS,
        knows_prefixes=False,
        name=file.name,
        num_skipped_lines=results.num_skipped,
        left_out=results.left_out,
        warnings=warnings,
    )
    trace.concurrency = concurrency
    return trace


def read_results(file: TraceFile, *, skip_bad_lines: bool = False, run: int | None = None) -> Results:
    """Return the requests of a result file. Raise InputError, with line and field, for malformed input.

    `skip_bad_lines`: skip and count malformed lines of an AIPerf export. `run`: number of one of several runs, from 1.
    """
    results = Results([], Counter())
    if file.is_sqlite:
        _read_evalscope(file, results)
        return results
    names = file.first_fields[0] if file.first_fields else frozenset()
    if {"metadata", "metrics"} <= names or {"metadata", "error"} <= names:
        _read_aiperf(file, results, skip_bad_lines=skip_bad_lines)
    elif "info" in names:
        results.notes.append(DEFINITIONS["inference-perf"])
        untimed = 0
        for place, data in file.records():
            request = _decoded(file, data, _Lifecycle, place, is_row=True)
            untimed += _read_inference_perf(file, place, request, results)
        if untimed:
            results.notes.append(
                f"TTFT and TPOT of {untimed:,} requests cannot be trusted: they have times of other than their tokens, "
                "as of text after reasoning"
            )
    elif "benchmarks" in names:
        results.notes.append(DEFINITIONS["guidellm"])
        reports = [_decoded(file, data, _Report) for _, data in file.records()]
        several = [each for report in reports for each in report.benchmarks]
        _check_run(file, run, [f"{len(each.requests.successful):,} requests" for each in several])
        for number, benchmark in enumerate(several):
            if run in (None, number + 1):
                _read_guidellm(file, number, benchmark, results)
        results.left_out = +results.left_out  # drops zero counts
    else:
        runs = [(line, data, _decoded(file, data, _Bench, line)) for line, data in file.records()]
        _check_run(file, run, [_words(bench) for *_, bench in runs], is_needed=True)
        line, data, bench = runs[(run or 1) - 1]
        _read_bench(file, line, bench, results)
        results.notes += _untrusted(_decoded(file, data, dict[str, Any], line))
    return results


def _words(bench: _Bench) -> str:
    rate = f"{bench.rate:g} per second" if bench.rate < inf else "no rate"
    limit = "" if bench.max_concurrency is None else f", at most {bench.max_concurrency:,} at once"
    return f"{len(bench.input_lens):,} requests, {rate}{limit}"


def _check_run(file: TraceFile, run: int | None, runs: Sequence[str], *, is_needed: bool = False) -> None:
    """Raise InputError for a run that is not there, and if one of several has to be chosen."""
    if (run is None and not (is_needed and len(runs) > 1)) or (run is not None and run <= len(runs)):
        return
    listed = "; ".join(f"{number}: {words}" for number, words in enumerate(runs, 1))
    what = f"has {len(runs):,} runs" if run is None else f"has no run {run:,}"
    raise InputError(f"{what} ({listed})", path=file.path, field="run", hint="Give --run N, or a file of one run.")


def _untrusted(statistics: Mapping[str, Any], place: str = "") -> list[str]:
    """Return notes on the statistics of a report that have no samples, or a median outside of their range."""
    notes = []
    for what, names in (("without samples", _without_samples), ("with a median outside of their range", _out_of_order)):
        if found := list(names(statistics, place)):
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            notes.append(f"statistics {what} cannot be trusted: {', '.join(found[:MOST_NAMED])}{more}")
    return notes


def _without_samples(statistics: Mapping[str, Any], place: str) -> Iterator[str]:
    for name, value in statistics.items():
        if isinstance(value, Mapping) and name not in ("errored", "incomplete", "total"):
            if value.get("count") == 0:
                yield f"{place}{name}"
            yield from _without_samples(value, f"{place}{name}.")


def _out_of_order(statistics: Mapping[str, Any], place: str) -> Iterator[str]:
    for name, value in statistics.items():
        if isinstance(value, Mapping):
            ordered = [value[key] for key in ("min", "median", "max") if isinstance(value.get(key), int | float)]
            if ordered != sorted(ordered):
                yield f"{place}{name}"
            yield from _out_of_order(value, f"{place}{name}.")
        elif name.startswith("median_") and isinstance(value, int | float):
            most = statistics.get(name.replace("median_", "p99_"))
            if isinstance(most, int | float) and value > most:
                yield f"{place}{name}"


def _read_bench(file: TraceFile, line: int, bench: _Bench, results: Results) -> None:
    """Set the requests to those of one run."""
    count = len(bench.input_lens)
    columns: dict[str, Sequence[object] | None] = {
        name: getattr(bench, name) for name in ("output_lens", "start_times", "ttfts", "itls", "errors")
    }
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise InputError(
                f"has {len(column)} values, and input_lens {count}",
                path=file.path,
                line=_several(file, line),
                field=name,
            )
    results.rate, results.concurrency = bench.rate, bench.max_concurrency
    token_field = next((name for name in ("ttfts", "itls") if columns[name] is None), "start_times")
    is_chat = bench.backend is not None and bench.backend.startswith("openai-") and "chat" in bench.backend
    results.notes.append(DEFINITIONS["bench-chat" if is_chat else "bench"])
    is_streamed = any(bench.ttfts or ())
    seconds = sorted(itls[0] for itls in bench.itls or () if itls)
    if is_chat and seconds:
        results.notes[-1] += (
            f"; the second chunk came {1e3 * seconds[percentile_rank(50, len(seconds))]:.1f} ms later (median)"
        )
    for place, (num_prompt, num_output) in enumerate(zip(bench.input_lens, bench.output_lens, strict=True)):
        if bench.errors and bench.errors[place]:
            results.left_out["failed"] += 1
            continue
        if not num_output:
            results.left_out[NO_OUTPUT] += 1
            continue
        if is_streamed and bench.ttfts and not bench.ttfts[place]:
            results.left_out[NO_TOKENS] += 1
            continue
        if not num_prompt:
            raise InputError(
                "must be at least 1, got 0", path=file.path, line=_several(file, line), field=f"input_lens[{place}]"
            )
        start_ns = None if bench.start_times is None else _ns(bench.start_times[place])
        first_ns = last_ns = None
        if bench.start_times is not None and bench.ttfts is not None and bench.itls is not None:
            first_s = bench.start_times[place] + bench.ttfts[place]
            first_ns, last_ns = _ns(first_s), _ns(first_s + sum(bench.itls[place]))
        results.rows.append(
            Result(
                line=place + 1,
                start_ns=start_ns,
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                first_token_ns=first_ns,
                last_token_ns=last_ns,
                token_field=token_field,
            )
        )


def _several(file: TraceFile, line: int) -> int | None:
    return line if file.is_json_lines else None


def _read_guidellm(file: TraceFile, number: int, benchmark: _Benchmark, results: Results) -> None:
    """Add the requests of a benchmark, the one with this number in its report."""
    requests, place_of = benchmark.requests, f"benchmarks[{number}].requests"
    try:
        total = msgspec.convert(benchmark.metrics.get("request_totals", {}), _Totals).successful
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        field = f"benchmarks[{number}].metrics.request_totals" + (f".{field}" if field else "")
        raise InputError(what, path=file.path, field=field) from error
    results.notes += _untrusted(benchmark.metrics, f"benchmarks[{number}].metrics.")
    results.left_out["failed"] += len(requests.errored or ())
    results.left_out["incomplete"] += len(requests.incomplete or ())
    if total and not requests.successful:
        raise InputError(
            f"is empty, and {total:,} requests were successful: the report was written without their details",
            path=file.path,
            field=f"{place_of}.successful",
            hint="Run guidellm without a limit of samples (before 0.7 --sample-requests, from then on sample_size "
            "of --metrics).",
        )
    if total is not None and total > len(requests.successful):
        results.warnings.append(
            f"the report has the details of {len(requests.successful):,} of {total:,} successful requests: a "
            "sample of the traffic"
        )
    for place, request in enumerate(requests.successful):
        if request.output_tokens == 0:
            results.left_out[NO_OUTPUT] += 1
            continue
        results.rows.append(_guidellm_result(file, request, f"{place_of}.successful[{place}]", len(results.rows) + 1))


def _guidellm_result(file: TraceFile, request: _Request, place_of: str, line: int) -> Result:
    timings = request.info.timings
    start_s = _first(request.request_start_time, request.start_time, timings.request_start)
    if start_s is None:
        raise InputError("is missing", path=file.path, field=f"{place_of}.request_start_time")
    first_s = _first(request.first_token_time, timings.first_token_iteration)
    last_s = _first(request.last_token_time, timings.last_token_iteration)
    return Result(
        line=line,
        start_ns=_ns(start_s),
        num_prompt_tokens=request.prompt_tokens,
        num_output_tokens=request.output_tokens or 1,
        first_token_ns=None if first_s is None else _ns(first_s),
        last_token_ns=None if last_s is None else _ns(last_s),
        token_field=f"{place_of}.{'first' if first_s is None else 'last'}_token_time",
    )


def _read_inference_perf(file: TraceFile, place: int, request: _Lifecycle, results: Results) -> bool:
    """Add a request. Return whether it has times, and not those of its tokens."""
    response = request.info.response_metrics or _Response()
    usage = response.server_usage or _Usage()
    times, num_output = response.output_token_times or (), usage.completion_tokens or response.output_tokens
    if request.error is not None:
        results.left_out["failed"] += 1
    elif request.response is not None and request.response.startswith("data:") and "[DONE]" not in request.response:
        results.left_out[CUT] += 1
    elif request.response is not None and 'data: {"error"' in request.response:
        results.left_out[WITH_ERROR] += 1
    elif not num_output:
        results.left_out[NO_OUTPUT] += 1
    elif times or not (request.response or "").startswith("data:"):
        num_prompt = usage.prompt_tokens or request.info.input_tokens
        if not num_prompt:
            raise InputError("must be at least 1", path=file.path, line=place, field="info.input_tokens")
        results.rows.append(
            Result(
                line=place,
                start_ns=_ns(request.start_time),
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                first_token_ns=_ns(min(times)) if times else None,
                last_token_ns=_ns(max(times)) if times else None,
                token_field="info.response_metrics.output_token_times",
            )
        )
        return bool(times) and len(times) != num_output
    else:
        results.left_out[NO_TOKENS] += 1
    return False


def _read_evalscope(file: TraceFile, results: Results) -> None:
    """Read the table `result` of evalscope's database."""
    results.notes.append(DEFINITIONS["evalscope"])
    for line, values in enumerate(_sqlite_rows(file, "result", _Eval.__struct_fields__), 1):
        try:
            itls = values["inter_token_latencies"]
            row = msgspec.convert(values | {"inter_token_latencies": itls and msgspec.json.decode(itls)}, _Eval)
        except (*UNDECODED, TypeError) as error:
            what, field = parts_of(error)
            field = field or "inter_token_latencies"
            raise InputError(what, path=file.path, line=line, field=f"result.{field}") from error
        if not row.success:
            results.left_out["failed"] += 1
        elif not row.completion_tokens:
            results.left_out[NO_OUTPUT] += 1
        elif row.inter_token_latencies is not None and not row.first_chunk_latency:
            results.left_out[NO_TOKENS] += 1
        else:
            if not row.prompt_tokens:
                raise InputError("must be at least 1", path=file.path, line=line, field="result.prompt_tokens")
            first_s = None if row.first_chunk_latency is None else row.start_time + row.first_chunk_latency
            results.rows.append(
                Result(
                    line=line,
                    start_ns=_ns(row.start_time),
                    num_prompt_tokens=row.prompt_tokens,
                    num_output_tokens=row.completion_tokens,
                    first_token_ns=None if first_s is None else _ns(first_s),
                    last_token_ns=None if first_s is None else _ns(first_s + sum(row.inter_token_latencies or ())),
                    token_field="result.first_chunk_latency",
                )
            )


def _sqlite_rows(file: TraceFile, table: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of a database, read into memory. Raise InputError if it has no such table."""
    import sqlite3  # few results are databases

    with closing(sqlite3.connect(":memory:")) as database:
        try:
            database.deserialize(file.read())
            database.execute("PRAGMA trusted_schema = OFF")
            for row in database.execute(f"SELECT {', '.join(names)} FROM {table} ORDER BY rowid"):
                yield dict(zip(names, row, strict=True))
        except sqlite3.Error as error:
            hint = "Give the benchmark_data.db that evalscope perf writes."
            raise InputError(f"is not a database of evalscope: {error}", path=file.path, hint=hint) from error


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _read_aiperf(file: TraceFile, results: Results, *, skip_bad_lines: bool) -> None:
    decoder = msgspec.json.Decoder(_Record)
    sessions: Counter[str] = Counter()
    for line, data in file.records():
        try:
            try:
                row = _aiperf_result(line, decoder.decode(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                what, field = parts_of(error)
                raise InputError(what, field=field) from error
            except RecursionError:
                raise InputError("is nested too deeply") from None
        except InputError as error:
            if not skip_bad_lines:
                raise InputError(error.what, path=file.path, line=line, field=error.field, hint=SKIP_HINT) from error
            results.num_skipped += 1
            continue
        if isinstance(row, str):
            results.left_out[row] += 1
            continue
        (results.cancelled if row.token_field == CANCELLED else results.rows).append(row)
        if row.session_id is not None:
            sessions[row.session_id] += 1
    # A benchmark without turns gives each request a separate conversation id.
    results.notes.append(DEFINITIONS["aiperf"])
    results.rows, results.cancelled = (
        [
            msgspec.structs.replace(row, session_id=None) if row.session_id and sessions[row.session_id] == 1 else row
            for row in rows
        ]
        for rows in (results.rows, results.cancelled)
    )


def _aiperf_result(line: int, record: _Record) -> Result | str:
    """Return the request of a record, or the reason why it is left out."""
    metadata, metrics = record.metadata, record.metrics
    start_ns = metadata.timestamp_ns if metadata.request_start_ns is None else metadata.request_start_ns
    if start_ns is None:
        raise InputError("is missing", field="metadata.request_start_ns")
    is_cancelled = isinstance(record.error, _Failure) and "Cancel" in (record.error.type or "")
    is_warm_up = (metadata.benchmark_phase or metadata.credit_phase or "profiling") != "profiling"
    if metadata.was_cancelled or is_cancelled:
        cancelled_ns = metadata.cancellation_time_ns
        length = metrics and (metrics.error_isl or metrics.input_sequence_length)
        if is_warm_up or not length or length.value < 1 or cancelled_ns is None or cancelled_ns < start_ns:
            return "cancelled"
        return Result(
            line=line,
            start_ns=start_ns,
            num_prompt_tokens=int(length.value),
            num_output_tokens=1,
            last_token_ns=cancelled_ns,
            token_field=CANCELLED,
            session_id=metadata.x_correlation_id or metadata.conversation_id,
        )
    if record.error is not None:
        return "failed"
    if is_warm_up:
        return "of a warm-up"
    if metrics is None:
        return "without metrics"
    prompt = _of_usage(metrics.usage_prompt_tokens, metrics.input_sequence_length)
    output = _of_usage(metrics.usage_completion_tokens, metrics.output_sequence_length or metrics.output_token_count)
    for name, length in (("input", prompt), ("output", output)):
        if length is None:
            raise InputError("is missing", field=f"metrics.{name}_sequence_length")
    assert prompt is not None and output is not None
    num_prompt = int(prompt.value)
    if num_prompt < 1:
        raise InputError("must be at least 1, got 0", field="metrics.input_sequence_length.value")
    if output.value < 1:
        return NO_OUTPUT
    ttft = metrics.time_to_first_token or metrics.ttft
    return Result(
        line=line,
        start_ns=start_ns,
        num_prompt_tokens=num_prompt,
        num_output_tokens=int(output.value),
        first_token_ns=None if ttft is None else start_ns + _duration_ns(ttft, "time_to_first_token"),
        last_token_ns=None
        if metrics.request_latency is None
        else start_ns + _duration_ns(metrics.request_latency, "request_latency"),
        token_field="metrics.time_to_first_token" if ttft is None else "metrics.request_latency",
        session_id=metadata.x_correlation_id or metadata.conversation_id,
    )


def _of_usage(usage: _Length | None, counted: _Length | None) -> _Length | None:
    """Return the server's count, or AIPerf's own if usage has none."""
    return counted if usage is None or usage.value < 1 else usage


def _duration_ns(value: _Value, name: str) -> int:
    if value.unit not in UNITS_NS:
        raise InputError(f"{value.unit!r} is not known", field=f"metrics.{name}.unit")
    return to_ns(value.value, UNITS_NS[value.unit])


def _ns(seconds: float) -> int:
    return to_ns(seconds, NS_PER_S)


def _decoded(
    file: TraceFile, data: bytes, kind: type[KindT], line: int | None = None, *, is_row: bool = False
) -> KindT:
    line = line if file.is_json_lines or is_row else None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=file.path, line=line, field=field) from error
    except RecursionError:
        raise InputError("is nested too deeply", path=file.path, line=line) from None
    except UNDECODED as error:
        what = problem_of(error)
    try:
        return msgspec.convert(decode_json(data), kind)  # rates and percentiles may be Infinity or NaN
    except msgspec.ValidationError as error:
        what, field = parts_of(error)
        raise InputError(what, path=file.path, line=line, field=field) from error
    except (ValueError, RecursionError):
        raise InputError(what, path=file.path, line=line) from None
