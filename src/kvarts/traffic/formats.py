"""Which reader a trace is for."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from kvarts.errors import ConfigError
from kvarts.files import reading
from kvarts.samples import located, sample_of, where_samples_are
from kvarts.traffic.mooncake import load_mooncake
from kvarts.traffic.trace import Trace

__all__ = ["load_trace"]

HEAD_BYTES = 1 << 16
MOST_LINE_BYTES = 1 << 24


def load_trace(path: Path | str, *, trace_block_size: int | None = None, skip_bad_lines: bool = False) -> Trace:
    """Read a trace of any form that is known, by its name, or a bundled one: `sample:mooncake`, see `kvarts.samples`.

    .csv: Azure's traces of 2023, or BurstGPT. .json, .json.gz, or a directory of these: sessions of kv-cache-tester.
    A .json may be a result of `vllm bench` or GuideLLM as well. All else: JSON lines of Mooncake, also in a .json that
    has them, or, by the fields of the first line, what a live engine recorded, Dynamo's request traces (also
    .jsonl.gz), AIPerf's exports, Qwen-Bailian's, or a log of OpenAI-style responses. Raise MissingFileError, or
    InputError with file and place.

    `trace_block_size`: tokens a hash id stands for: 512 in Mooncake's form unless given, 16 in Qwen-Bailian's.
    `skip_bad_lines`: leave out and count lines that cannot be read; not for kv-cache-tester's form, which has none.
    """
    sample = sample_of(path)
    if sample is not None:
        trace_block_size = trace_block_size or sample.trace_block_size
    path = located(path)
    if path.suffix == ".toml":
        raise ConfigError("is a configuration, not a trace", path=path, hint="Use --config FILE.")
    with reading(path, hint=where_samples_are(path)):
        path.lstat()
    if path.suffix == ".csv":
        from kvarts.traffic.azure import load_azure

        _refuse_block_size(path, trace_block_size, "the trace has no hash ids")
        return load_azure(path, skip_bad_lines=skip_bad_lines)
    if not _is_kv_cache_tester(path):
        fields = _first_fields(path)
        if "arrival_ns" in fields:
            from kvarts.traffic.recorded import load_recorded

            _refuse_block_size(path, trace_block_size, "the trace has no hash ids")
            return load_recorded(path, skip_bad_lines=skip_bad_lines)
        if "event_type" in fields:
            from kvarts.traffic.records import load_dynamo

            _refuse_block_size(path, trace_block_size, "the trace says it itself")
            return load_dynamo(path, skip_bad_lines=skip_bad_lines)
        if {"metadata", "metrics"} <= fields:
            from kvarts.traffic.records import load_aiperf

            _refuse_block_size(path, trace_block_size, "the trace has no hash ids")
            return load_aiperf(path, skip_bad_lines=skip_bad_lines)
        if {"chat_id", "hash_ids"} <= fields:
            from kvarts.traffic.logs import load_bailian

            return load_bailian(path, trace_block_size=trace_block_size, skip_bad_lines=skip_bad_lines)
        if {"created", "usage"} <= fields:
            from kvarts.traffic.logs import load_usage_log

            _refuse_block_size(path, trace_block_size, "the trace has no hash ids")
            return load_usage_log(path, skip_bad_lines=skip_bad_lines)
        return load_mooncake(path, trace_block_size=trace_block_size or 512, skip_bad_lines=skip_bad_lines)
    from kvarts.traffic.kv_cache_tester import load_kv_cache_tester
    from kvarts.traffic.results import load_results, top_fields

    if path.suffix == ".json" and {"input_lens", "benchmarks"} & top_fields(path):
        _refuse_block_size(path, trace_block_size, "the trace has no hash ids")
        if skip_bad_lines:
            raise ConfigError(
                "a file of results is one object", path=path, field="skip_bad_lines", hint="Leave it out."
            )
        return load_results(path)
    if trace_block_size is not None:
        raise ConfigError(
            "is given, and the trace says it itself", path=path, field="trace_block_size", hint="Leave it out."
        )
    if skip_bad_lines:
        raise ConfigError(
            "a session without one of its turns is another session",
            path=path,
            field="skip_bad_lines",
            hint="Leave it out, and mend or remove the file.",
        )
    return load_kv_cache_tester(path)


def _refuse_block_size(path: Path, trace_block_size: int | None, why: str) -> None:
    if trace_block_size is not None:
        raise ConfigError(f"is given, and {why}", path=path, field="trace_block_size", hint="Leave it out.")


def _first_fields(path: Path) -> set[str]:
    """Return the names of the first line's fields; none where it is no JSON object, or no file. Raise InputError."""
    if not path.is_file():
        return set()  # what is a pipe can be read once only
    try:
        with reading(path), _opened(path) as file:
            line = file.readline(MOST_LINE_BYTES)
        return set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()  # and the reader says what is wrong


def _opened(path: Path) -> BinaryIO:
    if path.suffix != ".gz":
        return path.open("rb")
    import gzip

    return cast(BinaryIO, gzip.open(path))


def _is_kv_cache_tester(path: Path) -> bool:
    """Return whether this is a directory, or a JSON file that does not begin with a row of Mooncake's."""
    with reading(path):
        if path.name.endswith(".json.gz") or path.is_dir():
            return True
    if path.suffix != ".json":
        return False
    if path.is_fifo():
        return False  # what is read here would be lost
    try:
        with path.open("rb") as file:
            return b'"input_length"' not in file.read(HEAD_BYTES)
    except OSError:
        return True  # and the reader says what is wrong
