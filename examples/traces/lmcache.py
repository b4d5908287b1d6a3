"""Lookup logs of LMCache (`lmcache server --lookup-hash-log-dir`), one file or several with chunks of one size.

A log has `timestamp` in seconds, `seq_len`, `chunk_size` and `chunk_hashes` of whole chunks, and no numbers of
generated tokens: each request generates one. Requests to different models share nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from mooncake_rows import Record, Row, main, seconds_ns, whole_ids

ROWS = count()
NUMBERS: dict[str, int] = {}
"""The hashes in the order in which they are first seen."""
SIZES: set[int] = set()


def convert(record: Record) -> Iterator[Row]:
    """Yield the row of a lookup. Raise ValueError if its chunks have another size than those before."""
    SIZES.add(record["chunk_size"])
    if len(SIZES) > 1:
        raise ValueError(
            f"chunk_size: is {record['chunk_size']}, and others have {min(SIZES - {record['chunk_size']})}"
        )
    ids = [NUMBERS.setdefault(name, len(NUMBERS)) for name in record["chunk_hashes"]]
    yield {
        "arrival_ns": seconds_ns(record["timestamp"]),
        "input_length": record["seq_len"],
        "output_length": 1,
        "hash_ids": whole_ids(ids, record["seq_len"], record["chunk_size"], next(ROWS)),
        "request_id": record.get("request_id"),
        "tenant": record.get("model_name"),
    }


if __name__ == "__main__":
    main(convert, "Each request generates one token. Pass --trace-block-size with the chunk_size of the log.")
