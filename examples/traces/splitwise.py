"""Traces of splitwise-sim: `arrival_timestamp` in seconds, `prompt_size`, `token_size`. Prompts share nothing."""

from __future__ import annotations

from collections.abc import Iterator

from mooncake_rows import Record, Row, main, seconds_ns


def convert(record: Record) -> Iterator[Row]:
    """Yield the row of a record. Raise ValueError for one that stands for several requests."""
    if float(record.get("batch_size", 1)) != 1:
        raise ValueError(f"batch_size: must be 1, got {record['batch_size']}")
    yield {
        "arrival_ns": seconds_ns(record["arrival_timestamp"]),
        "input_length": int(float(record["prompt_size"])),
        "output_length": int(float(record["token_size"])),
        "request_id": record.get("request_id"),
    }


if __name__ == "__main__":
    main(convert)
