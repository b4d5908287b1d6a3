"""`python -m builders.kv_publisher NUM_BATCHES [PAUSE_S]`: a publisher of KV events with a past, for two minutes."""

from __future__ import annotations

import sys
import time
from collections import deque

from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.doors.kv_events.batches import KvEventsConfig
from kvarts.doors.kv_events.publisher import open_kv_events

PAGE = 16
PAGES = 64


def main(num_batches: int, pause_s: float = 0.01) -> None:
    """Store sequences of PAGES blocks, a batch each, and one more after each pause.

    Without a pause so many are kept: each of the later batches also removes the oldest.
    """
    events = open_kv_events(KvEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"))
    publisher, owner = events.publisher, 0
    kept: deque[Content] = deque()
    end_s = time.monotonic() + 120  # whatever becomes of the test
    while time.monotonic() < end_s:
        content = Content.from_tokens([owner] * (PAGES * PAGE), page_size=PAGE, owner=owner)
        kept.append(content)
        told: list[Event] = [PagesStored(content, 0, PAGES, None)]
        if not pause_s and len(kept) > num_batches:
            told.append(PagesRemoved(kept.popleft(), 0, PAGES))
        events.reader.observe(told)
        owner += 1
        if owner == num_batches:
            while publisher.num_sent < num_batches:
                time.sleep(0.01)
            print(f"published at {publisher.endpoint} {publisher.replay_endpoint}", file=sys.stderr, flush=True)
        if owner >= num_batches:
            time.sleep(pause_s)


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
