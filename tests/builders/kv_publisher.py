"""`python -m builders.kv_publisher NUM_BATCHES`: a publisher of KV events with a past, for two minutes.

It prints its endpoints when the past is published. Then a batch follows every 10 ms, and `AT_ONCE` more at SIGUSR1.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from itertools import count, islice

from kvarts.core.content import Content
from kvarts.core.events import Event, PagesRemoved, PagesStored
from kvarts.doors.kv_events.batches import KvEventsConfig
from kvarts.doors.kv_events.publisher import open_kv_events

PAGE = 16
PAGES = 64
AT_ONCE = 5000
"""More than may wait for subscribers, and less than the past holds: 22 MiB."""
PAUSE_S = 0.01


def main(num_batches: int) -> None:
    """Publish a sequence of PAGES blocks per batch; beyond `num_batches`, each also removes the oldest one."""
    bursts: list[int] = []
    # A handler, and not a mask with sigtimedwait: threads of libraries imported by now would not have the mask.
    signal.signal(signal.SIGUSR1, lambda number, _: bursts.append(number))
    events = open_kv_events(KvEventsConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0"))
    publisher = events.publisher
    kept: deque[Content] = deque()

    def publish(owner: int) -> None:
        content = Content.from_tokens([owner] * (PAGES * PAGE), page_size=PAGE, owner=owner)
        kept.append(content)
        told: list[Event] = [PagesStored(content, 0, PAGES, None)]
        if len(kept) > num_batches:
            told.append(PagesRemoved(kept.popleft(), 0, PAGES))
        events.reader.observe(told)

    end_s = time.monotonic() + 120  # whatever becomes of the test
    for owner in range(num_batches):
        publish(owner)
    while publisher.num_sent < num_batches:
        time.sleep(PAUSE_S)
    print(f"published at {publisher.endpoint} {publisher.replay_endpoint}", file=sys.stderr, flush=True)
    owners = count(num_batches)
    while time.monotonic() < end_s:
        time.sleep(PAUSE_S)
        num = AT_ONCE if bursts else 1
        bursts.clear()
        for owner in islice(owners, num):
            publish(owner)


if __name__ == "__main__":
    main(int(sys.argv[1]))
