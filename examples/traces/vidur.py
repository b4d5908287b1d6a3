"""Traces of Vidur: `arrived_at` in seconds, `num_prefill_tokens`, `num_decode_tokens`. Prompts share nothing.

Without `arrived_at`, as in its traces of lengths, all requests arrive at 0: replay them with --concurrency.
"""

from __future__ import annotations

from collections.abc import Iterator

from mooncake_rows import Record, Row, main, seconds_ns


def convert(record: Record) -> Iterator[Row]:
    """Yield the row of a record."""
    yield {
        "arrival_ns": seconds_ns(record.get("arrived_at", 0)),
        "input_length": int(float(record["num_prefill_tokens"])),
        "output_length": int(float(record["num_decode_tokens"])),
    }


if __name__ == "__main__":
    main(convert)
