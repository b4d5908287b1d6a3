"""Requests that ServeGen made, as JSON: `timestamp` in seconds and `data` with lengths. Prompts share nothing."""

from __future__ import annotations

from collections.abc import Iterator

from mooncake_rows import Record, Row, main, seconds_ns


def convert(record: Record) -> Iterator[Row]:
    """Yield the row of a record."""
    data = record["data"]
    media = sum(sum(data.get(f"{kind}_tokens", [])) for kind in ("image", "audio", "video"))
    num_prompt = data.get("input_tokens")
    if num_prompt is None:
        num_prompt = data.get("text_tokens", 0) + media
    yield {
        "arrival_ns": seconds_ns(record["timestamp"]),
        "input_length": num_prompt,
        "output_length": data["output_tokens"],
        "request_id": record.get("request_id"),
    }


if __name__ == "__main__":
    main(convert)
