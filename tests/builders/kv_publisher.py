"""`python -m builders.kv_publisher NUM_BATCHES`: a publisher of KV events with a past, for two minutes at most."""

from __future__ import annotations

import sys
import time

from kvarts.content import Content
from kvarts.events import PagesStored
from kvarts.serve.kv_events.config import KvEventsConfig
from kvarts.serve.kv_events.opening import open_kv_events

PAGE = 16
PAGES = 64


def main(num_batches: int) -> None:
    """Store sequences of PAGES blocks, a batch each, and one more every 10 ms."""
    events = open_kv_events(KvEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"))
    publisher, owner = events.publisher, 0
    end_s = time.monotonic() + 120  # whatever becomes of the test
    while time.monotonic() < end_s:
        content = Content.from_tokens([owner] * (PAGES * PAGE), page_size=PAGE, owner=owner)
        events.reader.observe([PagesStored(content, 0, PAGES, None)])
        owner += 1
        if owner == num_batches:
            while publisher.num_sent < num_batches:
                time.sleep(0.01)
            print(f"published at {publisher.endpoint} {publisher.replay_endpoint}", file=sys.stderr, flush=True)
        if owner >= num_batches:
            time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]))
