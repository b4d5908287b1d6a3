"""Tair KVCache: token ids of its tokenizer (`token_ids`), and traces of its optimizer (`keys` of 16 tokens each).

Records without a number of generated tokens, or with 0, become requests for one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mooncake_rows import Record, Row, main, seconds_ns, whole_ids

ROWS = count()
KEY_TOKENS = 16


def convert(record: Record) -> Iterator[Row]:
    """Yield the row of a record. Raise ValueError if its keys do not fit its length."""
    if "token_ids" in record:
        ids = record["token_ids"]
        num_prompt, num_output, arrival_ns = len(ids), 1, seconds_ns(record["timestamp"])
    else:
        keys = [key % (1 << 64) for key in record["keys"]]  # they are signed in the file
        num_prompt = record.get("input_len", len(keys) * KEY_TOKENS)
        ids = whole_ids(keys, num_prompt, KEY_TOKENS, next(ROWS))
        num_output, arrival_ns = max(1, record.get("output_len", 0)), record["timestamp_us"] * 1000
    yield {"arrival_ns": arrival_ns, "input_length": num_prompt, "output_length": num_output, "hash_ids": ids}


if __name__ == "__main__":
    main(convert, f"Pass --trace-block-size 1 for token_ids, and {KEY_TOKENS} for keys.")
