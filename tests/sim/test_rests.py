"""An engine that has run out of work says so once for each moment and each state of its pages."""

from __future__ import annotations

from collections.abc import Sequence

from kvarts.core.config import EngineConfig
from kvarts.core.content import Content
from kvarts.core.events import AtRest, Event
from kvarts.core.request import Request

from builders.engines import make_replica


class Rests:
    wants_details = False

    def __init__(self) -> None:
        self.told: list[AtRest] = []

    def observe(self, events: Sequence[Event]) -> None:
        self.told += [event for event in events if isinstance(event, AtRest)]


def test_what_comes_and_goes_at_one_moment_is_no_other_rest() -> None:
    rests = Rests()
    replica = make_replica(EngineConfig(num_pages=8, page_size=4), readers=[rests])
    made = [Request(index, Content.from_tokens([1] * 9, page_size=4, owner=index), 9, 2) for index in range(4)]
    engine, cache = replica.engine, replica.scheduler.cache
    assert replica.submit(made[0], 0) is None
    replica.run_until(10**9, [])
    engine.log.flush()
    assert len(rests.told) == 1

    def come_and_go(request: Request, now_ns: int, num_pages: int) -> None:
        cache.take(num_pages)  # as a session of these pages does
        assert replica.submit(request, now_ns) is None
        cache.give(num_pages, None)
        replica.cancel(request)
        engine.log.flush()

    come_and_go(made[1], engine.now_ns, 3)
    assert len(rests.told) == 1
    come_and_go(made[2], engine.now_ns + 5, 3)
    assert [rest.time_ns for rest in rests.told] == [engine.now_ns - 5, engine.now_ns], "at another time it is told"
    come_and_go(made[3], engine.now_ns, 7)
    assert len(rests.told) == 3, "one of the pages that were cached is gone"
