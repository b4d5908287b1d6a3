"""Workloads of LLMServingSim: a line is a request, or a session with `sub_requests`.

A request has `input_toks`, `output_toks`, `arrival_time_ns` and maybe `input_tok_ids` and `output_tok_ids`; without
ids it shares nothing. A sub-request begins `tool_duration_ns` of the one before after that has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mooncake_rows import Record, Row, main

LINES = count(1)


def convert(record: Record) -> Iterator[Row]:
    """Yield the rows of a line. Raise ValueError if ids and numbers differ."""
    line, calls = next(LINES), record.get("sub_requests")
    session = None if calls is None else record.get("session_id") or f"session_{line}"
    delay_ms: float | None = None
    for call in [record] if calls is None else calls:
        for ids, number in (("input_tok_ids", "input_toks"), ("output_tok_ids", "output_toks")):
            if call.get(ids) is not None and len(call[ids]) != call[number]:
                raise ValueError(f"{ids}: has {len(call[ids])} ids, and {number} is {call[number]}")
        row = {
            "arrival_ns": record["arrival_time_ns"],
            "input_length": call["input_toks"],
            "output_length": call["output_toks"],
            "hash_ids": call.get("input_tok_ids"),
            "output_token_ids": call.get("output_tok_ids"),
            "session_id": session,
            "delay": delay_ms,
        }
        yield {name: value for name, value in row.items() if value is not None}
        delay_ms = call.get("tool_duration_ns", 0) / 1e6


if __name__ == "__main__":
    main(convert, "Pass --trace-block-size 1: an id is a token.")
