"""Types of the numbers in traces, with the bounds that all readers share.

A date is counted from any epoch, such as 1970, and may exceed the latest time of a replay; a span, and the distance
between dates, may not.
"""

# Annotations are evaluated when this module is imported: msgspec would compile their texts one by one.
from typing import Annotated

import msgspec

from kvarts.base.limits import LATEST_NS, MOST_COUNT

__all__ = [
    "MOST_DATE_NS",
    "Count",
    "DateNs",
    "DateSeconds",
    "Priority",
    "SpanMs",
    "SpanNs",
    "SpanSeconds",
    "Tokens",
]

NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000

Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]
Priority = Annotated[int, msgspec.Meta(ge=-MOST_COUNT, le=MOST_COUNT)]
DateSeconds = Annotated[float, msgspec.Meta(ge=0, lt=1e10)]
MOST_DATE_NS = 1 << 62
DateNs = Annotated[int, msgspec.Meta(ge=0, lt=MOST_DATE_NS)]
SpanSeconds = Annotated[float, msgspec.Meta(ge=0, le=LATEST_NS / NS_PER_S)]
SpanMs = Annotated[float, msgspec.Meta(ge=0, le=LATEST_NS / NS_PER_MS)]
SpanNs = Annotated[int, msgspec.Meta(ge=0, le=LATEST_NS)]
